"""Watching tensors that somebody keeps: which writes reached them since.

A `Watch` is laid on a kept tensor. Modes that see a write to its storage note it there, with its
line, if it reached the kept bytes. Writes that no mode saw still move the version counter, which
the kept tensor shares; so the watch keeps account of how far the counter has come by writes that
were noted, and the rest was written unseen. Where a later version is lower than an earlier one the
writes in between were taken back (``torch.autograd._unsafe_preserve_version_counter``), and they do
not count.

A kept tensor that does not fill its storage may have neighbours there, and of an unseen write it
cannot be told whom it reached. There the watch keeps a fingerprint of the bytes, and asks it.
"""

from __future__ import annotations

import re
import threading
import weakref
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from . import _torch
from ._torch.dynamo import skip_dynamo
from .aliasing import shape_of
from .fingerprint import fingerprint, same_bytes
from .info import version
from .ledger import Region, Write, key_of
from .overlap import overlaps, region_of
from .plan import Plan
from .saved import Saved
from .sharing import share_a_counter
from .site import UNKNOWN, Place, Site, site_at

#: How many writes that reached a kept tensor are kept in full, the first ones; all are counted. As
#: many again by another op or line than those: a loop does not crowd them out.
WRITES_KEPT = 32
_ALIASES_KEPT = 16

UNSEEN = "an op that no mode saw"
RAW = "no op that PyTorch saw"
EXCHANGED = "an exchange of its storage or sizes"
EMPTIED = "a resize of its storage"


