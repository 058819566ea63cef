"""How the one write of a handler runs that a kernel above counts (`one_count.py`)."""

from __future__ import annotations

import sys
from typing import Any

from .counted_above import counting
from .one_count import GIVE_BACK
from .operands import written
from .plan import Plan
from .recorder import Recorder
from .site import locate


def run_plain(mode: Recorder, plan: Plan, op: Any, args: Any, kwargs: Any) -> Any:
    """Run an op as it is."""
    return op(*args, **kwargs) if kwargs else op(*args)


def run_the_one(mode: Recorder, plan: Plan, op: Any, args: Any, kwargs: Any) -> Any:
    """Run the one write as it is. If it fails, what the handler does instead is the one."""
    try:
        return op(*args, **kwargs) if kwargs else op(*args)
    except BaseException:
        locate(sys._getframe(2), plan, args, kwargs, GIVE_BACK)
        raise


def run_the_one_by_alias(mode: Recorder, plan: Plan, op: Any, args: Any, kwargs: Any) -> Any:
    """The same where it writes an alias of what the handler was given: no frame tells of that."""

    def run(*args: Any, **kwargs: Any) -> Any:
        with counting(t for _, t in written(plan, args, kwargs)):
            return op(*args, **kwargs)

    return run_the_one(mode, plan, run, args, kwargs)
