"""The dispatch mode at the bottom of the stack that `track` puts there.

It sees every op that user code, another mode's handler or a subclass's handler issues. What it does
with one depends on the op's plan:

* a functional op goes straight through;
* a view op runs with ADInplaceOrView on, so the result shares its base's counter; then it is
  detached under the same guard, which keeps the counter and drops the metadata: a native kernel
  above marks what it is handed, and refuses a tensor that carries metadata already;
* a write whose op has an ADInplaceOrView kernel goes as it is where it comes from above autograd
  (the kernel up there counts it), and runs with ADInplaceOrView on where a handler issued it;
* a write whose op has none, and any composite op, runs with ADInplaceOrView on, unless a handler
  does by it what it was given and a kernel above counts that. Then it moves the
  counters that its inner ops move, which is what happens on stock torch without any mode. Bumping
  what the schema declares instead would be wrong: ``_native_batch_norm_legit`` saves the running
  statistics that it then updates.

The dispatcher excludes ADInplaceOrView before it calls a handler, so a guard needs not read what
was. `aten.detach` is the exception: C++ also calls the handler for it directly, when it makes a
shallow copy of a tensor, and gives the copy its counter itself.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from typing import Any

import torch

from . import _torch
from ._torch import ADINPLACEORVIEW, TensorBase, is_excluded, set_excluded
from .info import version
from .ledger import key_of, ledger
from .plan import SHARE_UNDECLARED, Argument, Plan, caches, plan_of
from .site import Site, issued_in_handler, locate, place_of, site_at
from .watch import is_watched, note_write, watched

Step = Callable[["TrackingMode", Plan, Any, Any, Any], Any]

_detach = TensorBase.detach
_VIEW = torch.ops.aten.view.default._op
_mode_stack_len = _torch.mode_stack_len


class TrackingMode(_torch.QuietMode):
    """One for each thread; `mode.py` pushes and pops it.

    Attributes:
        level: 0 records nothing, 1 the line of each write, 2 also the Python stack.
    """

    supports_higher_order_operators = True

    def __init__(self, found_alias: Callable[[str, Site], None]) -> None:
        super().__init__()
        self.level = 0
        self._found_alias = found_alias
        # Ops that were told of already: one report an op, and no frame walk for the next call.
        self.known_aliases: set[str] = set()
        self._passing: Any = None
        self._thread = threading.current_thread().name

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Let torch.compile compile, as it does without a mode."""
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        try:
            op = func._op
        except AttributeError:  # a higher-order operator
            return func(*args, **(kwargs or {}))
        try:
            step, plan = _steps[op]
        except KeyError:
            step, plan = _steps[op] = _choose(func)
        if types and not _only_plain(types):
            return self._on_subclass(step, plan, func, args, kwargs or {})
        if step is None:
            return op(*args, **kwargs) if kwargs else op(*args)
        return step(self, plan, op, args, kwargs or {})

    def _on_subclass(self, step: Step | None, plan: Plan, func: Any, args: Any, kwargs: Any) -> Any:
        """Let the handler of a wrapper subclass run with this mode active.

        While a mode's handler runs the mode is off, so what the subclass's handler issues would be
        lost. So the op is issued again with the mode back on the stack, and this time declined:
        torch then asks the subclass, with the mode still there. Only at the bottom of the stack,
        since modes below would not be asked.
        """
        passing, self._passing = self._passing, None
        if passing is not None and passing[0] is func and passing[1] == _first_tensor(args):
            return NotImplemented
        if _mode_stack_len():
            return self._run_subclass(step, plan, func._op, args, kwargs)
        self._passing = (func, _first_tensor(args))
        _torch.push_mode(self)
        try:
            with _torch.marked_as_handler():
                return self._run_subclass(step, plan, func._op, args, kwargs)
        finally:
            _torch.pop_mode()
            self._passing = None

    def _run_subclass(self, step: Step | None, plan: Plan, op: Any, args: Any, kwargs: Any) -> Any:
        if step is _counted_write or step is _uncounted_write:
            return step(self, plan, op, args, kwargs)
        # The native kernel of detach asks for another detach of what the handler returned, so with
        # ADInplaceOrView on there would be no end to it.
        was = is_excluded(ADINPLACEORVIEW)
        set_excluded(ADINPLACEORVIEW, True)
        try:
            out = op(*args, **kwargs)
        finally:
            set_excluded(ADINPLACEORVIEW, was)
        if plan.views:
            _join_views(plan, args, kwargs, out)
        return out

    def found_alias(self, plan: Plan) -> None:
        """Tell once that an op returned memory of its argument undeclared."""
        if plan.name not in self.known_aliases:
            self.known_aliases.add(plan.name)
            _, user = issued_in_handler(sys._getframe(3), plan)
            self._found_alias(plan.name, site_at(place_of(user)))

    def record(
        self,
        plan: Plan,
        argument: Argument,
        t: Any,
        was: int | None,
        located: tuple[bool, bool, Any],
    ) -> None:
        """Enter the write that an op has done to `t` into the ledger.

        A kernel above autograd, where there is one, has yet to move the counter, by one.
        """
        counted, in_handler, user = located
        now = version(t) if not counted else was if was is None else was + 1
        place = place_of(user, in_handler, self.level > 1)
        facts = (plan.name, argument.name, place, self._thread, was, now)
        if self.level:
            ledger.record(t, facts)
        if watched:
            note_write(t, plan, facts, counted)


