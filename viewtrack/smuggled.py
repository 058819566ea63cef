"""Smuggled tensors that were written before they were used again.

A handler may keep a tensor beyond its call: the result of the op it was called for, or an alias of
it. Autograd knows nothing of that, so nothing stops the program from overwriting the memory. It is
harmless as long as the kept tensor is only looked at, and a hazard once a handler answers an op
with it instead of running the op, as a cache does.

So for each tensor that an op returns while a handler is running it is noted how often its storage
had been written (the ledger knows), and in which handler call that was. A handler call hands out a
kept tensor if the op that it was called for was not run in it, and what it returns was made in an
earlier call and lies in none of its arguments; or if it reads such a tensor, once the result of
that same op, to make what it returns. Writes that the keeping mode did itself do not count: it
knows of them. One that replaces the whole content ends what came before, as where a pool of output
buffers is filled anew for each call.
"""

from __future__ import annotations

import re
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any

import torch

from .aliasing import dims, shape_of
from .handler_calls import HandlerCall, HandlerCalls, caller_of
from .ledger import WRITES_KEPT, Entry, Region, Write, key_of, ledger
from .overlap import covers, overlaps, region_of
from .plan import Plan
from .site import Place, Site, place_of, site_at, user_frame

# Of how many tensors in one storage it is known when they were made: of the last ones.
TENSORS_KEPT = 256

# Of how many aliases of one storage that no schema tells of it is known what made them.
ALIASES_KEPT = 16

# What these return has no content yet: a mode may well hand out memory that it kept.
_NO_CONTENT = frozenset(
    {
        "aten::empty",
        "aten::empty_like",
        "aten::empty_permuted",
        "aten::empty_strided",
        "aten::new_empty",
        "aten::new_empty_strided",
    }
)


# In-place ops that do not look at what was there before.
_REPLACES_CONTENT = frozenset(
    f"aten::{name}_"
    for name in (
        *("copy", "fill", "zero", "_foreach_copy", "_foreach_zero"),
        *("bernoulli", "cauchy", "exponential", "geometric", "log_normal", "normal", "random"),
        "uniform",
    )
)


@dataclass(frozen=True, slots=True)
class Hazard:
    """A tensor that was kept, then written, then used again.

    Attributes:
        op: the op whose result was kept, ``aten.mm.default``; empty where that is not known.
        result: dtype and shape of what was kept, ``f32[2, 3]``.
        saved: the line that called the op.
        keeper: who kept it, a class of dispatch modes or a hook; empty where that is not known.
        writes: the writes that reached it since, oldest first.
        use: how it was used again.
        used: the line that led to that.
        through: for each write the op that returned what was written as an alias of what was kept
            without its schema saying so, ``aten._unsafe_view.default``; empty where there was none.
    """

    op: str
    result: str
    saved: Site
    keeper: str
    writes: tuple[Write, ...]
    use: str
    used: Site
    through: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class _Made:
    """A tensor that an op returned while a handler was running."""

    count: int  # of the writes to its storage at that time
    serial: int  # of the handler call
    op: str
    place: Place
    keeper: type | None  # the mode whose handler made it itself, beside passing the op on
    is_alias: bool = False  # an alias, made later, of what was kept and written


@dataclass(frozen=True, slots=True)
class _Kept:
    """A tensor that was made in an earlier handler call, and written since."""

    made: _Made
    result: str
    writes: tuple[Write, ...]
    entry: Entry


@dataclass(frozen=True, slots=True)
class _Writer:
    """The mode whose handler did a write, and whether it left nothing of what was there before."""

    mode: type
    replaces: bool


class _Notes:
    """What is noted of one storage."""

    def __init__(self) -> None:
        self.made: dict[int, _Made] = {}  # by id of the tensor; a new one at that id is noted anew
        self.writers: dict[int, _Writer] = {}  # by number of the write, where a handler wrote
        self.aliases: dict[Region | None, str] = {}  # what no schema tells of, and the op
        self.told: set[tuple[str, Site]] = set()  # op and line of writes that made a hazard

    def add_made(self, t: torch.Tensor, made: _Made) -> None:
        self.made.pop(id(t), None)
        self.made[id(t)] = made
        if len(self.made) > TENSORS_KEPT:
            del self.made[next(iter(self.made))]

    def add_writer(self, count: int, writer: _Writer) -> None:
        self.writers[count] = writer
        self.writers.pop(count - WRITES_KEPT, None)


