"""`tracked`: native view marking and version bumps inside somebody's ``__torch_dispatch__``.

The dispatcher excludes ADInplaceOrView before it calls a handler. A tracked handler runs with the
key back on, so each op that it issues passes through its own native kernel: views are marked, the
counters of what is written move. Three things have to be put right around that.

* The kernel above the handler marks what it returns, and refuses metadata: views are exchanged for
  aliases that share the counter and carry none.
* The kernel above counts a write of its op, so one count of what the handler wrote itself to the
  same tensor is taken back.
* C++ calls a handler for `aten.detach` also to make a shallow copy, from above autograd. Then the
  key is not excluded, and nothing is to be done.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any, TypeVar

import torch

from . import _torch
from ._torch import ADINPLACEORVIEW, TensorBase, is_excluded, set_excluded, set_version
from ._torch.dynamo import skip_dynamo
from ._torch.guard import no_torch_dispatch
from .info import version
from .plan import Plan, plan_of
from .site import handler_names, locate

T = TypeVar("T")
Handler = Callable[..., Any]

_NAME = "__torch_dispatch__"


def tracked(target: T) -> T:
    """Let the ops that a handler issues be tracked natively, without a `track` around.

    In a decorated handler views are real views (``_is_view()``, ``_base``, a shared version
    counter) and writes move the counters, as above autograd. What the handler returns is made
    acceptable to the native kernel above it, and a write that it passes on is counted once.

    A view that the handler returns is exchanged for an alias of it, so what the handler keeps and
    what the caller gets are two objects then. The counter of a new tensor need not begin at 0: many
    ops write their results in place, which autograd hides from itself and not from a handler.

    Args:
        target: a ``TorchDispatchMode`` class, a tensor subclass with a ``__torch_dispatch__`` (both
            are changed in place), or a handler: a function that takes ``(func, types, args,
            kwargs)``, or those after ``self`` or ``cls``; also as a classmethod or staticmethod.

    Returns:
        The class, or a handler with the same signature.

    Raises:
        TypeError: `target` is none of these.
    """
    if isinstance(target, type):
        _track_class(target)
        return target
    if isinstance(target, (classmethod, staticmethod)):
        return type(target)(_tracked(target.__func__))
    if not callable(target):
        raise TypeError(
            f"tracked: expected a class with a `{_NAME}` or a handler, "
            f"got {type(target).__name__} {target!r}"
        )
    return _tracked(target)  # type: ignore[return-value]


def _track_class(cls: type) -> None:
    handler = inspect.getattr_static(cls, _NAME, None)
    if handler is None or handler is inspect.getattr_static(torch.Tensor, _NAME):
        raise TypeError(
            f"tracked: class `{cls.__qualname__}` has no `{_NAME}` of its own; decorate a "
            f"TorchDispatchMode or a tensor subclass that defines one"
        )
    if isinstance(handler, (classmethod, staticmethod)):
        wrapped: Any = type(handler)(_tracked(handler.__func__))
    else:
        wrapped = _tracked(_undisabled(handler))
    setattr(cls, _NAME, wrapped)


def _undisabled(handler: Any) -> Any:
    """The handler of a mode without torch's dynamo-disable (2.13 on): ours does as much, sooner."""
    while _torch.is_dynamo_disable(handler):
        handler = handler.__wrapped__
    return handler


# Two by hand: a handler is called for every op, and `*args` costs more than all the rest.


def _tracked(handler: Handler) -> Handler:
    wrap = _tracked_function if _takes_func_first(handler) else _tracked_method
    return skip_dynamo(wrap(handler))


