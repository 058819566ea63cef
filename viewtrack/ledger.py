"""The ledger: who wrote to which storage.

A storage is known by a weak reference to its Python object, which torch keeps one and the same for
as long as the C++ storage lives. So nothing is held alive, an entry is gone at the moment its
storage dies, and a new storage at the same address cannot be taken for the old one. ``resize_`` and
``resize_(0)`` keep the storage; ``set_`` and ``.data =`` exchange it.

A tensor without storage (sparse) is known by itself.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from .site import Site

#: How many of a storage's last writes are kept in full; all of them are counted.
WRITES_KEPT = 64


@dataclass(frozen=True, slots=True)
class Region:
    """The part of a storage that a tensor covers, in elements but for the itemsize in bytes."""

    offset: int
    size: tuple[int, ...]
    stride: tuple[int, ...]
    itemsize: int


@dataclass(frozen=True, slots=True)
class Write:
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

    @property
    def filename(self) -> str:
        """The file of the line that issued the op."""
        return self.site.filename

    @property
    def lineno(self) -> int:
        """The line that issued the op."""
        return self.site.lineno

    @property
    def function(self) -> str:
        """The function of the line that issued the op."""
        return self.site.function


@dataclass(slots=True)
class Entry:
    """What the ledger knows of one storage.

    Attributes:
        anchor: a weak reference to the storage.
        count: how many writes were recorded.
        writes: the last of them.
    """

    anchor: weakref.ref[Any]
    count: int = 0
    writes: deque[Write] = field(default_factory=lambda: deque(maxlen=WRITES_KEPT))


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

    def record(
        self,
        t: torch.Tensor,
        op: str,
        argument: str,
        site: Site,
        version_before: int | None,
        version_after: int | None,
    ) -> Write:
        """Enter a write to `t`, made by this thread."""
        entry = self.open(t)
        with self._lock:
            entry.count += 1
            write = Write(
                op,
                argument,
                site,
                threading.current_thread().name,
                version_before,
                version_after,
                region_of(t),
                entry.count,
            )
            entry.writes.append(write)
        return write

    def count(self, t: torch.Tensor) -> int:
        """How many writes to t's storage are known."""
        entry = self.entry(t)
        return entry.count if entry is not None else 0

    def writes(self, t: torch.Tensor) -> list[Write]:
        """The last writes to t's storage, oldest first."""
        entry = self.entry(t)
        return list(entry.writes) if entry is not None else []

    def _forget(self, key: int) -> Any:
        entries = self._entries

        def forget(_: Any) -> None:
            entries.pop(key, None)

        return forget


def key_of(t: torch.Tensor) -> int:
    """The address of t's storage, or of t where it has none."""
    try:
        return t.untyped_storage()._cdata
    except (RuntimeError, NotImplementedError):
        return id(t)


def _anchor(t: torch.Tensor) -> Any:
    try:
        return t.untyped_storage()
    except (RuntimeError, NotImplementedError):
        return t


def region_of(t: torch.Tensor) -> Region | None:
    """The part of its storage that a strided tensor covers now."""
    try:
        return Region(t.storage_offset(), tuple(t.size()), tuple(t.stride()), t.element_size())
    except (RuntimeError, NotImplementedError):
        return None


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
