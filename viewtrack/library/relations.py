"""Which output is a view of what, as far as autograd knows."""

from __future__ import annotations

from typing import Any

import torch

from .. import _torch
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
    """Note what autograd found in the body that has just run."""
    call.ran_inside = True
    for leaf in call.spec.leaves(out) if call.spec.views else ():
        if leaf.index in call.spec.views:
            base = base_of(call, leaf)
            if base is not None and not is_marked(leaf.t, base):
                call.hides_views = True


def is_marked(t: torch.Tensor, base: torch.Tensor) -> bool:
    """Whether t is a differentiable view of base, or of what base is a view of.

    One that reads the bytes as another dtype never is, natively too.
    """
    if reinterprets(t, base):
        return True
    return t._is_view() and (t._base is base or (base._is_view() and t._base is base._base))


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
