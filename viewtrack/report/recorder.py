"""Runs a stretch of a program under a tracker and counts what a report tells of it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from typing import Any, TypeVar

import torch

from ..guard_saved import guard_saved_tensors
from ..ledger import key_of, ledger
from ..mode import Record
from ..observing import ObservingTracker
from ..plan import Plan
from ..saved_hooks import SavedTensors
from ..site import Place, issued_in_handler, place_of, site_at
from ..smuggled import Hazard, SmuggledTensors, tensors
from .model import Alias, HazardRow, OpRow, Report, ViewRow, WriteRow
from .unseen import Unseen

Row = TypeVar("Row", ViewRow, WriteRow)


class Recorder:
    """A context manager that tracks what runs inside, and afterwards reports on it.

    Args:
        record: as for `track`. With ``"none"`` no lines are known, and hazards are not looked for.
        guard_saved: whether what autograd saves is guarded, as by `guard_saved_tensors`: backward
            raises `MutatedTensorError` where it was written.

    Example::

        with Recorder() as recorder:
            train_step()
        print(to_text(recorder.report("train_step")))
    """

    def __init__(self, record: Record = "site", *, guard_saved: bool = False) -> None:
        self._record = record
        self._guard_saved = guard_saved
        self._unseen = Unseen()
        self._tracker = ObservingTracker(record, self._observe)
        stack = record == "stack"
        self._smuggled = SmuggledTensors(self._found, stack=stack)
        self._saved = SavedTensors(self._found, stack=stack)
        self._active = ExitStack()
        # Keyed by identities: the hash of a code object runs through all of it.
        self._ops: dict[int, list[Any]] = {}
        self._views: dict[tuple[int, int, int], list[Any]] = {}
        self._writes: dict[tuple[int, str, int, int], list[Any]] = {}
        self._hazards: dict[tuple[Any, ...], list[Any]] = {}

    def __enter__(self) -> Recorder:
        with ExitStack() as entered:  # undone if one of them fails
            entered.enter_context(self._unseen.watch())
            entered.enter_context(self._tracker)
            if self._guard_saved:  # before hooks are watched: its own are not the program's
                entered.enter_context(guard_saved_tensors())
            if self._record != "none":
                entered.enter_context(self._smuggled.calls.watch())
                entered.enter_context(self._saved.watch())
            self._active = entered.pop_all()
        return self

    def __exit__(self, *exc: object) -> None:
        self._active.close()

    def report(self, program: str, ended: str = "") -> Report:
        """The report on what was recorded so far.

        Args:
            program: what ran.
            ended: how it ended.
        """
        return Report(
            program=program,
            ended=ended,
            torch=torch.__version__,
            record=self._record,
            hazards=tuple(HazardRow(*row) for row in self._hazards.values()),
            views=_rows(ViewRow, self._views.values()),
            writes=_rows(WriteRow, self._writes.values()),
            aliases=tuple(Alias(*found) for found in self._tracker.undeclared_aliases.items()),
            ops=tuple(
                sorted(
                    (OpRow(plan.name, n) for plan, n in self._ops.values()),
                    key=lambda row: (-row.count, row.op),
                )
            ),
            threads=tuple(self._unseen.threads),
            processes=self._unseen.processes,
        )

    def _observe(self, func: Any, plan: Plan, args: Any, kwargs: Any, out: Any) -> None:
        _count(self._ops, id(plan), plan)
        if plan.writes and not plan.exchanges_storage:
            self._count_writes(plan, args, kwargs)
        elif plan.views:
            self._count_view(plan, args, kwargs, out)
        if self._record != "none":
            self._smuggled.observe(func, plan, args, kwargs, out)

    def _count_view(self, plan: Plan, args: Any, kwargs: Any, out: Any) -> None:
        in_handler, user = issued_in_handler(sys._getframe(), plan, args)
        if in_handler and _is_view(plan, args, kwargs, out):
            place = place_of(user if self._record != "none" else None, in_handler)
            _count(self._views, (id(plan), id(place[0]), place[1]), plan.name, place)

    def _count_writes(self, plan: Plan, args: Any, kwargs: Any) -> None:
        for argument in plan.writes:
            written = argument.tensors(args, kwargs)
            if written:
                place = self._last_place(written[0])  # all of a list were written from one line
                key = (id(plan), argument.name, id(place[0]), place[1])
                _count(self._writes, key, plan.name, argument.name, place, count=len(written))

    def _last_place(self, t: torch.Tensor) -> Place:
        entry = ledger.entry(t) if self._record != "none" else None
        return (entry.last_place if entry is not None else None) or place_of(None)

    def _found(self, hazard: Hazard) -> None:
        # A loop adds one more write each time it comes round: still the same hazard.
        writes = frozenset((write.op, write.argument, write.site) for write in hazard.writes)
        key = (hazard.op, hazard.saved, hazard.keeper, writes, hazard.use)
        _count(self._hazards, key, hazard)


def _is_view(plan: Plan, args: Any, kwargs: Any, out: Any) -> bool:
    """Whether an output lies in an argument's memory; `reshape` and its like may have copied."""
    bases = {
        key_of(base)
        for output in plan.views
        for argument in output.arguments
        for base in argument.tensors(args, kwargs)
    }
    return any(key_of(t) in bases for t in tensors(out))


def _count(rows: dict[Any, list[Any]], key: Any, *values: Any, count: int = 1) -> None:
    """Add to the last item of the row at `key`, which begins with `values`."""
    row = rows.get(key)
    if row is None:
        rows[key] = [*values, count]
    else:
        row[-1] += count


def _rows(make: Callable[..., Row], counted: Iterable[list[Any]]) -> tuple[Row, ...]:
    """Rows of a table from names, place and count, the places of one line taken together."""
    merged: dict[Any, list[Any]] = {}
    for *names, place, count in counted:
        key = (*names, site_at(place))
        _count(merged, key, *key, count=count)
    rows = (make(*row) for row in merged.values())
    return tuple(
        sorted(rows, key=lambda row: (-row.count, row.site.filename, row.site.lineno, row.op))
    )
