"""What the tracker does with each kind of op.

The mode at the bottom of the stack (`tracking.py`) sees every op that user code, another mode's
handler or a subclass's handler issues. Where nothing is above it that has a handler
(`handlers_above.py`) few ops need one, since kernels above see to the rest (`step_choice.py`).
Else it depends on the op's plan what is done:

* a functional op goes straight through;
* a view op runs with ADInplaceOrView on, so the result shares its base's counter; then it is
  detached under the same guard, which keeps the counter and drops the metadata: a native kernel
  above marks what it is handed, and refuses a tensor that carries metadata already;
* a write whose op has an ADInplaceOrView kernel goes as it is where it comes from above autograd
  (the kernel up there counts it), and runs with ADInplaceOrView on where a handler issued it;
* a write whose op has none, and any composite op, runs with ADInplaceOrView on, unless a handler
  does by it what it was given and a kernel above counts that. Then it moves the counters that its
  inner ops move, which is what happens on stock torch without any mode. Bumping what the schema
  declares instead would be wrong: ``_native_batch_norm_legit`` saves the running statistics that it
  then updates;
* a collective of torch.distributed, which no kernel counts, is counted here;
* an op of someone else's without an Autograd kernel goes back above autograd where it came from
  there, since stock torch records what its kernel calls; under a mode its gradient is lost.

The dispatcher excludes ADInplaceOrView before it calls a handler, so a guard needs not read what
was. `aten.detach` is the exception: C++ also calls the handler for it directly, when it makes a
shallow copy of a tensor, and gives the copy its counter itself.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch

from . import _torch, undeclared_writes
from ._torch import (
    ADINPLACEORVIEW,
    CONJUGATE,
    NEGATIVE,
    TensorBase,
    is_excluded,
    set_excluded,
)
from .before_write import Watching, watches_reached
from .collectives import is_counted_by_backend
from .info import version
from .one_count import ABOVE, TAKE
from .operands import (
    any_sparse,
    is_complex,
    is_uncounted_of_wrappers,
    is_wrapper,
    join_views,
    joinable,
    stripped,
    undeclared,
    written,
)
from .plan import NUMBERS, SHARE_UNDECLARED, Argument, Plan
from .recorder import Located, Recorder
from .site import issued_in_handler, locate, user_frame
from .the_one import run_plain, run_the_one, run_the_one_by_alias
from .watch import watched

Step = Callable[[Recorder, Plan, Any, Any, Any], Any]

_detach = TensorBase.detach
_VIEW = torch.ops.aten.view.default._op
_mode_stack_len = _torch.mode_stack_len


def view(mode: Recorder, plan: Plan, op: Any, args: Any, kwargs: Any) -> Any:
    """A view op that returns one view."""
    set_excluded(ADINPLACEORVIEW, False)
    try:
        out = op(*args, **kwargs) if kwargs else op(*args)
        # Modes below would see the detach (make_fx would record it).
        if type(out) is torch.Tensor and not _mode_stack_len():
            return _detach(out) if out._is_view() else out
        return stripped(out, args)
    finally:
        set_excluded(ADINPLACEORVIEW, True)


def views(mode: Recorder, plan: Plan, op: Any, args: Any, kwargs: Any) -> Any:
    """A view op that returns a list. Native lets none of these be written: `notes.py` says why."""
    if mode.level:
        mode.took_apart(plan, args[0])
    set_excluded(ADINPLACEORVIEW, False)
    try:
        out = op(*args, **kwargs) if kwargs else op(*args)
        if _mode_stack_len() or type(args[0]) is not torch.Tensor:
            return stripped(out, args)
        return [_detach(t) if t._is_view() else t for t in out]
    finally:
        set_excluded(ADINPLACEORVIEW, True)


def detach_view(mode: Recorder, plan: Plan, op: Any, args: Any, kwargs: Any) -> Any:
    """`aten.detach`, unless C++ asks for it."""
    if not is_excluded(ADINPLACEORVIEW):
        return op(*args, **kwargs)
    return view(mode, plan, op, args, kwargs)


def _guarded(mode: Recorder, plan: Plan, op: Any, args: Any, kwargs: Any) -> Any:
    """Run the op with ADInplaceOrView on.

    For an op on a ScriptObject, Python calls the handler, and excludes nothing before.
    """
    was = is_excluded(ADINPLACEORVIEW)
    set_excluded(ADINPLACEORVIEW, False)
    try:
        return stripped(op(*args, **kwargs), args)
    finally:
        set_excluded(ADINPLACEORVIEW, was)


def composite(mode: Recorder, plan: Plan, op: Any, args: Any, kwargs: Any) -> Any:
    """A composite op that does not write: from a handler, and in inference mode, it comes whole.

    In inference mode nothing above marks what comes of it, if it has no ADInplaceOrView kernel.
    """
    unmarked = torch.is_inference_mode_enabled() and not plan.has_native_kernel
    if unmarked and not issued_in_handler(sys._getframe(2), plan, args)[0]:
        return _recorded(mode, plan, op, args, kwargs)
    out = _hidden_of_sparse(mode, plan, op, args, kwargs)
    if plan.may_alias_undeclared and not plan.views:
        _join_undeclared(mode, plan, args, kwargs, out)
    return out


def _hidden_of_sparse(mode: Recorder, plan: Plan, op: Any, args: Any, kwargs: Any) -> Any:
    """`_guarded`, except for an op on sparse tensors that gives no view.

    Kernels resize what `_values()` gives: a view, with ADInplaceOrView on. They would give zeros.
    """
    run = run_plain if not plan.views and any_sparse((args, kwargs)) else _guarded
    return run(mode, plan, op, args, kwargs)


def counted_write(mode: Recorder, plan: Plan, op: Any, args: Any, kwargs: Any) -> Any:
    """A write whose op has an ADInplaceOrView kernel."""
    frame = sys._getframe(2)
    if mode.above:
        located = locate(frame, plan, args, kwargs, TAKE)
        run = _RUNS[located[0]]
    else:
        located = ABOVE, False, user_frame(frame)
        run = run_plain
    watching = watches_reached(plan, args, kwargs) if watched else {}
    if not (mode.level or watching):
        return run(mode, plan, op, args, kwargs)
    sole = plan.sole_write
    # Nearly all writes; spare them the lists.
    if sole is not None and sole.index < len(args) and type(t := args[sole.index]) not in NUMBERS:
        was = version(t)
        out = run(mode, plan, op, args, kwargs)
        mode.record(plan, sole, t, was, located, watching)
        return out
    writes = written(plan, args, kwargs)
    before = [version(t) for _, t in writes]
    out = run(mode, plan, op, args, kwargs)
    _record_all(mode, plan, writes, before, located, watching)
    return out


def write_counted_first(mode: Recorder, plan: Plan, op: Any, args: Any, kwargs: Any) -> Any:
    """A write of a `torch.library.custom_op`: the kernel above has counted it already."""
    counted, in_handler, user = locate(sys._getframe(2), plan, args, kwargs, TAKE)
    run = _RUNS[counted]
    watching = watches_reached(plan, args, kwargs, is_counted=bool(counted)) if watched else {}
    if not (mode.level or watching):
        return run(mode, plan, op, args, kwargs)
    writes = written(plan, args, kwargs)
    now = [version(t) for _, t in writes]
    before = [v - 1 if counted and v is not None else v for v in now]
    out = run(mode, plan, op, args, kwargs)
    _record_all(mode, plan, writes, before, (False, in_handler, user), watching)
    return out


def _record_all(
    mode: Recorder,
    plan: Plan,
    writes: list[tuple[Argument, Any]],
    before: list[int | None],
    located: Located,
    watching: Watching,
) -> None:
    for (argument, t), was in zip(writes, before, strict=True):
        mode.record(plan, argument, t, was, located, watching)


#: How to run a write, by what `locate` says of it.
_RUNS: tuple[Step, ...] = (_guarded, run_plain, run_the_one, run_the_one_by_alias)


def uncounted_write(mode: Recorder, plan: Plan, op: Any, args: Any, kwargs: Any) -> Any:
    """A write whose op has no ADInplaceOrView kernel."""
    watching = watches_reached(plan, args, kwargs) if watched else {}
    writes = written(plan, args, kwargs)
    before = [version(t) for _, t in writes]
    counted, in_handler, _ = located = locate(sys._getframe(2), plan, args, kwargs, TAKE)
    run: Step = _recorded if plan.is_recorded_inside and not in_handler else _guarded
    if counted or plan.updates_beside_results:
        run = _RUNS[counted or ABOVE]
    out = run(mode, plan, op, args, kwargs)
    for (argument, t), was in zip(writes, before, strict=True):
        # The inner ops of a wrapper's handler write the wrapped tensors and not the wrapper.
        unseen = is_uncounted_of_wrappers(plan, argument) and is_wrapper(t) and not counted
        if unseen and was is not None and version(t) == was:
            torch.autograd.graph.increment_version(t)
    if mode.level or watching:
        _record_all(mode, plan, writes, before, located, watching)
    return out


def collective(mode: Recorder, plan: Plan, op: Any, args: Any, kwargs: Any) -> Any:
    """A collective of torch.distributed that writes: no kernel counts it, so this does, once."""
    watching = watches_reached(plan, args, kwargs) if watched else {}
    if is_counted_by_backend(plan.qualified, args):
        return run_plain(mode, plan, op, args, kwargs)
    writes = written(plan, args, kwargs)
    before = [version(t) for _, t in writes]
    out = run_plain(mode, plan, op, args, kwargs)
    for (_, t), was in zip(writes, before, strict=True):
        if was is not None and version(t) == was:  # the pieces of one buffer share their counter
            torch.autograd.graph.increment_version(t)
    if mode.level or watching:
        _, in_handler, user = locate(sys._getframe(2), plan, args, kwargs)
        _record_all(mode, plan, writes, before, (False, in_handler, user), watching)
    return out


def functional_collective(mode: Recorder, plan: Plan, op: Any, args: Any, kwargs: Any) -> Any:
    """A collective that does not write, or the wait for one.

    What it returns is written later, by a thread that inherits what is excluded here. Nobody may
    take that for a write to the result: a cache has it already.
    """
    if (
        plan.is_recorded_inside
        and not torch.is_inference_mode_enabled()
        and not issued_in_handler(sys._getframe(2), plan, args)[0]
    ):
        with _torch.above_autograd():
            set_excluded(ADINPLACEORVIEW, True)
            out = op(*args, **kwargs)
    else:
        out = op(*args, **kwargs)
    _join_undeclared(mode, plan, args, kwargs, out)
    return out


def unsafe_view(mode: Recorder, plan: Plan, op: Any, args: Any, kwargs: Any) -> Any:
    """`aten._unsafe_view` is `aten.view` that keeps the relation to itself; view costs us less.

    Not where modes below would see another op than was called.
    """
    simple = not (_mode_stack_len() or kwargs) and type(args[0]) is torch.Tensor
    if not (simple and mode.joins_unsafe_views):
        return undeclared_alias(mode, plan, op, args, kwargs)
    mode.found_alias(plan)
    return view(mode, plan, _VIEW, args, kwargs)


def undeclared_alias(mode: Recorder, plan: Plan, op: Any, args: Any, kwargs: Any) -> Any:
    """An op that may return memory of its arguments without its schema saying so."""
    out = op(*args, **kwargs)
    _join_undeclared(mode, plan, args, kwargs, out)
    return out


def updating(mode: Recorder, plan: Plan, op: Any, args: Any, kwargs: Any) -> Any:
    """An op that updates running statistics without its schema saying so."""
    if not watched:
        return op(*args, **kwargs) if kwargs else op(*args)
    found = undeclared_writes.updated(plan, args)
    out = op(*args, **kwargs)
    if found:
        mode.updated(plan, args, found, locate(sys._getframe(2), plan, args, kwargs))
    return out


def _join_undeclared(mode: Recorder, plan: Plan, args: Any, kwargs: Any, out: Any) -> None:
    is_unsafe_view = plan.qualified in SHARE_UNDECLARED
    share = mode.joins_unsafe_views if is_unsafe_view else not plan.is_aten
    for t, base in undeclared(plan, args, kwargs, out):
        mode.found_alias(plan)
        if share and joinable(t, base):
            _torch.as_view_version_only(t, base)


def foreign(mode: Recorder, plan: Plan, op: Any, args: Any, kwargs: Any) -> Any:
    """An op of someone else's that does not write, and has no ADInplaceOrView kernel."""
    if plan.is_recorded_inside and not issued_in_handler(sys._getframe(2), plan, args)[0]:
        out = _recorded(mode, plan, op, args, kwargs)
    else:
        out = _hidden_of_sparse(mode, plan, op, args, kwargs)
        join_views(plan, args, kwargs, out)
    if not plan.views:
        _join_undeclared(mode, plan, args, kwargs, out)
    return out


def _recorded(mode: Recorder, plan: Plan, op: Any, args: Any, kwargs: Any) -> Any:
    """Let autograd record what the kernel calls, which it would not do below any mode."""
    if torch.is_inference_mode_enabled():
        with _torch.inplace_or_view():
            return op(*args, **kwargs)
    with _torch.above_autograd():
        return op(*args, **kwargs)


def resolving(step: Step, always: bool) -> Step:
    """The step, with conj and neg bits resolved in whatever its kernel calls.

    The dispatcher excludes Conjugate and Negative before it calls a handler. Under a mode that does
    nothing, `linalg_pinv` reads its conjugated views as they lie in memory, and is wrong.
    """

    def resolved(mode: Recorder, plan: Plan, op: Any, args: Any, kwargs: Any) -> Any:
        if not (always or is_complex(args)):
            return step(mode, plan, op, args, kwargs)
        conjugate, negative = is_excluded(CONJUGATE), is_excluded(NEGATIVE)
        set_excluded(CONJUGATE, False)
        set_excluded(NEGATIVE, False)
        try:
            return step(mode, plan, op, args, kwargs)
        finally:
            set_excluded(CONJUGATE, conjugate)
            set_excluded(NEGATIVE, negative)

    return resolved
