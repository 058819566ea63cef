"""A tracker that is told of every op: what the command line and the pytest plugin build on.

It costs time on every op, and so has a mode of its own; plain `track` does not pay for it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from . import _torch
from ._torch.dynamo import skip_dynamo
from .mode import Onlooker, Record, active
from .plan import Plan, plan_of
from .tracking import TrackingMode

Observe = Callable[[Any, Plan, Any, Any, Any], None]


class ObservingTracker(Onlooker):
    """A `Tracker` that calls a function after every op.

    Entered inside of another tracker it stays silent, since the outermost one acts.

    Args:
        record: as for `track`.
        observe: called with the OpOverload, its plan, positional arguments, keyword arguments and
            outputs. Tracking is off in it. It must not raise.
    """

    def __init__(self, record: Record, observe: Observe) -> None:
        super().__init__(record)
        self.own_mode = ObservingMode(observe)


class ObservingMode(TrackingMode):
    """The mode of an `ObservingTracker`."""

    def __init__(self, observe: Observe) -> None:
        super().__init__(active.found_alias)
        self._observe = observe

    @skip_dynamo
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = super().__torch_dispatch__(func, types, args, kwargs)
        if out is not NotImplemented and isinstance(func, _torch.OpOverload):
            self._observe(func, plan_of(func), args, kwargs or {}, out)
        return out
