"""Before a write: who watches what is about to be written, and whether it may be.

A sparse tensor has no storage, and is known by itself; but what is written through another that
shares its values reaches it, so there the storage of the values counts as well.
"""

from __future__ import annotations

import threading
from typing import Any

import torch

from .errors import MutatedTensorError
from .info import version
from .ledger import Write, key_of
from .overlap import overlaps, region_of
from .plan import Plan
from .site import caller
from .watch import Watch, watched, watches_on

Watching = dict[int, list[Watch]]
"""The watches on the storages that an op writes, by id of the tensor that it writes."""


def watches_reached(plan: Plan, args: Any, kwargs: Any, *, is_counted: bool = False) -> Watching:
    """The watches on what an op is about to write: it may exchange the storage (`set_`).

    Args:
        plan: the plan of the op.
        args: its positional arguments.
        kwargs: its keyword arguments.
        is_counted: as for `before_write`.

    Raises:
        MutatedTensorError: the write would reach a tensor that is protected.
    """
    found = {}
    for argument in plan.writes:
        for t in argument.tensors(args, kwargs):
            if key_of(t) in watched:
                found[id(t)] = before_write(
                    t, watches_on(t), plan, argument.name, is_counted=is_counted
                )
            elif t.layout is not torch.strided and (values := values_of(t)) is not None:
                found[id(t)] = before_write(values, watches_on(values), plan, argument.name)
    return found


_SPARSE = (
    *(torch.sparse_coo, torch.sparse_csr, torch.sparse_csc),
    *(torch.sparse_bsr, torch.sparse_bsc),
)
_values: Any = torch.ops.aten._values.default
_compressed_values: Any = torch.ops.aten.values.default


def values_of(t: torch.Tensor) -> torch.Tensor | None:
    """The values of a sparse tensor; None of another."""
    values = _values if t.layout is torch.sparse_coo else _compressed_values
    try:
        return values(t) if t.layout in _SPARSE else None
    except (RuntimeError, NotImplementedError):  # fake, or wrapped
        return None


def before_write(
    t: torch.Tensor, watches: list[Watch], plan: Plan, argument: str, *, is_counted: bool = False
) -> list[Watch]:
    """Make ready for a write to t: refuse it if it would reach a tensor that is protected.

    Args:
        t: what an op is about to write.
        watches: the watches on its storage.
        plan: the plan of the op.
        argument: the argument that t is.
        is_counted: whether the counter has been moved for this write already.

    Returns:
        The watches that have yet to be told of it.

    Raises:
        MutatedTensorError: a tensor is protected.
    """
    region = region_of(t)
    safe = []
    for watch in watches:
        if not (watch.forbidden or watch.copies):
            continue
        # A change of sizes or storage reaches no byte, and so no other alias.
        if not (watch.is_of(t) if plan.changes_metadata else overlaps(watch.region, region)):
            continue
        if watch.before_write(t, is_counted):
            safe.append(watch)
        if watch.forbidden:
            saved, now = watch.saved, version(t)
            site, thread = caller(2), threading.current_thread().name
            raise MutatedTensorError(
                f"`{plan.name}({argument})` would write to {saved.op}, protected at {saved.site}; "
                f"nothing has been mutated yet. Write to a `.clone()`, or outside of `protect`",
                saved=saved,
                writes=[Write(plan.name, argument, site, thread, now, now, region, 0)],
            )
    return [watch for watch in watches if watch not in safe] if safe else watches
