"""Which output is a view of what, as far as autograd knows."""

from __future__ import annotations

from typing import Any

import torch

from .. import _torch
from .._torch import CreationMeta
from .._torch import library as _torch_library
from .call import Call
from .spec import Leaf, Spec


def base_of(call: Call, leaf: Leaf) -> torch.Tensor | None:
    """The argument that an output views."""
    return base_of_output(call.spec, leaf, call.args, call.kwargs)


def base_of_output(spec: Spec, leaf: Leaf, args: Any, kwargs: Any) -> torch.Tensor | None:
    """The argument that an output views."""
    arguments = spec.views[leaf.index].arguments
    candidates: list[torch.Tensor] = [t for a in arguments for t in a.tensors(args, kwargs)]
    if len(candidates) == 1:
        return candidates[0]
    for t in candidates:
        try:
            if _torch.is_alias_of(leaf.t, t):
                return t
        except (RuntimeError, NotImplementedError):
            continue
    return None


def note_inside(call: Call, out: Any) -> None:
    """Note what autograd found in the body that has just run. Call it in the state of that run."""
    call.ran_inside = True
    for leaf in call.spec.leaves(out) if call.spec.views else ():
        if leaf.index in call.spec.views:
            base = base_of(call, leaf)
            if base is not None and not is_marked(leaf, base):
                call.hidden = (*call.hidden, leaf.place)


def is_marked(leaf: Leaf, base: torch.Tensor) -> bool:
    """Whether an output t is a differentiable view of base, or of what base is a view of.

    One that reads the bytes as another dtype never is, natively too. One that a body made in a
    state of its own (`no_grad`) is a view of base, but no gradient would flow through it.
    """
    t = leaf.t
    if reinterprets(t, base):
        return True
    if not t._is_view() or not (t._base is base or (base._is_view() and t._base is base._base)):
        return False
    return not _is_cut_off(t, base, in_list=leaf.place.position is not None)


def _is_cut_off(t: torch.Tensor, base: torch.Tensor, in_list: bool) -> bool:
    """Whether a view was made where autograd records less than here."""
    meta = _torch.creation_meta(t)
    if meta is CreationMeta.NO_GRAD_MODE or meta is CreationMeta.INFERENCE_MODE:
        is_here = (
            torch.is_inference_mode_enabled()
            if meta is CreationMeta.INFERENCE_MODE
            else not torch.is_grad_enabled()
        )
        # One view inherits what its base has, and one of several does not.
        if not is_here and (in_list or meta is not _torch.creation_meta(base)):
            return True
    elif meta is not CreationMeta.DEFAULT:
        return False
    # Made below autograd there is no grad_fn. One that is stale is made anew by reading it.
    return torch.is_grad_enabled() and base.requires_grad and t.grad_fn is None


def reinterprets(t: torch.Tensor, base: torch.Tensor) -> bool:
    """Whether t reads base's bytes as another dtype, as ``base.view(dtype)`` does.

    Autograd knows the real view of a complex tensor, and the other way round.
    """
    if t.dtype is base.dtype:
        return False
    return not (t.is_complex() != base.is_complex() and t.dtype.to_real() is base.dtype.to_real())


def is_wrapper(t: torch.Tensor) -> bool:
    """Whether t is of a subclass with a handler of its own; fake tensors are but stand-ins."""
    dispatches = type(t).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__
    return dispatches and not _torch_library.is_fake(t)
