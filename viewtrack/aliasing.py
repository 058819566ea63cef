"""Who shares storage with whom: what must hold before one tensor is called a view of another."""

from __future__ import annotations

from typing import Any

import torch

from . import _torch
from ._torch import nested
from .errors import AliasingError


def check_storage(t: torch.Tensor, base: torch.Tensor) -> None:
    """Raise AliasingError unless t lies in base's storage."""
    if not shares_storage(t, base):
        raise AliasingError(
            f"mark_as_view: `t` ({brief(t)}, {t.device}) and `base` ({brief(base)}, "
            f"{base.device}) do not share storage; pass a real alias of `base`"
            + (", or alias_storage=True" if t.device == base.device else "")
        )


def shares_storage(t: torch.Tensor, base: torch.Tensor) -> bool:
    """Whether t lies in base's storage, or in that of a part of a sparse base."""
    # Native knows the parts of COO and CSR tensors, and not those of the other sparse layouts.
    return _alias_or_false(t, base) or any(_alias_or_false(t, part) for part in _parts(base))


def shares_or_unknown(t: torch.Tensor, base: torch.Tensor) -> bool:
    """False only where both are plain strided tensors, whose storages can be compared."""
    plain = type(t) is type(base) is torch.Tensor and not _torch.is_functorch_wrapped(t)
    if not plain or _torch.is_functorch_wrapped(base):
        return True
    try:
        return _torch.is_alias_of(t, base)
    except (RuntimeError, NotImplementedError):
        return True


def _alias_or_false(t: torch.Tensor, part: torch.Tensor) -> bool:
    try:
        return _torch.is_alias_of(t, part)
    except (RuntimeError, NotImplementedError):
        return False


def _parts(base: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The strided tensors that a sparse tensor is made of."""
    with _torch.above_autograd(), torch.no_grad():
        if base.layout is torch.sparse_coo:
            return _torch.coo_parts(base)
        if base.layout in (torch.sparse_csr, torch.sparse_bsr):
            return base.crow_indices(), base.col_indices(), base.values()
        if base.layout in (torch.sparse_csc, torch.sparse_bsc):
            return base.ccol_indices(), base.row_indices(), base.values()
    return ()


def check_can_alias(t: torch.Tensor, base: torch.Tensor) -> None:
    """Raise AliasingError if t's storage cannot be pointed at base's, whatever their sizes."""
    why = None
    if t.device != base.device:
        why = f"`t` is on {t.device} and `base` on {base.device}"
    elif not (has_storage(t) and has_storage(base)):
        why = f"layouts {t.layout} and {base.layout} do not both have a storage of their own"
    elif _torch.has_python_key(t) != _torch.has_python_key(base):
        why = "one is a wrapper without memory of its own and the other is not"
    if why is not None:
        raise AliasingError(
            f"mark_as_view: alias_storage=True cannot point t's storage at base's: {why}; pass a "
            f"real alias of `base`"
        )


def check_fits(t: torch.Tensor, storage: torch.UntypedStorage) -> None:
    """Raise AliasingError if t's geometry does not fit into base's storage."""
    need, have = _bytes_spanned(t), storage.nbytes()
    if need > have:
        where = ""
        if not nested.is_strided_nested(t):
            where = f", strides {tuple(t.stride())}, offset {t.storage_offset()}"
        raise AliasingError(
            f"mark_as_view: `t` ({brief(t)}{where}) needs {need} bytes and base's storage holds "
            f"{have}; give `t` the geometry of a view of `base`"
        )


def has_storage(t: torch.Tensor) -> bool:
    """Whether t has a storage of its own; a sparse tensor has only its parts'."""
    try:
        t.untyped_storage()
    except (RuntimeError, NotImplementedError):
        return False
    return True


def _bytes_spanned(t: torch.Tensor) -> int | torch.SymInt:
    if t.numel() == 0:
        return 0
    if nested.is_strided_nested(t):
        return elements_spanned(t) * t.element_size()
    last = sum((n - 1) * s for n, s in zip(t.size(), t.stride(), strict=True))
    return (t.storage_offset() + last + 1) * t.element_size()


def elements_spanned(t: torch.Tensor) -> int:
    """How many elements of its storage, from the first, a nested tensor of layout strided spans."""
    spans = [
        offset + sum((n - 1) * s for n, s in zip(size, stride, strict=True)) + 1
        for size, stride, offset in nested.places(t)
        if all(size)
    ]
    return max(spans, default=0)


def shape_of(t: torch.Tensor) -> Any:
    """The shape of t; of a nested tensor of layout strided, which has none, the shapes in it."""
    if nested.is_strided_nested(t):
        return tuple(torch.Size(size) for size, _, _ in nested.places(t))
    return t.shape


def dims(shape: Any) -> str:
    """A shape as errors show it."""
    return ", ".join(f"[{dims(n)}]" if isinstance(n, torch.Size) else str(n) for n in shape)


def brief(t: torch.Tensor) -> str:
    """Dtype and shape of t as errors show them."""
    return f"{t.dtype}[{dims(shape_of(t))}]"
