"""Who shares storage with whom: what must hold before one tensor is called a view of another."""

from __future__ import annotations

from typing import Any

import torch

from . import _torch
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
        raise AliasingError(
            f"mark_as_view: `t` ({brief(t)}, strides {tuple(t.stride())}, offset "
            f"{t.storage_offset()}) needs {need} bytes and base's storage holds {have}; give `t` "
            f"the geometry of a view of `base`"
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
    last = sum((n - 1) * s for n, s in zip(t.size(), t.stride(), strict=True))
    return (t.storage_offset() + last + 1) * t.element_size()


def dims(shape: Any) -> str:
    """A shape as errors show it."""
    return ", ".join(map(str, shape))


def brief(t: torch.Tensor) -> str:
    """Dtype and shape of t as errors show them."""
    return f"{t.dtype}[{dims(t.shape)}]"
