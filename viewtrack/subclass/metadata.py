"""Sizes, strides and storage of a wrapper that an op has changed on its inner tensor.

Autograd replays a view of a wrapper subclass by the op that made it, where it replays one of a
plain tensor by as_strided of the geometry that the view has by then. The two differ once an op has
changed a view's geometry in place (``v = y.t(); v.t_()``): native gradients of a wrapper are wrong
then, silently where the sizes fit. So such a view is told anew, as an as_strided of its base.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from .. import _torch
from .._torch import subclass as _torch_subclass
from ..view import mark_as_view, marks
from .kinds import is_wrapper, kind_of, parts_of

_RESIZE = torch.ops.aten.resize_.default
_RESIZE_AS = torch.ops.aten.resize_as_.default
_AS_STRIDED = torch.ops.aten.as_strided_.default
_SET_NOTHING = torch.ops.aten.set_.default


def follow_resize(arg: Any, out: Any) -> None:
    """Give a written wrapper the geometry of the result that it stands for, if that was resized."""
    if out is arg or type(out) is not type(arg) or not is_wrapper(arg):
        return
    if out.shape != arg.shape:
        _torch_subclass.grow_storage(arg, out.numel())
        geometry = out.shape, out.stride(), arg.storage_offset()  # a resize leaves the offset
        _torch_subclass.run_metadata_op(_RESIZE, (arg, out.shape), {})
        _torch_subclass.run_metadata_op(_AS_STRIDED, (arg, *geometry), {})
        _tell_anew(arg)


def change_metadata(func: Any, args: Any, kwargs: Any, t: Any) -> None:
    """Do to the wrapper's sizes, strides and storage what the op did to the inner tensor's."""
    if _torch_subclass.asks_handler_for_sizes(t):
        return
    if func is _RESIZE:
        _torch_subclass.grow_storage(t, math.prod(args[1]))
    elif func is _RESIZE_AS:
        _torch_subclass.grow_storage(t, args[1].numel())
    if func is _SET_NOTHING:
        _torch_subclass.run_metadata_op(_RESIZE, (t, (0,)), {})
        _torch_subclass.run_metadata_op(_AS_STRIDED, (t, (0,), (1,), 0), {})
        _torch_subclass.point_storage(t, torch.empty(0, dtype=t.dtype, device=t.device))
        return
    _torch_subclass.run_metadata_op(func, args, kwargs or {})
    _tell_anew(t)


def _tell_anew(t: Any) -> None:
    """Mark a differentiable view as an as_strided of its base, of the geometry that it has now."""
    with _torch.no_torch_function():
        base = t._base
        if base is None or not _can_be_strided(t, base):
            return
        meta = _torch.creation_meta(t)
        _torch.as_view_version_only(t, base)  # drops the old metadata
        marks.pop(t, None)
        mark_as_view(t, base, creation_meta=meta)


def _can_be_strided(t: Any, base: Any) -> bool:
    if _torch.forward_ad_level() >= 0 or _torch.functorch_is_active():
        return False  # tangents would be lost
    if t.requires_grad and not base.requires_grad:
        return False  # a view that was made a leaf
    if t._backward_hooks or t.retains_grad:
        return False  # their C++ side goes with the metadata
    if kind_of(type(t)).flattens and any(
        _torch_subclass.asks_handler_for_sizes(part) for _, part in parts_of(t)
    ):
        return False  # a compiler replays views itself
    return bool(
        type(base) is type(t)
        and t.dtype is base.dtype
        and t.layout is base.layout is torch.strided
        and (t.is_conj(), t.is_neg()) == (base.is_conj(), base.is_neg())
        and not (t.is_inference() or base.is_inference())
        and _torch.is_alias_of(t, base)
    )