class SmuggledTensors:
    """Finds hazards, told of every op and of every handler call that returns.

    Args:
        found: called with each hazard.
        stack: whether the lines of a hazard come with their Python stacks.

    Attributes:
        calls: the handler calls that are running.
    """

    def __init__(self, found: Callable[[Hazard], None], *, stack: bool = False) -> None:
        self.calls = HandlerCalls(self._returned, self._raised)
        self._found = found
        self._stack = stack

    def observe(self, func: Any, plan: Plan, args: Any, kwargs: Any, out: Any) -> None:
        """Note an op that has just run at the bottom of the mode stack."""
        if plan.may_alias_undeclared:
            _note_aliases(plan, args, kwargs, out)
        innermost = self.calls.innermost
        if innermost is None:
            return
        issuer = self.calls.issuer(func)
        call = issuer or innermost
        if call.place is None:
            call.place = self._place(call, innermost)
        inputs = list(tensors((args, kwargs)))
        if issuer is not None:
            _note_writes(plan, args, kwargs, inputs, type(issuer.mode))
            if not _only_views(plan, inputs, out):
                kept = (self._kept(t, issuer) for t in inputs)
                issuer.reads.extend(read for read in kept if read is not None)
        for t in tensors(out):
            if not any(t is given for given in inputs):
                made = self._made(t, call, issuer, inputs, innermost.serial)
                notes_in(ledger.open(t)).add_made(t, made)

    def _made(
        self,
        t: torch.Tensor,
        call: HandlerCall,
        issuer: HandlerCall | None,
        inputs: list[torch.Tensor],
        serial: int,
    ) -> _Made:
        op, place, keeper = str(call.func), call.place, None
        if issuer is not None:
            keeper = type(issuer.mode)
            entry = ledger.entry(t)
            for given in inputs:  # an alias: what counts is where its base came from
                base = _made_of(given)
                if base is not None and ledger.entry(given) is entry:
                    if self._kept(given, issuer) is not None:
                        return replace(base, is_alias=True)
                    op, place = base.op, base.place
                    break
        return _Made(ledger.count(t), serial, op, place or place_of(None), keeper)

    def _returned(self, call: HandlerCall, out: Any) -> None:
        """Look whether what a handler returned is something it kept, and was written since."""
        if call.has_run or _has_no_content(call.func):
            return
        returned = [kept for t in tensors(out) if (kept := self._kept(t, call)) is not None]
        itself = [kept for kept in returned if not kept.made.is_alias]
        for kept in itself or self._of_same_op([*returned, *call.reads], call):
            self._tell(kept, call, f"in place of {call.func}")

    def _raised(self, call: HandlerCall, error: Exception) -> None:
        """Look for what made a handler raise: many caches check, and cannot tell who wrote."""
        if call.has_run:
            return
        found = [self._kept(t, call) for t in _held_by_frames(error.__traceback__)]
        for kept in self._of_same_op({id(k.made): k for k in found if k}.values(), call):
            how = f"in place of {call.func}, but it raised {type(error).__name__}: {error}"
            self._tell(kept, call, how)

    def _of_same_op(self, kept: Iterable[_Kept], call: HandlerCall) -> list[_Kept]:
        return [k for k in kept if k.made.op == str(call.func)]

    def _tell(self, kept: _Kept, call: HandlerCall, how: str) -> None:
        made = kept.made
        notes_in(kept.entry).told.update((write.op, write.site) for write in kept.writes)
        self._found(
            Hazard(
                op=made.op,
                result=kept.result,
                saved=site_at(made.place),
                keeper=name_of(made.keeper) if made.keeper is not None else "",
                writes=kept.writes,
                use=f"by {name_of(type(call.mode))} {how}",
                used=site_at(call.place or self._place(call, call)),
                through=through(kept.entry, kept.writes),
            )
        )

    def _kept(self, t: torch.Tensor, call: HandlerCall) -> _Kept | None:
        """What is known of t if it was kept from before `call`, and written since."""
        entry, made = ledger.entry(t), _made_of(t)
        if entry is None or made is None or made.serial >= call.serial:
            return None  # not kept, or not from before
        if entry.count == made.count:
            return None
        if any(ledger.entry(given) is entry for given in tensors((call.args, call.kwargs))):
            return None
        writes = _writes_of_others(entry, made, t, (made.keeper, type(call.mode)))
        if not writes:
            return None
        return _Kept(made, brief(t), writes, entry)

    def _place(self, call: HandlerCall, innermost: HandlerCall) -> Place:
        frame = user_frame(caller_of(call, innermost, sys._getframe()))
        return place_of(frame, stack=self._stack)


def _note_aliases(plan: Plan, args: Any, kwargs: Any, out: Any) -> None:
    """Note what an op returned that lies in memory of which somebody may have kept an alias."""
    for t in tensors(out):
        entry = ledger.entry(t)
        if entry is not None and entry.notes is not None:
            aliases = entry.notes.aliases
            if len(aliases) < ALIASES_KEPT and all(t is not a for a in tensors((args, kwargs))):
                aliases.setdefault(region_of(t), plan.name)


