"""Copies of a call's arguments, and their bytes: what is needed to see what a call did."""

from __future__ import annotations

from typing import Any

import torch

from .. import _torch


def copied(arguments: Any) -> Any:
    """The arguments with copies of their tensors.

    Geometry is kept, and tensors that share a storage share one again, so that the same views of
    the same memory are passed. Autograd metadata is not copied.
    """
    storages: dict[int, Any] = {}

    def copy(t: torch.Tensor) -> torch.Tensor:
        plain = type(t) in (torch.Tensor, torch.nn.Parameter) and t.layout is torch.strided
        if not plain or t.is_conj() or t.is_neg() or t.is_quantized:
            return t.detach().clone()
        storage = t.untyped_storage()
        if storage._cdata not in storages:
            storages[storage._cdata] = storage.clone()
        alias = torch.empty(0, dtype=t.dtype, device=t.device)
        return alias.set_(storages[storage._cdata], t.storage_offset(), t.size(), t.stride())

    return _torch.tree_map_only(torch.Tensor, copy, arguments)


class Bytes:
    """The bytes of a tensor's elements, as they are now."""

    def __init__(self, t: torch.Tensor) -> None:
        self._bytes = _bytes(t)

    def differ_from(self, t: torch.Tensor) -> bool:
        """Whether the elements of t have other bytes now."""
        now = _bytes(t)
        if now is None or self._bytes is None:
            return False
        return now.shape != self._bytes.shape or not torch.equal(now, self._bytes)


def _bytes(t: torch.Tensor) -> torch.Tensor | None:
    """A copy of the elements' bytes; None where a tensor has none."""
    try:
        with torch.no_grad():
            plain = t.detach().resolve_conj().resolve_neg()
            return plain.contiguous().clone().view(-1).view(torch.uint8)
    except (RuntimeError, NotImplementedError):
        return None


def share_memory(t: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors lie in the same memory, or in storages that overlap."""
    try:
        a, b = t.untyped_storage(), other.untyped_storage()
    except (RuntimeError, NotImplementedError):
        return False
    if a._cdata == b._cdata:
        return a.nbytes() > 0
    if t.device != other.device or not a.nbytes() or not b.nbytes():
        return False
    # Memory that another library handed back comes as a storage of its own.
    first, second = a.data_ptr(), b.data_ptr()
    return first < second + b.nbytes() and second < first + a.nbytes() and first != 0
