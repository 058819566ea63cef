"""How `TrackedTensor` runs an op on its inner tensor, so that counters of both agree.

The two share one counter, whose moves above the wrapper count for both. A handler runs with
ADInplaceOrView excluded. What happens to the inner tensor's counter therefore depends on the op, in
the way of `tracking.py`:

* views and composite ops run with ADInplaceOrView on, so inner views share inner counters;
* a write that the kernel above the wrapper counts runs as it is, and nobody below counts it: not
  the handler of an inner wrapper, and not a tracker;
* foreach, custom and composite ops run with ADInplaceOrView on, which counts them;
* any other write moves no counter on stock torch (batch norm's running statistics) and none here.

Inner tensors beside the first, and an inner tensor that cannot share the counter (an inference
tensor in a normal wrapper, or the other way round), are moved along.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from .. import counted_above as above_here
from .._torch import OpOverload
from .._torch import subclass as _torch_subclass
from ..info import version
from ..plan import Argument, plan_of
from ..site import locate
from .counters import (
    RESIZES,
    can_have_one_counter,
    counted_above,
    increment,
    is_tracked,
    moves_counters_itself,
    share_counter_with_inner,
)
from .kinds import kind_of, parts_of


def run_counted(func: Any, args: Any, kwargs: Any, run: Callable[[Any, Any, Any], Any]) -> Any:
    """Call ``run(func, args, kwargs)``, and keep the counters of wrappers and inner tensors."""
    if not isinstance(func, OpOverload):  # a higher-order operator
        return run(func, args, kwargs)
    plan = plan_of(func)
    if not plan.writes:
        with _torch_subclass.as_below_autograd(bool(plan.views) or plan.is_composite):
            return run(func, args, kwargs)
    counted = counted_above(plan)
    rest = tuple(a for a in plan.writes if a not in counted)
    above, below = _wrappers(counted, args, kwargs), _wrappers(rest, args, kwargs)
    before = {id(t): (t._inner, version(t), _versions(t)) for t in above + below}
    with (
        above_here.counting(t._inner for t in above),
        _torch_subclass.as_below_autograd(plan.is_composite or moves_counters_itself(plan)),
    ):
        out = run(func, args, kwargs)
    for t in above:
        inner, _, were = before[id(t)]
        _settle(t, inner)
        if not (plan.qualified in RESIZES and t.size() == t._inner.size()):
            _move_parts(t, were, t._inner if can_have_one_counter(t, t._inner) else None)
            if not is_tracked() and not locate(sys._getframe(2), plan, args, kwargs)[0]:
                increment(t)  # a handler issued it, and no kernel above counts it
    for t in below:
        _, own, were = before[id(t)]
        if moves_counters_itself(plan):
            _move_parts(t, were)
        if version(t) == own:
            _move_wrapper(t, were)
    return out


def _settle(t: Any, inner: Any) -> None:
    """Put right what a write leaves behind on the inner tensor, and not on the wrapper."""
    if t._inner is not inner:  # `run` has put another one in its place
        share_counter_with_inner(t)
    if t.is_conj() != t._inner.is_conj():  # lu_solve with out= leaves its result so
        _torch_subclass.set_conj_and_neg(t, t._inner)


def _wrappers(arguments: tuple[Argument, ...], args: Any, kwargs: Any) -> list[Any]:
    written = [t for a in arguments for t in a.tensors(args, kwargs)]
    return [t for t in written if kind_of(type(t)).counts_itself and not _is_traced(t)]


def _is_traced(t: Any) -> bool:
    """Whether a compiler is looking: it functionalizes writes, and wants no counters."""
    return any(_torch_subclass.asks_handler_for_sizes(part) for _, part in parts_of(t))


def _versions(t: Any) -> list[int | None]:
    return [version(part) for _, part in parts_of(t)]


def _move_parts(t: Any, before: list[int | None], but: Any = None) -> None:
    """Move the counters of inner tensors that nobody has moved."""
    for (_, part), was in zip(parts_of(t), before, strict=True):
        if part is not but and version(part) == was:
            increment(part)


def _move_wrapper(t: Any, before: list[int | None]) -> None:
    """Move the wrapper's counter as far as that of its inner tensor went."""
    moves = [
        now - was
        for now, was in zip(_versions(t), before, strict=True)
        if now is not None and was is not None
    ]
    for _ in range(max(moves, default=0)):
        increment(t)
