"""What a step of the tracker (`steps.py`) asks of the mode that it runs for (`tracking.py`)."""

from __future__ import annotations

from typing import Any, Protocol

from .before_write import Watching
from .plan import Argument, Plan
from .undeclared_writes import Updated

Located = tuple[int, bool, Any]
"""What `site.locate` returns."""


class Recorder(Protocol):
    """What a step asks of the mode that it runs for."""

    above: list[int]
    level: int
    joins_unsafe_views: bool

    def found_alias(self, plan: Plan) -> None:
        """Tell once that an op returned memory of its argument undeclared."""

    def record(
        self,
        plan: Plan,
        argument: Argument,
        t: Any,
        was: int | None,
        located: Located,
        watching: Watching,
    ) -> None:
        """Enter the write that an op has done to `t` into the ledger, and tell who watches it."""

    def took_apart(self, plan: Plan, t: Any) -> None:
        """Note where an op returned a list of views of `t`."""

    def updated(self, plan: Plan, args: Any, found: Updated, located: Located) -> None:
        """Tell who watches them of running statistics that an op has updated."""