class Watch:
    """Watches one kept tensor until it is released, or dies.

    Args:
        t: what is kept. Its storage must outlive the watch, or `release` be called when it dies.
        op: the op that made it, or a label.
        place: the line that saved it.
        content: whether bytes decide, and not writes.
        counter: a tensor that shares t's version counter and is kept instead of t.

    Attributes:
        tensor: `counter`, or `t`.
        forbidden: whether a write to it shall raise before it is done.
        copies: whether it keeps a copy of what is about to be written.
    """

    copies: bool = False

    __slots__ = (
        "__weakref__",
        "_aliases",
        "_content",
        "_digest",
        "_due",  # what threads have noted and may not have counted yet
        "_key",
        "_last",
        "_last_write",
        "_more",
        "_nbytes",
        "_op",
        "_place",
        "_reached",
        "_region",
        "_shape",
        "forbidden",
        "tensor",
    )

    def __init__(
        self,
        t: torch.Tensor,
        op: str,
        place: Place,
        *,
        content: bool = False,
        counter: torch.Tensor | None = None,
    ) -> None:
        # Made for each tensor that a checkpointed region keeps: what can wait until somebody asks
        # does, and is then read from the kept tensor.
        self.tensor = t if counter is None else counter
        self.forbidden = False
        self._op = op
        self._place = place
        self._shape: tuple[torch.dtype, Any] | None = None
        self._region: Region | None = None
        if counter is not None:
            self._shape, self._region = (t.dtype, shape_of(t)), region_of(t)
        try:
            self._last: int | None = t._version
        except RuntimeError:  # an inference tensor
            self._last = None
        self._last_write: tuple[str, Site, str, int] | None = None
        self._due: dict[int, int] | None = None
        self._reached: list[tuple[Write, int | None]] | None = None
        self._aliases: dict[Any, str] | None = None
        self._more = 0
        self._content = content
        self._digest: Any = None
        self._key, self._nbytes = _key_and_size(t)
        if content or (self._nbytes is not None and t.numel() * t.element_size() < self._nbytes):
            self._digest = fingerprint(t)
        key = self._key
        others = watched.get(key)
        watched[key] = (weakref.ref(self),) if others is None else (*others, weakref.ref(self))

    @skip_dynamo
    def __del__(self) -> None:
        self.release()

    @property
    def key(self) -> int:
        """The key of the storage it watches."""
        return self._key

    @property
    def region(self) -> Region | None:
        """The part of the storage that it watches."""
        if self._region is None and self._shape is None:
            self._region = region_of(self.tensor)
        return self._region

    @property
    def saved(self) -> Saved:
        """The record of what is kept."""
        dtype, shape = self._shape or (self.tensor.dtype, shape_of(self.tensor))
        return Saved(self._op, dtype, tuple(shape), site_at(self._place))

    @property
    def has_fingerprint(self) -> bool:
        """Whether the tensor itself is needed to tell what reached it."""
        return self._digest is not None

    def rename(self, op: str) -> None:
        """Call what is kept by another name."""
        self._op = op

    def ignore_size(self) -> None:
        """Let the storage be emptied, since it is filled again before it is used."""
        self._nbytes = None

    def release(self) -> None:
        """Stop watching."""
        with _lock:
            refs = watched.get(self._key, ())
            alone = len(refs) == 1 and refs[0]() in (self, None)
            left = () if alone else tuple(ref for ref in refs if ref() not in (self, None))
            if left:
                watched[self._key] = left
            else:
                watched.pop(self._key, None)

    def note(
        self,
        write: Write,
        before: int | None,
        after: int | None,
        reached: bool,
        *,
        is_due: bool = False,
    ) -> None:
        """Take account of a write to the storage, that moved the kept counter so, or is due to."""
        if after is not None and before is not None and self._last is not None:
            thread = threading.get_ident()
            key = write.op, write.site, write.thread, before
            # An op that writes several views of one storage is noted once for each.
            if after != self._last or self._last_write != key:
                self._catch_up(before)
                self._last += after - before
                if is_due:
                    self._due = {**(self._due or {}), thread: after - before}
            self._last_write = key
        if reached and self.minds(write):
            self._add(write, None if before == after else after)

    def minds(self, write: Write) -> bool:
        """Whether a write that reached the kept bytes is a mutation."""
        return True

    def is_of(self, t: torch.Tensor) -> bool:
        """Whether it minds what becomes of t itself; a plain watch minds bytes alone."""
        return False

    def note_change(self, write: Write) -> None:
        """Take account of an op that gave what `is_of` tells another storage, or other sizes."""

    def before_write(self, t: torch.Tensor, is_counted: bool) -> bool:
        """Make ready for a write through t, as `watches_reached`; tell whether it does no harm."""
        return False

    def through(self, region: Region | None) -> str | None:
        """The view op that made an alias of this geometry, if one was seen."""
        if self._aliases is None or region is None:
            return None
        return self._aliases.get((region.offset, region.size, region.stride))

    def add_alias(self, t: torch.Tensor, op: str) -> None:
        """Note the view op that made an alias of the kept tensor."""
        if self._aliases is None:
            self._aliases = {}
        if len(self._aliases) < _ALIASES_KEPT:
            self._aliases.setdefault((t.storage_offset(), tuple(t.size()), t.stride()), op)

    def is_clean(self) -> bool:
        """Whether nothing at all has happened to the storage; if not, `writes` tells."""
        t = self.tensor
        return (
            not self._reached
            and not self._content
            and version(t) == self._last
            and (self._nbytes is None or t.untyped_storage().nbytes() == self._nbytes)
        )

    def writes(self, t: torch.Tensor | None = None) -> tuple[list[Write], int]:
        """What reached the kept bytes, in order, and how many more writes were not kept in full.

        Args:
            t: the kept tensor, where the watch keeps a counter only; without it bytes are not
                looked at.
        """
        with _lock:
            now = version(self.tensor)
            if now is not None and self._last is not None:
                self._catch_up(now)
            found = [write for write, _ in self._reached or ()]
            more = self._more
        kept = self.tensor if t is None and self._shape is None else t
        if self._nbytes is not None and kept is not None and _reaches_beyond(kept, self._nbytes):
            return [*found, unplaced(EMPTIED, now, now)], more
        seen = [write for write in found if write.op != UNSEEN]
        if self._digest is None or ((seen or not found) and not self._content):
            return found, more
        t = self.tensor if t is None else t
        if same_bytes(fingerprint(t), self._digest):
            with _lock:  # what no mode saw so far went elsewhere
                self._reached = [item for item in self._reached or () if item[0].op != UNSEEN]
            return [], 0
        return found or [unplaced(RAW, now, now)], more

    def noted(self) -> list[Write]:
        """The writes that a mode saw reach the kept bytes, whatever the bytes are by now."""
        with _lock:
            return [write for write, _ in self._reached or () if write.op != UNSEEN]

    def _catch_up(self, now: int) -> None:
        """Account for what happened to the counter since the last noted write."""
        last = self._last
        if last is None or now == last:
            self._due = None
            return
        if self._due is not None:
            self._due.pop(threading.get_ident(), None)  # it has come back from that op since
            if last - sum(self._due.values()) <= now < last:
                return
        if now < last:
            self._reached = [item for item in self._reached or () if (item[1] or 0) <= now]
        else:
            self._add(unplaced(UNSEEN, last, now), now)
        self._last = now

    def _add(self, write: Write, moved_to: int | None) -> None:
        if self._reached is None:
            self._reached = []
        kept = len(self._reached)
        if kept < WRITES_KEPT or (kept < 2 * WRITES_KEPT and self._is_another(write)):
            self._reached.append((write, moved_to))
        else:
            self._more += 1

    def _is_another(self, write: Write) -> bool:
        known = {(other.op, other.site) for other, _ in self._reached or ()}
        return write.op != UNSEEN and (write.op, write.site) not in known


