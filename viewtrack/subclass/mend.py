"""What a handler must not hand to the native kernel above it, and what to hand it instead.

That kernel marks the result of a view op, and gives the result of any other op its history. Either
goes wrong with a tensor that carries autograd metadata already: one that requires grad, a view that
was handed out before, the handler's own input. A fresh alias of it is right in all these cases.
"""

from __future__ import annotations

import sys
import threading
from typing import Any

import torch

from .. import _torch
from .._torch import subclass as _torch_subclass
from ..errors import AutogradMetadataError
from ..plan import Plan
from ..site import caller
from .kinds import is_wrapper, kind_of

_DETACH = torch.ops.aten.detach.default


class _State(threading.local):
    mending = False


state = _State()


def carries_metadata(t: torch.Tensor) -> bool:
    """Whether t requires grad or is a view."""
    if kind_of(type(t)).is_quiet or not _torch_subclass.is_torch_function_enabled():
        return t.requires_grad or t._is_view()
    with _torch.no_torch_function():
        return t.requires_grad or t._is_view()


def is_any(t: torch.Tensor, args: Any) -> bool:
    """Whether t is one of the arguments, or an item of one that is a list."""
    for a in args:  # noqa: SIM110 - asked for each op, and any() costs twice the time
        if a is t or (isinstance(a, (list, tuple)) and is_any(t, a)):
            return True
    return False


def needs_mending(t: torch.Tensor, args: Any) -> bool:
    """Whether the native kernel above must not be handed t."""
    return not state.mending and (carries_metadata(t) or is_any(t, args))


def fresh_alias(t: torch.Tensor, plan: Plan, args: Any) -> torch.Tensor:
    """An alias of t without autograd metadata, on t's counter.

    Raises:
        AutogradMetadataError: the handler of t's class cannot make one.
    """
    if not is_wrapper(t):
        with _torch.inplace_or_view():
            return t.detach()
    with _without_mending():
        try:
            alias = _DETACH(t)
        except Exception as error:
            raise _refusal(t, plan, args, f"its `aten.detach` raised {error!r}") from error
    if not isinstance(alias, torch.Tensor):
        raise _refusal(t, plan, args, f"its `aten.detach` returns `{type(alias).__name__}`")
    if alias is t:
        raise _refusal(t, plan, args, "its `aten.detach` returns its own argument")
    if carries_metadata(alias):
        # Two references: the local name and getrefcount's own. More, and the handler has kept it.
        if alias._is_view() or sys.getrefcount(alias) > 2:
            raise _refusal(t, plan, args, "so does its `aten.detach`")
        _torch.as_view_version_only(alias, t)
    return alias


def normal_alias(t: torch.Tensor, plan: Plan, args: Any) -> torch.Tensor:
    """An alias of the wrapper t that is no inference tensor.

    A view of a normal tensor is normal in inference mode too; a new wrapper is not.
    """
    if not t.is_inference() or state.mending:
        return t
    with torch.inference_mode(False):
        return fresh_alias(t, plan, args)


class _without_mending:
    """Let the handler that is asked for a detach hand back what it likes."""

    def __enter__(self) -> None:
        # The kernel of detach asks the handler once more for its copy, and must not be marking.
        self.was = state.mending, _torch.is_excluded(_torch.ADINPLACEORVIEW)
        state.mending = True
        _torch.set_excluded(_torch.ADINPLACEORVIEW, True)

    def __exit__(self, *exc: object) -> None:
        state.mending, excluded = self.was
        _torch.set_excluded(_torch.ADINPLACEORVIEW, excluded)


def _refusal(t: torch.Tensor, plan: Plan, args: Any, why: str) -> AutogradMetadataError:
    name = type(t).__name__
    if is_any(t, args):
        what, mend = "its own argument", f"return a new `{name}` around the same inner tensor"
    elif t.requires_grad and t.is_leaf:
        what = "a tensor that requires grad"
        mend = f"make the `{name}` that it returns with requires_grad=False"
    else:
        what, mend = "a view that it returned before", f"return a new `{name}` each time"
    return AutogradMetadataError(
        f"the handler at {caller(3)} returned {what} for `{plan.name}`, and {why}; {mend}"
    )
