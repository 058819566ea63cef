"""What can be asked of a tensor without touching it: is it a view, of what, at which version."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ParamSpec, TypeVar

import torch

from . import _torch
from ._torch.dynamo import break_graph
from .view import marks
from .view_fn import ViewFn

P = ParamSpec("P")
R = TypeVar("R")


@dataclass(frozen=True, slots=True, eq=False)
class ViewInfo:
    """What is known of a view.

    Attributes:
        base: the tensor it views; the root where views are chained. None if it is known to be a
            non-differentiable view of a tensor that has died since.
        is_bw_differentiable: whether gradients flow between the two.
        is_fw_differentiable: whether tangents flow between the two. Torch does not tell; taken to
            be so of native views, but for the primal that ``unpack_dual`` took of a tensor with
            history.
        creation_meta: why in-place ops on it are refused, if they are.
        view_fn: the Python view_fn it was marked with, if any.
        version: its version counter, None for an inference tensor.
        requires_grad: whether it asks for a gradient, by itself or through its base.
        has_grad_fn: whether a gradient that reaches it flows on. A view taken under ``no_grad`` of
            a base that requires grad has `requires_grad` and no grad_fn: it acts as a leaf. None
            where the history cannot be read: below autograd, and where reading it raises (its base
            was written and creation_meta forbids that, or view_fn raises).
        nbytes: how many bytes its elements take.
        storage_nbytes: how many bytes its storage keeps alive, and a saver would write.
    """

    base: torch.Tensor | None
    is_bw_differentiable: bool
    is_fw_differentiable: bool
    creation_meta: Any
    view_fn: ViewFn | None
    version: int | None
    requires_grad: bool
    has_grad_fn: bool | None
    nbytes: int
    storage_nbytes: int


@break_graph
def view_info(t: torch.Tensor) -> ViewInfo | None:
    """Tell what `t` is a view of, natively or by `mark_as_view`.

    Never changes `t`, and keeps nothing alive but what it returns.

    Args:
        t: any tensor.

    Returns:
        A `ViewInfo`, or None if `t` is no view. A non-differentiable view made by torch itself
        (``detach()``) looks like any other tensor from Python and gives None.
    """
    mark = marks.get(t)
    is_view = t._is_view()
    if not is_view and mark is None:
        return None
    base = t._base if is_view else mark.base()
    grad_fn = _grad_fn(t)
    return ViewInfo(
        base=base,
        is_bw_differentiable=is_view,
        is_fw_differentiable=mark.is_fw_differentiable if mark else not _is_primal(grad_fn),
        creation_meta=_torch.creation_meta(t),
        view_fn=mark.view_fn if mark else None,
        version=version(t),
        requires_grad=t.requires_grad,
        has_grad_fn=None if grad_fn is _UNREADABLE else grad_fn is not None,
        nbytes=t.numel() * t.element_size(),
        storage_nbytes=_storage_nbytes(t),
    )


def version(t: torch.Tensor) -> int | None:
    """The number in t's version counter, as ``t._version``, without its error.

    Args:
        t: any tensor.

    Returns:
        How many writes autograd has counted on t's counter; None for an inference tensor, which
        has no counter. Never raises.
    """
    try:
        return t._version
    except RuntimeError:
        return None


def with_tracking(fn: Callable[P, R]) -> Callable[P, R]:
    """Let one call run with ADInplaceOrView kernels on, also below autograd.

    ``with_tracking(torch.Tensor.view)(x, 3, 4)`` in a ``__torch_dispatch__`` handler returns a real
    view of `x` that shares its version counter; an in-place op so called moves the counter.

    Do not return such a view from the handler: the native kernel above marks what it is handed, and
    refuses a tensor that carries metadata already. Return ``view.detach()`` instead, or run the
    program under `track`.

    Args:
        fn: any callable.

    Returns:
        A callable with the same signature.
    """

    @functools.wraps(fn)
    def tracked(*args: P.args, **kwargs: P.kwargs) -> R:
        with _torch.inplace_or_view():
            return fn(*args, **kwargs)

    return tracked


_UNREADABLE = object()


def _grad_fn(t: torch.Tensor) -> Any:
    if _torch.below_autograd():
        return _UNREADABLE
    try:
        return t.grad_fn
    except Exception:  # a stale view, which native refuses or whose view_fn fails, in any way
        return _UNREADABLE


def _is_primal(grad_fn: Any) -> bool:
    """Whether this is the history of what unpack_dual returns, a view for backward mode only."""
    name = getattr(grad_fn, "name", None)
    return name is not None and name() == "torch::autograd::Identity"


def _storage_nbytes(t: torch.Tensor) -> int:
    try:
        return t.untyped_storage().nbytes()
    except (RuntimeError, NotImplementedError):  # sparse tensors have no storage of their own
        return t.numel() * t.element_size()
