"""Whether a handler may be above the tracker, so that an op may reach it from below autograd.

Mostly none is: no mode was put on the stack above the tracker, and no subclass takes part. Then
every op that reaches the tracker comes from above autograd, native kernels there mark its views and
count its writes, and the tracker has nothing to do about them.

While a handler runs, C++ has its mode off the stack, so the stack does not tell. So all that puts
modes on it and takes them off is noted as it happens: the functions that ``TorchDispatchMode`` does
it by have their code exchanged.
"""

from __future__ import annotations

from typing import Any

from . import _torch
from ._torch.dynamo import skip_dynamo
from ._torch.subclass import active_modes
from .code_exchange import CodeExchange, copy_of

UNKNOWN = -1
"""Stands for whatever may be above, where it is not seen what is put on the stack."""

SUBCLASS = -2
"""Stands for the handler of a subclass."""


class BelowHandlers(_torch.QuietMode):
    """A mode at the bottom of the stack that is told of the modes put above it.

    Attributes:
        above: what has handlers that may issue ops to it: modes by id, or one of those above.
    """

    def __init__(self) -> None:
        super().__init__()
        self.above: list[int] = [UNKNOWN]


def start(mode: BelowHandlers) -> None:
    """Begin to tell `mode`, which is at the top of the stack now."""
    _exchange.acquire()
    unseen = _torch.below_autograd() or not _exchange.is_done
    mode.above[:] = [UNKNOWN] if unseen else []


def stop(mode: BelowHandlers) -> None:
    """End that."""
    mode.above[:] = [UNKNOWN]
    _exchange.release()


# ------------------------------------------------------------------------------ the exchange

_stock_push, _stock_pop = copy_of(_torch.stack_push), copy_of(_torch.stack_pop)


# These two run with the globals of torch's module, and with the names of its arguments.


@skip_dynamo
def _push(mode: Any) -> None:
    import sys

    sys.modules["viewtrack.handlers_above"].push(mode)


@skip_dynamo
def _pop(k: Any = None) -> Any:
    import sys

    return sys.modules["viewtrack.handlers_above"].pop(k)


def push(mode: Any) -> None:
    """Put a mode on the stack as torch does, and tell of it."""
    _stock_push(mode)
    # Backward runs in threads of its own, with the stack of the thread that called it.
    for tracker in active_modes():
        if isinstance(tracker, BelowHandlers) and tracker is not mode:
            tracker.above.append(id(mode))


def pop(key: Any = None) -> Any:
    """Take a mode off as torch does, and tell of it, unless backward puts it back at its end."""
    mode = _stock_pop(key)
    if not _torch.in_backward():
        for tracker in active_modes():
            if isinstance(tracker, BelowHandlers) and id(mode) in tracker.above:
                tracker.above.remove(id(mode))
    return mode


_exchange = CodeExchange((_torch.stack_push, _push), (_torch.stack_pop, _pop))