def through(entry: Entry, writes: Iterable[Write]) -> tuple[str, ...]:
    """For each write the op that made the alias which was written, if no schema tells of it."""
    aliases = notes_in(entry).aliases
    return tuple(aliases.get(write.region, "") for write in writes)


def _note_writes(
    plan: Plan, args: Any, kwargs: Any, inputs: list[torch.Tensor], mode: type
) -> None:
    """Note that the handler of `mode` did the writes of an op that has just run."""
    written = [(a, t) for a in plan.writes for t in a.tensors(args, kwargs)]
    given, left = Counter(map(key_of, inputs)), Counter(key_of(t) for _, t in written)
    read = given - left  # storages that the op was also given to read
    replacing = plan.qualified.partition(".")[0] in _REPLACES_CONTENT
    for argument, t in written:
        key = key_of(t)
        left[key] -= 1  # how many more of its writes to the same storage the ledger has
        replaces = (argument.kwarg_only or replacing) and key not in read
        notes_in(ledger.open(t)).add_writer(ledger.count(t) - left[key], _Writer(mode, replaces))


def _writes_of_others(
    entry: Entry, made: _Made, t: torch.Tensor, own: tuple[type | None, ...]
) -> tuple[Write, ...]:
    """The writes that reached `t` since it was made, less those that the modes in `own` know of."""
    writers, region = notes_in(entry).writers, region_of(t)
    found: list[Write] = []
    for write in writes_since(entry, made.count, t):
        writer = writers.get(write.count)
        if writer is None or writer.mode not in own:
            found.append(write)
        elif writer.replaces and covers(write.region, region):
            found.clear()
    return tuple(found)


def _only_views(plan: Plan, inputs: list[torch.Tensor], out: Any) -> bool:
    """Whether an op made nothing but aliases, and so has not looked at any content."""
    if not plan.views or plan.writes:
        return False
    keys = {key_of(t) for t in inputs}
    return all(key_of(t) in keys for t in tensors(out))


def _made_of(t: torch.Tensor) -> _Made | None:
    entry = ledger.entry(t)
    return notes_in(entry).made.get(id(t)) if entry is not None else None


def notes_in(entry: Entry) -> _Notes:
    """The notes in a ledger entry, made if need be."""
    if entry.notes is None:
        entry.notes = _Notes()
    notes: _Notes = entry.notes
    return notes


def is_told(entry: Entry, writes: Iterable[Write]) -> bool:
    """Whether a hazard that lies in the same writes to this storage was found before.

    A cache hands out a tensor that was written, the recompute saves it for backward: that is one
    hazard and not two.
    """
    return {(write.op, write.site) for write in writes} <= notes_in(entry).told


def writes_since(entry: Entry, count: int, t: torch.Tensor) -> list[Write]:
    """The known writes after the first `count`, so far as they reached the memory of `t`."""
    region = region_of(t)
    return [w for w in entry.writes if w.count > count and overlaps(w.region, region)]


def tensors(value: Any) -> Iterator[torch.Tensor]:
    """The tensors in nested tuples, lists and dicts."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from tensors(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from tensors(item)


def name_of(named: Any) -> str:
    """A class or function by its name, without the functions that it was made in."""
    return str(getattr(named, "__qualname__", type(named).__qualname__)).rpartition("<locals>.")[2]


def brief(t: torch.Tensor) -> str:
    """Dtype and shape of t in the short form of a dump, ``f32[2, 3]``."""
    dtype = str(t.dtype).removeprefix("torch.")
    return _DTYPE.sub(lambda kind: _SHORT[kind[0]], dtype) + f"[{dims(shape_of(t))}]"


_SHORT = {"bfloat": "bf", "float": "f", "complex": "c", "int": "i", "uint": "u"}
_DTYPE = re.compile(r"^(bfloat|float|complex|uint|int)(?=\d)")


def _held_by_frames(traceback: TracebackType | None) -> Iterator[torch.Tensor]:
    """The tensors in the local variables of a traceback, and in the attributes of those."""
    while traceback is not None:
        for value in list(traceback.tb_frame.f_locals.values()):
            yield from tensors(value)
            if not isinstance(value, (torch.Tensor, type)):
                yield from tensors(list(getattr(value, "__dict__", {}).values()))
        traceback = traceback.tb_next


def _has_no_content(func: Any) -> bool:
    schema = getattr(func, "_schema", None)
    return schema is not None and schema.name in _NO_CONTENT
