"""Views between a nested tensor of layout strided and the memory that its parts lie in.

Native `values()` makes the buffer a view of the nested tensor, and CopySlices then asks that base
for a geometry which it does not have. The other way round it has what it needs: the base is the
flat buffer, the nested tensor a view of it, and so is what `values()` of that returns.
"""

from __future__ import annotations

import torch

from . import _torch
from ._torch import nested
from .aliasing import brief, elements_spanned
from .errors import ViewTrackError
from .view_fn import ViewFn


def fn_for_nested(t: torch.Tensor, base: torch.Tensor) -> ViewFn | None:
    """What makes t of base, where one of them is a nested tensor and the other its memory."""
    is_nested = nested.is_strided_nested(t)
    if is_nested is nested.is_strided_nested(base) or not (_is_flat(t) and _is_flat(base)):
        return None
    if t.dtype is not base.dtype:
        return None
    if not is_nested:
        size, stride, offset = t.size(), t.stride(), t.storage_offset()
        return lambda b: b.values().as_strided(size, stride, offset)
    where, n = nested.geometry(t), t.numel()
    if not t.is_contiguous() or base.untyped_storage().nbytes() != n * base.element_size():
        # What lies between the parts or after them would get a part's gradient, or none, at random.
        raise ViewTrackError(
            f"mark_as_view: autograd has no way from `base` ({brief(base)}) to the nested tensor "
            f"`t` ({brief(t)}) by itself, unless t's parts lie one after the other and fill base's "
            f"storage; give a view_fn, or a `base` that is as large as `t`"
        )
    return lambda b: nested.view_of_buffer(b.as_strided((n,), (1,), 0), where)


def set_storage_of(t: torch.Tensor, base: torch.Tensor) -> None:
    """Point t's storage at base's; where its elements lie in there stays."""
    if not nested.is_strided_nested(t):
        _torch.set_storage_of(t, base)
        return
    with torch.no_grad():
        flat = base.detach().as_strided((elements_spanned(t),), (1,), 0)
        t.data = nested.view_of_buffer(flat, nested.geometry(t))


def _is_flat(t: torch.Tensor) -> bool:
    """Whether as_strided reads t as it lies in memory."""
    return t.layout is torch.strided and not t.is_conj() and not t.is_neg()
