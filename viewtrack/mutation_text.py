"""The text of a `MutatedTensorError`: what was saved, what wrote to it and where, and the mend."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from .aliasing import dims
from .errors import MutatedTensorError
from .ledger import Write
from .saved import Saved
from .site import UNKNOWN, Site, with_source
from .watch import EMPTIED, EXCHANGED, RAW, UNSEEN, Watch, is_idempotent


@dataclass(frozen=True, slots=True)
class Mutation:
    """One kept tensor, and the writes that reached it.

    Attributes:
        watch: the watch that found them.
        writes: the writes, in order.
        more: how many further writes were counted and not kept.
    """

    watch: Watch
    writes: Sequence[Write]
    more: int = 0


def mutation_error(
    subject: str, mutations: Sequence[Mutation], allow: str, notes: Sequence[str] = ()
) -> MutatedTensorError:
    """Make the error that tells of mutations.

    Args:
        subject: what the tensors are, "a tensor cached by selective checkpointing".
        mutations: the first is the one that was about to be used.
        allow: how a reader allows an op, with `{op}` in it; empty where that cannot be done.
        notes: what else has changed, a line each.
    """
    lines = [f"{subject} has been mutated before it was reused"]
    lines += [f"  {'changed':9} {note}" for note in notes]
    for mutation in mutations:
        kept = mutation.watch.saved
        lines.append(_row("saved", f"{kept.op} -> {brief(kept.dtype, kept.shape)}", kept.site))
        for write, count in _grouped(mutation):
            lines += _written(mutation.watch, write)
            if count > 1:
                times = "once more" if count == 2 else f"{count - 1} more times"
                lines.append(f"  {'':9} ... {times}")
        if mutation.more:
            lines.append(f"  {'':9} and {mutation.more} more writes")
    writes = [write for mutation in mutations for write in mutation.writes]
    lines += _mends(writes, allow)
    saved = mutations[0].watch.saved if mutations else None
    return MutatedTensorError("\n".join(lines), saved=saved, writes=writes)


def _row(head: str, what: str, site: Site) -> str:
    return f"  {head:9} {what:36}  {'' if site == UNKNOWN else with_source(site)}".rstrip()


def _grouped(mutation: Mutation) -> Iterator[tuple[Write, int]]:
    """The first write of each op, line and way, and how many there were: a loop is told once."""
    counts: dict[Any, int] = {}
    firsts: dict[Any, Write] = {}
    for index, write in enumerate(mutation.writes):
        way = write.argument, write.thread, mutation.watch.through(write.region)
        key = (write.op, write.site, way) if write.site != UNKNOWN else index
        firsts.setdefault(key, write)
        counts[key] = counts.get(key, 0) + 1
    return ((write, counts[key]) for key, write in firsts.items())


def _written(watch: Watch, write: Write) -> list[str]:
    if write.op == RAW:
        return [
            _row("written", "its bytes changed, and no op that PyTorch saw wrote them", UNKNOWN)
        ]
    if write.op == EXCHANGED:
        return [_row("written", f"by {EXCHANGED} (set_, .data =, resize_)", UNKNOWN)]
    if write.op == EMPTIED:
        return [_row("written", f"by {EMPTIED}, which has too few bytes for it now", UNKNOWN)]
    versions = f"version {write.version_before} -> {write.version_after}"
    if write.op == UNSEEN:
        return [_row("written", f"by {UNSEEN}, {versions}", UNKNOWN)]
    through = watch.through(write.region)
    details = [
        *([f"through {through}"] if through else []),
        *([versions] if write.version_after is not None else []),
        f"thread {write.thread}",
        *(["idempotent"] if is_idempotent(write.op) else []),
    ]
    row = _row("written", f"{write.op}({write.argument})", write.site)
    return [row, f"  {'':9} {', '.join(details)}"]


def _mends(writes: Sequence[Write], allow: str) -> list[str]:
    mends: dict[str, None] = {}
    for write in writes:
        mends[_mend(write, allow)] = None
    return [f"  {'mend' if not index else '':9} {mend}" for index, mend in enumerate(mends)]


def _mend(write: Write, allow: str) -> str:
    if write.op in (UNSEEN, EXCHANGED):
        return "run it under viewtrack.track(), in every thread, to learn the line"
    if write.op == EMPTIED:
        return "look for `untyped_storage().resize_`, and fill the storage again before it is used"
    if write.op == RAW:
        return "look for numpy, a raw pointer or a kernel that does not declare what it mutates"
    name = write.op.rpartition(".")[0]
    instead = "use the out-of-place op" if name.endswith("_") else "write to a copy"
    mend = f"{instead} on line {write.lineno}"
    return f"{mend}, or {allow.format(op=name)}" if allow else mend


def brief(dtype: torch.dtype, shape: Any) -> str:
    """Dtype and shape in the short form of a dump, ``f32[2, 3]``."""
    short = str(dtype).removeprefix("torch.")
    short = re.sub(r"^(bfloat|float|complex|uint|int)(?=\d)", lambda m: _SHORT[m[0]], short)
    return f"{short}[{dims(shape)}]"


_SHORT = {"bfloat": "bf", "float": "f", "complex": "c", "int": "i", "uint": "u"}

__all__ = ["Mutation", "Saved", "brief", "mutation_error"]