# ------------------------------------------------------------------------------ steps


def _view(mode: TrackingMode, plan: Plan, op: Any, args: Any, kwargs: Any) -> Any:
    set_excluded(ADINPLACEORVIEW, False)
    try:
        out = op(*args, **kwargs) if kwargs else op(*args)
        if type(out) is torch.Tensor:
            return _detach(out) if out._is_view() else out
        return [_detach(t) if t._is_view() else t for t in out]
    finally:
        set_excluded(ADINPLACEORVIEW, True)


def _detach_view(mode: TrackingMode, plan: Plan, op: Any, args: Any, kwargs: Any) -> Any:
    if not is_excluded(ADINPLACEORVIEW):
        return op(*args, **kwargs)
    return _view(mode, plan, op, args, kwargs)


def _guarded(mode: TrackingMode, plan: Plan, op: Any, args: Any, kwargs: Any) -> Any:
    """A composite op that neither writes nor is sure to return a view."""
    set_excluded(ADINPLACEORVIEW, False)
    try:
        return _stripped(op(*args, **kwargs), args)
    finally:
        set_excluded(ADINPLACEORVIEW, True)


def _foreign_view(mode: TrackingMode, plan: Plan, op: Any, args: Any, kwargs: Any) -> Any:
    """A view op without an ADInplaceOrView kernel: whatever its own kernel does, join counters."""
    out = _guarded(mode, plan, op, args, kwargs)
    _join_views(plan, args, kwargs, out)
    return out


def _counted_write(mode: TrackingMode, plan: Plan, op: Any, args: Any, kwargs: Any) -> Any:
    """A write whose op has an ADInplaceOrView kernel."""
    located = locate(sys._getframe(2), plan, args, kwargs)
    run = _plain if located[0] else _guarded
    watching = watched and is_watched(plan, args, kwargs)
    if not (mode.level or watching):
        return run(mode, plan, op, args, kwargs)
    sole = plan.sole_write
    if sole is not None and sole.index < len(args):  # nearly all writes; spare them the lists
        t = args[sole.index]
        was = version(t)
        out = run(mode, plan, op, args, kwargs)
        mode.record(plan, sole, t, was, located)
        return out
    written = _written(plan, args, kwargs)
    before = [version(t) for _, t in written]
    out = run(mode, plan, op, args, kwargs)
    for (argument, t), was in zip(written, before, strict=True):
        mode.record(plan, argument, t, was, located)
    return out


def _plain(mode: TrackingMode, plan: Plan, op: Any, args: Any, kwargs: Any) -> Any:
    return op(*args, **kwargs) if kwargs else op(*args)


def _uncounted_write(mode: TrackingMode, plan: Plan, op: Any, args: Any, kwargs: Any) -> Any:
    """A write whose op has no ADInplaceOrView kernel."""
    watching = watched and is_watched(plan, args, kwargs)
    written = _written(plan, args, kwargs)
    before = [version(t) for _, t in written]
    located = locate(sys._getframe(2), plan, args, kwargs)
    counted = located[0]
    out = (_plain if counted else _guarded)(mode, plan, op, args, kwargs)
    for (argument, t), was in zip(written, before, strict=True):
        # The inner ops of a wrapper's handler write the wrapped tensors and not the wrapper.
        unseen = (argument.is_list or not plan.is_aten) and _is_wrapper(t) and not counted
        if unseen and was is not None and version(t) == was:
            torch.autograd.graph.increment_version(t)
    if mode.level or watching:
        for (argument, t), was in zip(written, before, strict=True):
            mode.record(plan, argument, t, was, located)
    return out


