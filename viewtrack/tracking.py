"""The dispatch mode at the bottom of the stack that `track` puts there.

It sees every op that user code, another mode's handler or a subclass's handler issues, and hands it
to the step that its plan asks for (`steps.py`).
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from typing import Any

import torch

from . import _torch
from ._torch import ADINPLACEORVIEW, is_excluded, set_excluded
from .before_write import Watching
from .handlers_above import SUBCLASS, BelowHandlers
from .info import version
from .ledger import ledger
from .op_handlers import handler_of, handlers
from .operands import first_tensor, join_views, written
from .plan import Argument, Plan
from .recorder import Located
from .rules import of_modes
from .site import Place, Site, issued_in_handler, locate, place_of, site_at
from .stand_in import with_a_frame
from .steps import Step
from .undeclared_writes import Updated, note_updates
from .watch import note_write

_mode_stack_len = _torch.mode_stack_len


class TrackingMode(BelowHandlers):
    """One for each thread; `mode.py` pushes and pops it.

    Attributes:
        level: 0 records nothing, 1 the line of each write, 2 also the Python stack.
        joins_unsafe_views: whether results of `_unsafe_view` share the counter of their base.
    """

    supports_higher_order_operators = True

    def __init__(self, found_alias: Callable[[str, Site], None]) -> None:
        super().__init__()
        self.level = 0
        self.joins_unsafe_views = True
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
            handler = handlers[func._op]
        except AttributeError:  # a higher-order operator
            return func(*args, **(kwargs or {}))
        except KeyError:
            handler = handler_of(func)
        return handler(self, func, types, args, kwargs)

    def on_subclass(self, step: Step | None, plan: Plan, func: Any, args: Any, kwargs: Any) -> Any:
        """Let the handler of a wrapper subclass run with this mode active.

        While a mode's handler runs the mode is off, so what the subclass's handler issues would be
        lost. So the op is issued again with the mode back on the stack, and this time declined:
        torch then asks the subclass, with the mode still there. Only at the bottom of the stack,
        since modes below would not be asked.
        """
        outer = self._passing
        if outer is not None and outer[0] is func and outer[1] == first_tensor(args):
            self._passing = None
            return NotImplemented
        # The ops that a composite op is made of come back here, one by one.
        op = func._op if plan.is_composite else with_a_frame(func)
        if _mode_stack_len():
            return self._run_subclass(step, plan, op, args, kwargs)
        self._passing = (func, first_tensor(args))
        self.above.append(SUBCLASS)
        _torch.push_mode(self)
        try:
            with _torch.marked_as_handler():
                return self._run_subclass(step, plan, op, args, kwargs)
        finally:
            _torch.pop_mode()
            self.above.remove(SUBCLASS)
            # A step asks for sizes and layout before it runs the op, and these are ops as well.
            self._passing = outer

    def _run_subclass(self, step: Step | None, plan: Plan, op: Any, args: Any, kwargs: Any) -> Any:
        if plan.qualified == "aten::new_empty_strided" and args[0].layout is torch.jagged:
            # CopySlices asks for it after a write to `nested.values()`; NestedTensor cannot tell.
            return torch.empty_like(args[0])
        if step is not None and plan.writes:
            before = [(t, version(t)) for _, t in written(plan, args, kwargs)]
            out = step(self, plan, op, args, kwargs)
            if plan.has_native_kernel and not plan.is_composite:
                count_once(plan, args, kwargs, before)
            return out
        # The native kernel of detach asks for another detach of what the handler returned, so with
        # ADInplaceOrView on there would be no end to it.
        was = is_excluded(ADINPLACEORVIEW)
        set_excluded(ADINPLACEORVIEW, True)
        try:
            out = op(*args, **kwargs)
        finally:
            set_excluded(ADINPLACEORVIEW, was)
        if plan.views:
            join_views(plan, args, kwargs, out)
        return out

    def found_alias(self, plan: Plan) -> None:
        """Tell once that an op returned memory of its argument undeclared."""
        if plan.name not in self.known_aliases:
            self.known_aliases.add(plan.name)
            _, user = issued_in_handler(sys._getframe(3), plan)
            self._found_alias(plan.name, site_at(place_of(user)))

    def took_apart(self, plan: Plan, t: Any) -> None:
        """Note where an op returned a list of views of `t`."""
        _, user = issued_in_handler(sys._getframe(3), plan, (t,))
        ledger.open(t).took_apart(plan.name, place_of(user))

    def updated(self, plan: Plan, args: Any, found: Updated, located: Located) -> None:
        """Tell who watches them of running statistics that an op has updated."""
        _, in_handler, user = located
        place = place_of(user, in_handler, self.level > 1)
        note_updates(plan, args, found, place, self._thread)

    def record(
        self,
        plan: Plan,
        argument: Argument,
        t: Any,
        was: int | None,
        located: Located,
        watching: Watching,
    ) -> None:
        """Enter the write that an op has done to `t` into the ledger, and tell who watches it.

        A kernel above autograd, where there is one, has yet to move the counter, by one.
        """
        counted, in_handler, user = located
        now = version(t) if not counted else was if was is None else was + 1
        if user is not None and self.level < 2:  # as `place_of`, in line
            place: Place = (user.f_code, user.f_lasti, in_handler, ())
        else:
            place = place_of(user, in_handler, self.level > 1)
        facts = (plan.name, argument.name, place, self._thread, was, now)
        # `set_` writes no byte, and by now t has the storage that it was set to.
        if self.level and not plan.exchanges_storage:
            ledger.record(t, facts)
        if watching:
            note_write(t, watching.get(id(t), ()), plan, facts, bool(counted))


of_modes[TrackingMode] = handlers


def count_once(plan: Plan, args: Any, kwargs: Any, before: list[tuple[Any, int | None]]) -> None:
    """Take one count back of a wrapper that shares its counter with what its handler wrote.

    A jagged nested tensor is a view of its values: one write of the user moves one counter, once.
    """
    moved = [(t, was, now) for t, was in before if (now := version(t)) != was]
    if moved:
        due = 0 if locate(sys._getframe(2), plan, args, kwargs)[0] else 1
        for t, was, now in moved:
            if was is not None and now is not None and now - was > due:
                _torch.set_version(t, now - 1)
