"""Whether a handler may be above the tracker, so that an op may reach it from below autograd.

Mostly none is: no mode was entered after the tracker, and no subclass takes part. Then every op
that reaches the tracker comes from above autograd, native kernels there mark its views and count
its writes, and the tracker has nothing to do about them.
"""

from __future__ import annotations

from typing import Any

from . import _torch
from ._torch.subclass import active_modes

UNKNOWN = -1
"""Stands for whatever may be above, where the entering of modes is not seen."""

SUBCLASS = -2
"""Stands for the handler of a subclass."""


class BelowHandlers(_torch.QuietMode):
    """A mode at the bottom of the stack that is told of the modes entered above it.

    Attributes:
        above: what has handlers that may issue ops to it: modes by id, or one of those above.
    """

    def __init__(self) -> None:
        super().__init__()
        self.above: list[int] = [UNKNOWN]


def below(mode: Any) -> list[BelowHandlers]:
    """The modes of this thread's stack that want to know of `mode`.

    Backward runs in threads of its own, with the stack of the thread that called it.
    """
    return [m for m in active_modes() if isinstance(m, BelowHandlers) and m is not mode]


def entered(mode: Any) -> None:
    """Tell of a mode that has been entered."""
    for tracker in below(mode):
        tracker.above.append(id(mode))


def left(mode: Any, trackers: list[BelowHandlers]) -> None:
    """Tell `trackers`, which were `below` it, of a mode that has been left."""
    for tracker in trackers:
        if id(mode) in tracker.above:
            tracker.above.remove(id(mode))
