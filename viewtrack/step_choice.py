"""Which step of the tracker (`steps.py`) an op has, and when it needs it; chosen once an op."""

from __future__ import annotations

from typing import Any

from . import own_saves, steps, undeclared_writes
from ._torch.kernels import composite_kernel
from .plan import Plan, caches, plan_of
from .recorder import Recorder
from .steps import Step
from .the_one import run_plain

#: When an op needs its step: never, if a handler may have issued it, if that or somebody wants to
#: know of writes, or always.
NEVER, OF_HANDLERS, OF_WRITES, ALWAYS = 0, 1, 2, 3

_NEEDS: dict[Any, int] = {
    None: NEVER,
    steps.view: OF_HANDLERS,
    steps.detach_view: OF_HANDLERS,
    steps.views: OF_WRITES,
    steps.counted_write: OF_WRITES,
    steps.write_counted_first: OF_WRITES,
}

#: An op's step, None if it goes straight through, its plan, and when it needs the step.
Way = tuple[Any, Plan, int]

# Keyed by the builtin inside an OpOverload: hashing the OpOverload itself runs Python.
_ways: dict[Any, Way] = {}

#: The step of an op whose step resolves conj and neg bits, for when its arguments are real.
on_real: dict[Any, Step | None] = {}
caches.extend((_ways, on_real))


def way_of(func: Any) -> Way:
    """The way of an OpOverload, chosen once."""
    try:
        return _ways[func._op]
    except KeyError:
        step, plan = _choose(func)
        way = _ways[func._op] = step, plan, _NEEDS.get(step, ALWAYS)
        return way


def step_for(func: Any) -> tuple[Step | None, Plan]:
    """The step for an op, None if it goes straight through, and its plan."""
    return way_of(func)[:2]


def _choose(func: Any) -> tuple[Step | None, Plan]:
    plan = plan_of(func)
    step = _step_of(plan)
    if plan.is_composite and plan.has_native_kernel and plan.writes:
        step = _decomposing(func)
    if plan.qualified in own_saves.OPS:
        step = own_saves.unseen_by_own(step or run_plain)
    if plan.is_composite or (plan.is_made_of_other_ops and not plan.views):
        if not plan.is_composite:
            on_real[func._op] = step
        step = steps.resolving(step or run_plain, always=plan.is_composite)
    return step, plan


def _decomposing(func: Any) -> Step:
    """For `matmul.out`, whose ADInplaceOrView kernel is out of reach from above autograd."""
    kernel = composite_kernel(func)

    def decomposing(mode: Recorder, plan: Plan, op: Any, args: Any, kwargs: Any) -> Any:
        return steps.uncounted_write(mode, plan, kernel, args, kwargs)

    return decomposing


def _step_of(plan: Plan) -> Step | None:
    if plan.is_collective:
        return steps.collective if plan.writes else steps.functional_collective
    if plan.writes:
        if plan.is_counted_first:
            return steps.write_counted_first
        counted = plan.has_native_kernel and not plan.is_composite
        return steps.counted_write if counted else steps.uncounted_write
    if plan.is_composite:
        return steps.composite
    if plan.qualified == "aten::detach":
        return steps.detach_view
    if plan.views and plan.has_native_kernel and plan.is_aten:
        return steps.views if plan.views[0].is_list else steps.view
    if plan.views or not (plan.is_aten or plan.has_native_kernel):
        return steps.foreign
    if plan.qualified == "aten::_unsafe_view":
        return steps.unsafe_view
    if plan.qualified in undeclared_writes.UPDATES:
        return steps.updating
    return steps.undeclared_alias if plan.may_alias_undeclared else None