watched: dict[int, tuple[weakref.ref[Watch], ...]] = {}
"""The living watches by the key of the storage they watch."""

_lock = threading.RLock()


def unplaced(op: str, before: int | None, after: int | None) -> Write:
    """The record of a write of which nothing is known but the versions around it."""
    return Write(op, "", UNKNOWN, "", before, after, None, 0)


def _key_and_size(t: torch.Tensor) -> tuple[int, int | None]:
    """The key of t's storage, and how many bytes that has; None if there is none."""
    try:
        if _torch.has_storage(t):  # of a lazy tensor nothing more may be asked
            storage = t.untyped_storage()
            return storage._cdata, storage.nbytes()
    except (RuntimeError, NotImplementedError):
        pass
    return key_of(t), None


def _reaches_beyond(t: torch.Tensor, nbytes: int) -> bool:
    """Whether t's storage, which had so many bytes, has too few for t by now."""
    size = t.untyped_storage().nbytes()
    if size >= nbytes or not t.numel():
        return False
    last = sum((n - 1) * step for n, step in zip(t.size(), t.stride(), strict=True))
    return bool((t.storage_offset() + last + 1) * t.element_size() > size)


def parts(value: Any) -> Iterator[torch.Tensor]:
    """A tensor and, of a wrapper subclass that can tell, the tensors in it."""
    if isinstance(value, torch.Tensor):
        yield value
        flatten = getattr(value, "__tensor_flatten__", None)
        if flatten is not None:
            for name in flatten()[0]:
                yield from parts(getattr(value, name))


def watches_on(t: Any) -> list[Watch]:
    """The watches on t's storage."""
    return [w for ref in watched.get(key_of(t), ()) if (w := ref()) is not None]


def note_write(
    t: torch.Tensor,
    watches: Iterable[Watch],
    plan: Plan,
    facts: tuple[str, str, Place, str, int | None, int | None],
    counted: bool,
) -> None:
    """Note a write that was done to `t`.

    Args:
        t: what was written.
        watches: the watches on its storage.
        plan: the plan of the op that wrote it.
        facts: op, argument, place, thread, versions before and after.
        counted: whether a kernel above has yet to move the counter, by one.
    """
    op, argument, place, thread, before, after = facts
    # A change of sizes, strides or storage leaves every byte where it is.
    region = None if plan.changes_metadata else region_of(t)
    write = Write(op, argument, site_at(place), thread, before, after, region, 0)
    moved = 0 if before is None or after is None else after - before
    with _lock:
        for watch in watches:
            reached = not plan.changes_metadata and overlaps(watch.region, region)
            if plan.changes_metadata and watch.is_of(t):
                watch.note_change(write)
            now = version(watch.tensor)
            if now is not None and moved and share_a_counter(t, watch.tensor):
                end = now + moved if counted else now
                watch.note(write, end - moved, end, reached, is_due=counted)
            else:
                watch.note(write, now, now, reached)


def note_alias(args: Any, out: Any, op: str) -> None:
    """Note the view op that made `out` of a watched tensor, the first of `args`."""
    base = args[0] if args else None
    if not isinstance(base, torch.Tensor) or key_of(base) not in watched:
        return
    for t in out if isinstance(out, (list, tuple)) else (out,):
        if isinstance(t, torch.Tensor) and t is not base and key_of(t) == key_of(base):
            for watch in watches_on(base):
                watch.add_alias(t, op)


def is_allowed(write: Write, allowed: Iterable[str]) -> bool:
    """Whether a write is by one of some ops, named with or without their overload."""
    return any(write.op == name or write.op.rpartition(".")[0] == name for name in allowed)


# Applied to their own result these change nothing.
_IDEMPOTENT = re.compile(
    r"aten\.(relu|relu6|hardtanh|clamp|clamp_min|clamp_max|clip|abs|sign|sgn|round|floor|ceil|trunc"
    r"|masked_fill|fill|zero|tril|triu|nan_to_num)_\."
)


def is_idempotent(op: str) -> bool:
    """Whether an op, done again to its own result, leaves it as it is."""
    return _IDEMPOTENT.match(op) is not None
