"""Copies of a call's arguments, with guarded memory on both sides, and who shares memory."""

from __future__ import annotations

from typing import Any

import torch

from .. import _torch

_ALIGNMENT = 64  # of what torch's own allocator hands out
_LEAST_FENCE = 256
_MOST_FENCE = 1 << 20


class Fence:
    """A copy of a storage, amid bytes that nobody has any business with.

    A kernel that takes a strided or an expanded tensor for contiguous writes beyond the storage.
    Here that is seen, and does no harm.

    Attributes:
        storage: the copy. It cannot be resized.
    """

    def __init__(self, storage: torch.UntypedStorage, width: int) -> None:
        size = storage.nbytes()
        width = -(-width // _ALIGNMENT) * _ALIGNMENT
        buffer = bytearray(size + 2 * width + _ALIGNMENT)
        self._all = torch.frombuffer(buffer, dtype=torch.uint8)
        self._all.copy_(torch.arange(len(buffer)) * 37 + 11)  # no value twice in a row
        self._start = width + -(self._all.data_ptr() + width) % _ALIGNMENT
        inner = torch.frombuffer(buffer, dtype=torch.uint8, offset=self._start, count=size)
        self.storage = inner.untyped_storage()
        self.storage.copy_(storage)
        self._end = self._start + size
        self._before = self._all.clone()

    def harmed(self) -> int | None:
        """The first byte outside that changed, counted from the storage's first, or None."""
        changed = self._all != self._before
        changed[self._start : self._end] = False
        places = changed.nonzero()
        return int(places[0]) - self._start if len(places) else None


class Copies:
    """Copies of a call's arguments.

    Geometry is kept, and tensors that share a storage share one again, so that the same views of
    the same memory are passed, and the same tensor where one was passed twice. Autograd metadata is
    not copied.

    Args:
        arguments: a tree with tensors.
        fenced: whether to guard the memory around them, where that can be done.

    Attributes:
        arguments: the tree with the copies.
        fences: the fence around each storage that has one, by its ``_cdata``.
    """

    def __init__(self, arguments: Any, *, fenced: bool = True) -> None:
        self.fences: dict[int, Fence] = {}
        self._fenced = fenced
        self._storages: dict[int, torch.UntypedStorage] = {}
        self._copies: dict[int, torch.Tensor] = {}
        self._reach: dict[int, int] = {}
        for t in _torch.tree_leaves(arguments):
            if isinstance(t, torch.Tensor) and is_plain(t):
                key = t.untyped_storage()._cdata
                self._reach[key] = max(self._reach.get(key, 0), t.numel() * t.element_size())
        self.arguments = _torch.tree_map_only(torch.Tensor, self._copy, arguments)

    def _copy(self, t: torch.Tensor) -> torch.Tensor:
        if id(t) not in self._copies:
            self._copies[id(t)] = self._copy_of(t)
        return self._copies[id(t)]

    def _copy_of(self, t: torch.Tensor) -> torch.Tensor:
        if not is_plain(t) or t.is_conj() or t.is_neg() or t.is_quantized:
            return t.detach().clone()
        storage = t.untyped_storage()
        if storage._cdata not in self._storages:
            self._storages[storage._cdata] = self._copied(storage)
        alias = torch.empty(0, dtype=t.dtype, device=t.device)
        copied = self._storages[storage._cdata]
        return alias.set_(copied, t.storage_offset(), t.size(), t.stride())

    def _copied(self, storage: torch.UntypedStorage) -> torch.UntypedStorage:
        if not self._fenced or storage.device.type != "cpu" or not storage.nbytes():
            clone: torch.UntypedStorage = storage.clone()
            return clone
        reach = self._reach[storage._cdata]
        fence = Fence(storage, min(max(reach, _LEAST_FENCE), _MOST_FENCE))
        self.fences[fence.storage._cdata] = fence
        return fence.storage


def is_plain(t: torch.Tensor) -> bool:
    """Whether t is a strided tensor of torch's own with memory, and not a wrapper of some kind."""
    return (
        type(t) in (torch.Tensor, torch.nn.Parameter)
        and t.layout is torch.strided
        and not (t.is_nested or t._is_zerotensor() or _torch.is_functorch_wrapped(t))
    )


def parts_of(t: torch.Tensor) -> list[torch.Tensor]:
    """The plain tensors that t is made of: itself, what a wrapper wraps, indices and values.

    Of a tensor that is made of others in some unknown way there are none.
    """
    if is_plain(t):
        return [t]
    if hasattr(t, "__tensor_flatten__"):
        inner = [getattr(t, name) for name in t.__tensor_flatten__()[0]]
        return [part for one in inner if isinstance(one, torch.Tensor) for part in parts_of(one)]
    if t.layout is torch.sparse_coo:
        return [t._indices(), t._values()]
    if t.layout in (torch.sparse_csr, torch.sparse_bsr):
        return [t.crow_indices(), t.col_indices(), t.values()]
    if t.layout in (torch.sparse_csc, torch.sparse_bsc):
        return [t.ccol_indices(), t.row_indices(), t.values()]
    if t.layout is torch.strided and t.is_nested and not _torch.is_functorch_wrapped(t):
        return [t.values()]
    return []


def share_memory(t: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two plain tensors lie in the same memory, or in storages that overlap.

    Of others it is not said: sparse and nested tensors share their indices and offsets freely.
    """
    return is_plain(t) and is_plain(other) and _share(t, other)


def may_share_memory(t: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors share memory, or parts of theirs do, or it cannot be told."""
    first, second = parts_of(t), parts_of(other)
    if not first or not second:
        return True
    return any(_share(a, b) for a in first for b in second)


def _share(t: torch.Tensor, other: torch.Tensor) -> bool:
    a, b = t.untyped_storage(), other.untyped_storage()
    if a._cdata == b._cdata:
        return a.nbytes() > 0
    if t.device != other.device or t.device.type == "meta" or not a.nbytes() or not b.nbytes():
        return False
    # Memory that another library handed back comes as a storage of its own.
    first, second = a.data_ptr(), b.data_ptr()
    return first < second + b.nbytes() and second < first + a.nbytes() and first != 0