def _unsafe_view(mode: TrackingMode, plan: Plan, op: Any, args: Any, kwargs: Any) -> Any:
    """`aten._unsafe_view` is `aten.view` that keeps the relation to itself; view costs us less.

    Not where modes below would see another op than was called.
    """
    if _mode_stack_len() or kwargs or type(args[0]) is not torch.Tensor:
        return _undeclared(mode, plan, op, args, kwargs)
    mode.found_alias(plan)
    return _view(mode, plan, _VIEW, args, kwargs)


def _undeclared(mode: TrackingMode, plan: Plan, op: Any, args: Any, kwargs: Any) -> Any:
    """An op that may return memory of its arguments without its schema saying so."""
    out = op(*args, **kwargs)
    inputs = [t for a in plan.arguments for t in a.tensors(args, kwargs)]
    share = not plan.is_aten or plan.qualified in SHARE_UNDECLARED
    for t in _tensors(out):
        base = None if _is_any(t, inputs) else _base_among(t, inputs)
        if base is not None:
            mode.found_alias(plan)
            if share and _joinable(t, base):
                _torch.as_view_version_only(t, base)
    return out


def _choose(func: Any) -> tuple[Step | None, Plan]:
    """The step for an op; None if it goes straight through."""
    plan = plan_of(func)
    if plan.writes:
        counted = plan.has_native_kernel and not plan.is_composite
        return (_counted_write if counted else _uncounted_write), plan
    if plan.is_composite:
        return _guarded, plan
    if plan.qualified == "aten::detach":
        return _detach_view, plan
    if plan.views:
        return (_view if plan.has_native_kernel else _foreign_view), plan
    if plan.qualified == "aten::_unsafe_view":
        return _unsafe_view, plan
    return (_undeclared if plan.may_alias_undeclared else None), plan


# Keyed by the builtin inside an OpOverload: hashing the OpOverload itself runs Python.
_steps: dict[Any, tuple[Step | None, Plan]] = {}
caches.append(_steps)


# ------------------------------------------------------------------------------ helpers


def _join_views(plan: Plan, args: Any, kwargs: Any, out: Any) -> None:
    """Give outputs that the schema calls views the counters of their bases."""
    outs = out if plan.returns > 1 else (out,)
    for output in plan.views:
        bases = [t for a in output.arguments for t in a.tensors(args, kwargs)]
        for t in outs[output.index] if output.is_list else (outs[output.index],):
            for base in bases:
                if _joinable(t, base) and not _is_any(t, bases):
                    _torch.as_view_version_only(t, base)


def _stripped(out: Any, args: Any) -> Any:
    """The outputs without view metadata, sharing the counters they share. Run it under the guard.

    An output that is an argument keeps what it has.
    """
    if isinstance(out, torch.Tensor):
        return _detach(out) if out._is_view() and not _is_any(out, args) else out
    if isinstance(out, (list, tuple)):
        return type(out)(_stripped(t, args) for t in out)
    return out


def _tensors(out: Any) -> list[torch.Tensor]:
    if isinstance(out, torch.Tensor):
        return [out]
    if isinstance(out, (list, tuple)):
        return [t for part in out for t in _tensors(part)]
    return []


def _is_any(t: Any, candidates: Any) -> bool:
    return any(t is c or (isinstance(c, (list, tuple)) and _is_any(t, c)) for c in candidates)


def _base_among(t: torch.Tensor, inputs: list[Any]) -> Any:
    key = key_of(t)
    return next((base for base in inputs if key_of(base) == key), None)


def _joinable(t: torch.Tensor, base: torch.Tensor) -> bool:
    """Whether t may be given base's counter: it aliases it and has no metadata to lose.

    Of a wrapper's storage nothing can be told, so there the schema is believed.
    """
    if not isinstance(t, torch.Tensor) or t.is_inference() or base.is_inference():
        return False
    if t.requires_grad or t._is_view():
        return False
    return key_of(t) == key_of(base) or (_is_wrapper(t) and _is_wrapper(base))


def _is_wrapper(t: torch.Tensor) -> bool:
    return type(t).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__


def _only_plain(types: Any) -> bool:
    """Whether no subclass takes part: 2.6 names torch.Tensor where C++ asks for a detach."""
    return all(cls is torch.Tensor for cls in types)


def _first_tensor(args: Any) -> int | None:
    """The identity of the first tensor among the arguments, or in a list of them."""
    for value in args:
        if isinstance(value, torch.Tensor):
            return id(value)
        if isinstance(value, (list, tuple)) and value and isinstance(value[0], torch.Tensor):
            return id(value[0])
    return None


def _written(plan: Plan, args: Any, kwargs: Any) -> list[tuple[Argument, Any]]:
    return [(a, t) for a in plan.writes for t in a.tensors(args, kwargs)]
