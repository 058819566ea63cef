"""Count a write once, where several handlers that it passes through call `correct_aliasing`.

A write by an op without an ADInplaceOrView kernel (foreach, custom) is counted by the handler that
is done with it first, the lowest. That one looks for the frames of the handlers above, through
which the op was passed on, and leaves a note for them.
"""

from __future__ import annotations

import sys
import threading
from types import FrameType
from typing import Any

from ..info import version
from ..plan import Plan
from ..site import handler_of


class _Note(threading.local):
    """What the last handler that counted left for those above it."""

    write: Any = None
    handlers: tuple[Any, ...] = ()


_note = _Note()


def is_counted_below(plan: Plan, args: Any, kwargs: Any) -> bool:
    """Whether a handler that the one which asks has called counted this very write."""
    if not _note.handlers:
        return False
    frame = handler_of(sys._getframe(1), plan, args, kwargs)
    if frame is None or _key(frame) not in _note.handlers:
        return False
    if _note.write != _write(plan, args, kwargs):
        return False
    _note.handlers = _note.handlers[_note.handlers.index(_key(frame)) + 1 :]
    return True


def leave_note(plan: Plan, args: Any, kwargs: Any) -> None:
    """Tell the handlers above the one which asks that this write is counted."""
    handlers = []
    frame = handler_of(sys._getframe(1), plan, args, kwargs)
    while frame is not None:
        frame = handler_of(frame.f_back, plan, args, kwargs)
        if frame is not None:
            handlers.append(_key(frame))
    _note.write, _note.handlers = _write(plan, args, kwargs), tuple(handlers)


def _key(frame: FrameType) -> Any:
    """What no other frame has in common with one, while that runs."""
    return id(frame), frame.f_code


def _write(plan: Plan, args: Any, kwargs: Any) -> Any:
    written = [(id(t), version(t)) for t in plan.tensors_written(args, kwargs)]
    return plan.qualified, written
