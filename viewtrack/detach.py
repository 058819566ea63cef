"""`detach_`: detach a tensor in place, also a view, which native refuses (pytorch#142229)."""

from __future__ import annotations

from typing import Any

import torch

from . import _torch
from ._torch.dynamo import break_graph
from .view import marks


@break_graph
def detach_(t: torch.Tensor) -> torch.Tensor:
    """Detach `t` from its graph in place, as ``t.detach_()`` does, and a view from its base too.

    A pipeline stage frees the graph of its output in this way while others hold the output itself.
    ``Tensor.detach_`` refuses a view, since autograd would make its history anew from its base. So
    here the link to the base goes as well: `t` is afterwards what ``t.detach()`` returns, a tensor
    that shares the base's memory and version counter and holds neither the base nor its graph.
    Gradients and tangents no longer flow between the two. `view_info` tells beforehand whether `t`
    is a view, and of what.

    Semantics: ``detach`` and ``detach_`` in torch/csrc/autograd/VariableTypeManual.cpp.

    Args:
        t: any tensor. Its ``grad`` and its hooks stay with it, as they do in ``Tensor.detach_``.

    Returns:
        `t`, the same object.

    Raises:
        RuntimeError: `t` is a view inside of a transform of ``torch.func``, as natively.
    """
    base = t._base if t._is_view() else None
    if base is None or _torch.is_functorch_wrapped(t):
        return t.detach_()
    hooks = t._backward_hooks
    grad = _grad(t)
    with _torch.no_torch_function():
        _torch.as_view_version_only(t, base)
    marks.pop(t, None)
    _restore(t, hooks, grad)
    return t


def _grad(t: torch.Tensor) -> torch.Tensor | None:
    try:
        return t.grad if t.retains_grad or t.is_leaf else None  # asking warns elsewhere
    except RuntimeError:  # a view that native refuses, since its base was written
        return None


def _restore(t: torch.Tensor, hooks: Any, grad: torch.Tensor | None) -> None:
    if hooks is not None:
        t._backward_hooks = hooks  # for native, they went with the metadata
    if grad is not None:
        t.grad = grad
