"""Let the counters of a wrapper's inner tensors tell what the wrapper's own counter tells.

A handler runs below autograd, so what it does to inner tensors is counted nowhere: inner views get
counters of their own, and inner writes move none. Where `track` is active, it sees to that itself.
"""

from __future__ import annotations

from typing import Any

import torch

from .. import _torch
from .._torch import subclass as _torch_subclass
from ..plan import Argument, Plan
from ..tracking import TrackingMode
from .kinds import kind_of, likely_parts_of, parts_of

RESIZES = frozenset({"aten::resize_", "aten::resize_as_"})
"""Ops that native kernels count only if they changed the sizes."""


def counted_above(plan: Plan) -> tuple[Argument, ...]:
    """The arguments whose counters the op's ADInplaceOrView kernel moves.

    Kernels of ATen move those that they return, so not the running statistics of a batch norm with
    out=. Those that `torch.library` makes move all that the schema declares.
    """
    if plan.is_composite or not plan.has_native_kernel:
        return ()
    if plan.is_aten:
        return tuple(output.arguments[0] for output in plan.written)
    return plan.writes


def moves_counters_itself(plan: Plan) -> bool:
    """Whether an op without an ADInplaceOrView kernel moves counters on stock torch.

    Custom ops and those that write lists do (foreach, ``split_copy`` with out=), by the ops that
    they are made of. Fused optimizers do not, nor does batch norm for its running statistics, which
    it saves.
    """
    if plan.has_native_kernel or plan.is_composite:
        return False
    if not plan.is_aten:
        return True
    fused = plan.qualified.startswith("aten::_fused_")
    return not fused and any(argument.is_list for argument in plan.writes)


def is_tracked() -> bool:
    """Whether a tracker sees what the handler that asks does."""
    return bool(_torch.mode_stack_len()) and any(
        isinstance(mode, TrackingMode) for mode in _torch_subclass.active_modes()
    )


def counted_natively() -> bool:
    """Whether the inner ops of the handler that asks were counted as they ran."""
    if _torch.mode_stack_len() and is_tracked():
        return True
    return not _torch.is_excluded(_torch.ADINPLACEORVIEW)


def increment(t: torch.Tensor) -> None:
    """Move the counter of t by one; an inference tensor has none, and nothing happens."""
    _increment_version((t,))


_increment_version = _torch_subclass.increment_version


def share_counter(t: Any, other: Any) -> None:
    """Give a wrapper the counter of its inner tensor, or the other way round, where that can be."""
    if can_have_one_counter(t, other):
        _as_view_version_only(t, other)


def share_counter_with_inner(t: Any) -> None:
    """Give what a wrapper that shares its counter has inside that counter, at every level."""
    while kind_of(type(t)).counts_itself:
        share_counter(t._inner, t)
        t = t._inner


def can_have_one_counter(t: Any, other: Any) -> bool:
    """Whether a wrapper and its inner tensor can share one counter.

    Inference tensors have none; what a compiler functionalizes or a torch.func transform has
    wrapped has one that tells nothing here.
    """
    return not (
        t.is_inference()
        or other.is_inference()
        or _torch_subclass.asks_handler_for_sizes(other)
        or _torch.is_functorch_wrapped(other)
    )


def _as_view_version_only(t: torch.Tensor, base: torch.Tensor) -> None:
    with _torch.no_torch_function():
        _torch.as_view_version_only(t, base)


def count_inner_write(t: torch.Tensor) -> None:
    """Move the counters of the inner tensors of a wrapper that an op has written."""
    kind = kind_of(type(t))
    if kind.counts_itself or counted_natively():
        return
    if kind.flattens:
        for _, part in parts_of(t):
            increment(part)
    elif kind.is_quiet or not _torch_subclass.is_torch_function_enabled():
        _count_likely_parts(t)
    else:
        with _torch.no_torch_function():
            _count_likely_parts(t)


def _count_likely_parts(t: torch.Tensor) -> None:
    base = t._base
    for name, part in likely_parts_of(t):
        base_part: Any = None if base is None else vars(base).get(name)
        if _is_joinable(part, base_part):
            # Views of a class that does not declare its parts did not share when they were made.
            _torch.as_view_version_only(part, base_part)
        increment(part)


def _is_joinable(part: torch.Tensor, base_part: Any) -> bool:
    is_tensor = isinstance(base_part, torch.Tensor)
    return is_tensor and _can_share(part, base_part) and _is_alias(part, base_part)


def share_inner_counters(t: Any, base: Any) -> bool:
    """Let the inner tensors of a view share the counters of those of its base.

    Returns:
        Whether one of them lies in the memory of its counterpart in the base.
    """
    base_parts = dict(parts_of(base))
    some = False
    for name, part in parts_of(t):
        base_part = base_parts.get(name)
        if base_part is not None and _is_alias(part, base_part):
            some = True
            if part is not base_part and _can_share(part, base_part):
                _torch.as_view_version_only(part, base_part)
    return some


def _can_share(part: torch.Tensor, base_part: torch.Tensor) -> bool:
    return not (
        part.requires_grad or part._is_view() or part.is_inference() or base_part.is_inference()
    )


def _is_alias(part: torch.Tensor, base_part: torch.Tensor) -> bool:
    try:
        return _torch.is_alias_of(part, base_part)
    except (RuntimeError, NotImplementedError):  # no storage of its own: sparse, nested
        return False
