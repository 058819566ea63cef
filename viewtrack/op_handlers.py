"""The tracker's handler of each op, which `rules.py` has C++ call."""

from __future__ import annotations

from typing import Any

from ._torch.dynamo import skip_dynamo
from .operands import only_plain, with_tensors_for_numbers
from .plan import caches
from .rules import OfOps, Rule
from .step_choice import ALWAYS, NEVER, OF_HANDLERS, way_of
from .watch import watched

handlers = OfOps()
"""The handlers that were made."""

caches.append(handlers)


def handler_of(func: Any) -> Rule:
    """The tracker's handler of an OpOverload."""
    op = func._op
    step, plan, need = way_of(func)

    @skip_dynamo
    def __torch_dispatch__(mode: Any, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        if types and not only_plain(types):
            return mode.on_subclass(step, plan, func, args, kwargs or {})
        try:
            if need is NEVER or (
                need is not ALWAYS
                and not mode.above
                and (need is OF_HANDLERS or not (mode.level or watched))
            ):
                return op(*args, **kwargs) if kwargs else op(*args)
            return step(mode, plan, op, args, kwargs or {})
        except RuntimeError as error:
            if (taken := with_tensors_for_numbers(plan, args, error)) is None:
                raise
        return __torch_dispatch__(mode, func, types, taken, kwargs)

    return handlers.setdefault(op, __torch_dispatch__)