def _tracked_function(handler: Handler) -> Handler:
    @functools.wraps(handler)
    def tracked_handler(func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not is_excluded(ADINPLACEORVIEW):
            return handler(func, types, args, kwargs)
        try:
            plan, before, after = _steps[func._op]
        except (KeyError, AttributeError):
            plan, before, after = _steps_of(func)
        was = None if before is None else before(plan, args, kwargs)
        set_excluded(ADINPLACEORVIEW, False)
        try:
            out = handler(func, types, args, kwargs)
            return out if after is None else after(out, plan, args, kwargs, was)
        finally:
            set_excluded(ADINPLACEORVIEW, True)

    return tracked_handler


def _tracked_method(handler: Handler) -> Handler:
    @functools.wraps(handler)
    def tracked_handler(
        owner: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if not is_excluded(ADINPLACEORVIEW):
            return handler(owner, func, types, args, kwargs)
        try:
            plan, before, after = _steps[func._op]
        except (KeyError, AttributeError):
            plan, before, after = _steps_of(func)
        was = None if before is None else before(plan, args, kwargs)
        set_excluded(ADINPLACEORVIEW, False)
        try:
            out = handler(owner, func, types, args, kwargs)
            return out if after is None else after(out, plan, args, kwargs, was)
        finally:
            set_excluded(ADINPLACEORVIEW, True)

    return tracked_handler


def _takes_func_first(handler: Handler) -> bool:
    names = list(inspect.signature(handler).parameters)
    return bool(names) and names[0] not in ("self", "cls") and len(names) < 5


# ------------------------------------------------------------------------------ before and after

# The plan of an op; what is to be done before the handler runs, and after.
_Steps = tuple[Plan | None, Callable[..., Any] | None, Callable[..., Any] | None]

# Keyed by the builtin inside an OpOverload: hashing the OpOverload itself runs Python.
_steps: dict[Any, _Steps] = {}


def _steps_of(func: Any) -> _Steps:
    if not isinstance(func, _torch.OpOverload):  # a higher-order operator
        return None, None, None
    plan = plan_of(func)
    if plan.writes and plan.has_native_kernel and not plan.is_composite:
        steps: _Steps = plan, *(_sole_write(plan.sole_write.index) if plan.sole_write else _WRITES)
    elif plan.views:
        steps = plan, None, _after_view
    else:
        steps = plan, None, _after
    _steps[func._op] = steps
    return steps


def _after(out: Any, plan: Plan, args: Any, kwargs: Any, _: None) -> Any:
    if type(out) is torch.Tensor and not out._is_view():
        return out
    return _accepted(out, args, kwargs, plan)


def _after_view(out: Any, plan: Plan, args: Any, kwargs: Any, _: None) -> Any:
    if not _mode_stack_len():
        if type(out) is torch.Tensor:
            return _detach(out)
        if type(out) in (list, tuple) and all(type(t) is torch.Tensor for t in out):
            return [_detach(t) for t in out]
    return _accepted(out, args, kwargs, plan)


def _sole_write(index: int) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """The steps for an op that writes one tensor, passed by position: nearly all writes."""

    def before(plan: Plan, args: Any, kwargs: Any) -> Any:
        try:
            return args[index]._version
        except (IndexError, RuntimeError):  # passed by name; an inference tensor
            return _versions(plan, args, kwargs)

    def after(out: Any, plan: Plan, args: Any, kwargs: Any, was: Any) -> Any:
        if type(was) is list:
            return _after_write(out, plan, args, kwargs, was, depth=3)
        t = args[index]
        now = t._version
        if now > was and _is_counted_above(sys._getframe(2), plan, args, kwargs):
            set_version(t, now - 1)
        return out if out is t else _accepted(out, args, kwargs, plan)

    return before, after


def _versions(plan: Plan, args: Any, kwargs: Any) -> list[int | None]:
    return [version(t) for a in plan.writes for t in a.tensors(args, kwargs)]


def _after_write(
    out: Any, plan: Plan, args: Any, kwargs: Any, was: list[int | None], depth: int = 2
) -> Any:
    """Take one count back of each tensor that the handler wrote, and the kernel above counts."""
    now = _versions(plan, args, kwargs)
    if now != was and _is_counted_above(sys._getframe(depth), plan, args, kwargs):
        written = [t for a in plan.writes for t in a.tensors(args, kwargs)]
        for t, old, new in zip(written, was, now, strict=True):
            if new is not None and new != old:
                set_version(t, new - 1)
    return _accepted(out, args, kwargs, plan)


_WRITES = (_versions, _after_write)

_detach = TensorBase.detach
_mode_stack_len = _torch.mode_stack_len


def _is_counted_above(frame: FrameType | None, plan: Plan, args: Any, kwargs: Any) -> bool:
    """Whether the op came from above autograd: as `locate`, which does more, and takes longer."""
    walked, names = frame, handler_names
    while walked:
        if walked.f_code.co_name in names:
            return locate(frame, plan, args, kwargs)[0]
        walked = walked.f_back
    return True


def _accepted(out: Any, args: Any, kwargs: Any, plan: Plan) -> Any:
    """The outputs as the kernel above takes them."""
    if isinstance(out, torch.Tensor):
        if _is_any(out, (args, kwargs)):
            return _alias(out) if plan.views else out
        return _alias(out) if out._is_view() or (plan.views and out.requires_grad) else out
    if isinstance(out, (list, tuple)):
        return type(out)(_accepted(t, args, kwargs, plan) for t in out)
    return out


def _alias(t: torch.Tensor) -> torch.Tensor:
    """An alias of t with its counter and without metadata."""
    if type(t) is torch.Tensor or not _torch.has_python_key(t):
        if not _mode_stack_len():
            return _detach(t)
        with no_torch_dispatch():  # the modes below did not ask for this op
            return _detach(t)
    base = t._base
    if base is not None:
        # Its own handler would be asked for a detach, and be asked for one of what it returns.
        _torch.as_view_version_only(t, base)
    return t


def _is_any(t: torch.Tensor, values: Any) -> bool:
    return any(t is leaf for leaf in _torch.tree_leaves(values))
