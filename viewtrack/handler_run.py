"""What runs a `tracked` handler for an op.

Three things have to be put right around a handler that runs with ADInplaceOrView on.

* The kernel above the handler marks what it returns, and refuses metadata: views are exchanged for
  aliases that carry none. The kernel joins them to their base's counter; where it is not above,
  a handler is, and if no `track` is below, that handler is not tracked.
* The kernel above counts a write of its op, so one count of what the handler wrote itself to the
  same tensor is taken back.
* C++ calls a handler for `aten.detach` also to make a shallow copy, from above autograd. Then the
  key is not excluded, and nothing is to be done.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch
from torch import Tensor

from . import _torch
from ._torch import (
    ADINPLACEORVIEW,
    TensorBase,
    is_excluded,
    mode_stack_len,
    no_torch_function,
    set_excluded,
    set_versions,
)
from ._torch.dynamo import is_tracing, skip_dynamo
from ._torch.guard import no_torch_dispatch
from .anchors import anchors, handler_names
from .info import version
from .key_off import begins_sparse, wants_key_off
from .one_count import HERE, TAKE
from .operands import is_uncounted_of_wrappers, is_wrapper, only_plain
from .operands import written as writes_of
from .plan import Plan, caches, plan_of
from .site import issued_in_handler, locate

Handler = Callable[..., Any]

_getframe = sys._getframe


def run_for(func: Any, handler: Handler, depth: int) -> Handler:  # noqa: C901
    """What runs a handler for an op, tracked.

    Args:
        func: the op.
        handler: the handler, as a function that takes its owner first.
        depth: how many frames the caller of the handler will be above.
    """
    written, views, plan, off = _facts_of(func)

    # It runs for every op, and a call costs as much as what it does: what most need is in line.
    def tracked_handler(owner: Any, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        if not is_excluded(ADINPLACEORVIEW):
            return handler(owner, func, types, args, kwargs)
        t = None
        if written is not None:
            try:
                was = (t := args[written])._version
            # Several, or by name; an inference tensor; a number.
            except (IndexError, RuntimeError, AttributeError):
                t, was = None, _noted(plan, types, args, kwargs)
        set_excluded(ADINPLACEORVIEW, begins_sparse(args) if off is None else off)
        try:
            out = handler(owner, func, types, args, kwargs)
            if written is not None:
                if t is None:
                    _settle(was, _getframe(depth), plan, args, kwargs)
                elif (now := t._version) > was and (
                    (frame := _getframe(depth)) in anchors or _is_counted(frame, plan, args, kwargs)
                ):
                    set_versions((t,), (now - 1,))
        finally:
            set_excluded(ADINPLACEORVIEW, True)
        if views:
            if type(out) is Tensor and out._is_view() and not mode_stack_len():
                return out.data  # its counter is joined above; half the price of detach
        elif out is t or (type(out) is Tensor and not out._is_view()):
            return out
        return _handed_up(out, plan, args, kwargs)

    return skip_dynamo(tracked_handler)


# The index of the one argument that it writes, and that a kernel above counts; None if there is
# nothing to count; whether its outputs are views that a kernel above marks; its plan; whether its
# kernel wants ADInplaceOrView off, None if so for sparse tensors.
_Facts = tuple[int | None, bool, Any, bool | None]
_SEVERAL = sys.maxsize  # no index: it writes several, or one that is passed by name

# Keyed by the builtin inside an OpOverload: hashing the OpOverload itself runs Python.
_facts: dict[Any, _Facts] = {}
caches.append(_facts)


def _facts_of(func: Any) -> _Facts:
    if not isinstance(func, _torch.OpOverload):  # a higher-order operator
        return None, False, None, False
    known = _facts.get(func._op)
    if known is not None:
        return known
    plan = plan_of(func)
    written = None
    if plan.writes and _has_kernel_above(plan):
        written = plan.sole_write.index if plan.sole_write else _SEVERAL
    elif any(is_uncounted_of_wrappers(plan, a) for a in plan.writes):
        written = _SEVERAL
    views = bool(plan.views) and _has_kernel_above(plan)
    facts = written, views, plan, wants_key_off(plan)
    if not plan.is_recorded_inside:  # of such a one it is asked each time where it comes from
        _facts[func._op] = facts
    return facts


def is_recorded(frame: FrameType, func: Any, types: Any, args: Any) -> bool:
    """Whether autograd would record what the kernel of an op of someone else's calls.

    It does so if the op comes from above autograd, but for the mode whose handler runs.
    """
    return (
        isinstance(func, _torch.OpOverload)
        and (plan := plan_of(func)).is_recorded_inside
        and only_plain(types)
        and not issued_in_handler(frame, plan, args)[0]
    )


def _has_kernel_above(plan: Plan) -> bool:
    return plan.has_native_kernel and not plan.is_composite


def _noted(plan: Plan, types: Any, args: Any, kwargs: Any) -> list[int | None]:
    """The versions of what the op writes; none where nothing will have to be done about them."""
    return _versions(plan, args, kwargs) if types or _has_kernel_above(plan) else []


def _versions(plan: Plan, args: Any, kwargs: Any) -> list[int | None]:
    return [version(t) for _, t in writes_of(plan, args, kwargs)]


def _settle(
    was: list[int | None], frame: FrameType | None, plan: Plan, args: Any, kwargs: Any
) -> None:
    """Take back what the kernel above counts again; count what neither it nor the handler does."""
    if not was:
        return
    if not _has_kernel_above(plan):
        _count_wrappers(was, frame, plan, args, kwargs)
    elif _versions(plan, args, kwargs) != was and _is_counted(frame, plan, args, kwargs):
        for (_, t), old in zip(writes_of(plan, args, kwargs), was, strict=True):
            now = version(t)
            if now is not None and now != old:
                set_versions((t,), (now - 1,))


def _count_wrappers(
    was: list[int | None], frame: FrameType | None, plan: Plan, args: Any, kwargs: Any
) -> None:
    """Count a write of an op without an ADInplaceOrView kernel for each wrapper that it reached.

    The handler of the wrapper wrote the tensor inside, whose counter is the only one to have moved.
    """
    if not locate(frame, plan, args, kwargs)[0]:
        for (argument, t), old in zip(writes_of(plan, args, kwargs), was, strict=True):
            unseen = is_uncounted_of_wrappers(plan, argument) and is_wrapper(t)
            if unseen and old is not None and version(t) == old:
                torch.autograd.graph.increment_version(t)


def _is_counted(frame: FrameType | None, plan: Plan, args: Any, kwargs: Any) -> bool:
    """Whether the op came from above autograd: as `locate`, which does more, and takes longer."""
    walked = frame
    while walked is not None and walked not in anchors:
        if walked.f_code.co_name in handler_names:
            return locate(frame, plan, args, kwargs, TAKE)[0] != HERE
        walked = walked.f_back
    return True


def _above_autograd() -> Callable[..., Any]:
    # Of this name and signature for who looks for handlers among the frames, as in `_with_owner`.
    def tracked_handler(
        owner: Any, func: Any, types: Any, args: Any, kwargs: Any, handler: Handler
    ) -> Any:
        inference = torch.is_inference_mode_enabled()  # there is no autograd to be above of
        with _torch.inplace_or_view() if inference else _torch.above_autograd():
            return handler(owner, func, types, args, kwargs)

    return skip_dynamo(tracked_handler)


recorded = _above_autograd()


_detach = TensorBase.detach


def _all_views(values: list[Any]) -> bool:
    for value in values:
        if type(value) is not Tensor:
            return False
    return bool(values) and values[0]._is_view()


def _handed_up(out: Any, plan: Plan | None, args: Any, kwargs: Any) -> Any:
    plain = plan is not None and plan.views and type(out) is list and _all_views(out)
    if plain and not mode_stack_len():
        return [t.data for t in out]
    with _torch.inplace_or_view():
        return _accepted(out, plan, args, kwargs)


def _accepted(out: Any, plan: Plan | None, args: Any, kwargs: Any) -> Any:
    """The outputs as the kernel above takes them."""
    if plan is None:
        return out
    if isinstance(out, torch.Tensor):
        if _is_any(out, (args, kwargs)):
            return _alias(out) if plan.views and not plan.is_composite else out
        if not plan.views and _is_part(out, args):
            return out
        return _alias(out) if out._is_view() or (plan.views and out.requires_grad) else out
    if isinstance(out, (list, tuple)):
        return type(out)(_accepted(t, plan, args, kwargs) for t in out)
    return out


def _alias(t: torch.Tensor) -> torch.Tensor:
    """An alias of t with its counter and without metadata."""
    if t.is_inference():  # has neither, and `detach` would give it a counter
        return t
    plain = type(t) is Tensor or not _torch.has_python_key(t)
    if plain and not mode_stack_len():
        with no_torch_function():  # in a backward they are on, and would make it a view anew
            return _detach(t)
    base = t._base
    if plain and (base is None or not is_tracing()):
        # The modes below did not ask for this op.
        with no_torch_dispatch(), no_torch_function():
            return _detach(t)
    if base is not None:
        # A wrapper's handler would be asked for a detach, and be asked for one of what it returns;
        # to a mode that traces an alias would be a tensor from nowhere.
        _torch.as_view_version_only(t, base)
    return t


def _is_any(t: torch.Tensor, values: Any) -> bool:
    return any(t is leaf for leaf in _torch.tree_leaves(values))


def _is_part(t: torch.Tensor, args: Any) -> bool:
    """Whether an op gave a part of a wrapper, as `_nested_get_lengths` does.

    It must stay that very object: nested sizes are equal if they are of the same lengths. Autograd
    leaves alone what is not differentiable.
    """
    if t.is_floating_point() or t.is_complex():
        return False
    return any(
        t is part
        for arg in args
        if isinstance(arg, Tensor) and is_wrapper(arg)
        for part in vars(arg).values()
    )
