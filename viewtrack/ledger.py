"""The ledger: who wrote to which storage.

A storage is known by a weak reference to its Python object, which torch keeps one and the same for
as long as the C++ storage lives. So nothing is held alive, an entry is gone at the moment its
storage dies, and a new storage at the same address cannot be taken for the old one. ``resize_`` and
``resize_(0)`` keep the storage; ``set_`` and ``.data =`` exchange it.

A tensor without storage (sparse) is known by itself.
"""

from __future__ import annotations

import itertools
import operator
import threading
import weakref
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from ._torch import TensorBase, has_storage
from .site import AtSite, Place, Site, site_at

#: How many of a storage's last writes are kept in full; all of them are counted.
WRITES_KEPT = 64


#: How many of the lines that took a storage apart into a list of views are kept.
PIECES_KEPT = 4


@dataclass(frozen=True, slots=True)
class Region:
    """The part of a storage that a tensor covers, in elements but for the itemsize in bytes."""

    offset: int
    size: tuple[int, ...]
    stride: tuple[int, ...]
    itemsize: int


@dataclass(frozen=True, slots=True)
class Write(AtSite):
    """One write to a storage.

    Attributes:
        op: the op, ``aten.mul_.Tensor``.
        argument: the name of the argument that was written.
        site: the line that issued the op.
        thread: the name of the thread.
        version_before: the version of the written tensor before the write; None if it has none.
        version_after: the version after it.
        region: the part that was written; None if it cannot be told (no strides).
        count: the storage's number of writes with this one.
    """

    op: str
    argument: str
    site: Site
    thread: str
    version_before: int | None
    version_after: int | None
    region: Region | None
    count: int


# A write as it is kept: making a `Write` costs as much as the op, so that waits until one is asked
# for. Op, argument, place, thread, versions before and after; then geometry and count.
_Facts = tuple[str, str, Place, str, int | None, int | None]


class Entry:
    """What the ledger knows of one storage.

    Attributes:
        anchor: a weak reference to the storage.
        notes: what a detector (`smuggled.py`) knows of the storage; dies with it.
        pieces: the last ops that returned lists of views of it, with their places.
    """

    __slots__ = ("_next_count", "_raw", "anchor", "notes", "pieces")

    def __init__(self, anchor: weakref.ref[Any]) -> None:
        self.anchor = anchor
        self.notes: Any = None
        self.pieces: tuple[tuple[str, Place], ...] = ()
        self._raw: deque[tuple[_Facts, Any, int]] = deque(maxlen=WRITES_KEPT)
        self._next_count = itertools.count(1).__next__

    def append(self, facts: _Facts, geometry: Any) -> None:
        """Keep the facts of one more write.

        Without a lock, which would take longer than all of it: a count is given out once, whatever
        thread asks, and threads that write at once may only be kept in another order.
        """
        self._raw.append((facts, geometry, self._next_count()))

    @property
    def count(self) -> int:
        """How many writes were recorded."""
        return max((count for _, _, count in self._raw.copy()), default=0)

    def took_apart(self, op: str, place: Place) -> None:
        """Keep the place of an op that returned a list of views."""
        kept = [made for made in self.pieces if made[1][:2] != place[:2]]  # a loop is one place
        self.pieces = (*kept[1 - PIECES_KEPT :], (op, place))

    @property
    def last_place(self) -> Place | None:
        """Where the last write came from."""
        return self._raw[-1][0][2] if self._raw else None

    @property
    def writes(self) -> list[Write]:
        """The last writes, oldest first."""
        return [_write(*raw) for raw in sorted(self._raw.copy(), key=operator.itemgetter(2))]


def _write(facts: _Facts, geometry: Any, count: int) -> Write:
    op, argument, place, thread, before, after = facts
    region = None
    if geometry is not None:
        offset, size, stride, dtype = geometry
        region = Region(offset, tuple(size), tuple(stride), dtype.itemsize)
    return Write(op, argument, site_at(place), thread, before, after, region, count)


_stride = TensorBase.stride


class Ledger:
    """Writes by storage. Safe to use from several threads."""

    def __init__(self) -> None:
        self._entries: dict[int, Entry] = {}
        self._lock = threading.RLock()

    def __len__(self) -> int:
        """How many living storages it knows."""
        return len(self._entries)

    def __iter__(self) -> Iterator[Entry]:
        """The entries of living storages, oldest first."""
        with self._lock:
            return iter(list(self._entries.values()))

    def entry(self, t: torch.Tensor) -> Entry | None:
        """The entry of t's storage, or None if it was never seen."""
        return self._entries.get(key_of(t))

    def open(self, t: torch.Tensor) -> Entry:
        """The entry of t's storage, made if need be."""
        key = key_of(t)
        entry = self._entries.get(key)
        if entry is None:
            with self._lock:
                entry = self._entries.get(key)
                if entry is None:
                    entry = self._entries[key] = Entry(weakref.ref(_anchor(t), self._forget(key)))
        return entry

    def record(self, t: torch.Tensor, facts: _Facts) -> None:
        """Enter a write to `t`: op, argument, place, thread, versions before and after."""
        geometry = None
        try:
            # As `key_of`, in line: nearly every write finds its entry here. What is on these
            # devices is not lazy, and may be asked for its storage.
            if t.is_cpu or t.is_cuda or has_storage(t):
                entry = self._entries.get(t.untyped_storage()._cdata) or self.open(t)
                geometry = (t.storage_offset(), t.shape, _stride(t), t.dtype)
            else:
                entry = self.open(t)
        except (RuntimeError, NotImplementedError):  # sparse; nested, of layout strided
            entry = self.open(t)
        entry.append(facts, geometry)

    def count(self, t: torch.Tensor) -> int:
        """How many writes to t's storage are known."""
        entry = self.entry(t)
        return entry.count if entry is not None else 0

    def writes(self, t: torch.Tensor) -> list[Write]:
        """The last writes to t's storage, oldest first."""
        entry = self.entry(t)
        return entry.writes if entry is not None else []

    def _forget(self, key: int) -> Any:
        entries = self._entries

        def forget(_: Any) -> None:
            entries.pop(key, None)

        return forget


def key_of(t: torch.Tensor) -> int:
    """The address of t's storage, or of t where it has none."""
    try:
        if has_storage(t):  # a lazy tensor hands out an empty one, and asking that is fatal
            key: int = t.untyped_storage()._cdata
            return key
        return id(t)
    except (RuntimeError, NotImplementedError):
        return id(t)


def _anchor(t: torch.Tensor) -> Any:
    try:
        return t.untyped_storage() if has_storage(t) else t
    except (RuntimeError, NotImplementedError):
        return t


ledger = Ledger()
"""The ledger of this process; every tracker writes to it."""


def storage_version(t: torch.Tensor) -> int:
    """How many writes to t's storage the ledger knows, through whatever alias they were made.

    Unlike ``t._version`` this does not depend on version counters: ``.data`` has a counter of its
    own by design, and its writes are counted here all the same. It counts what ran under a
    `track` with ``record="site"`` or ``"stack"``.

    Args:
        t: any tensor.

    Returns:
        The count, 0 for a storage that was never seen.
    """
    return ledger.count(t)
