"""Frames that no handler runs in or above, so that a walk up the stack may stop there.

Whether a handler issued an op is told by the frames between the op and the first frame of the
program (`site.py`), and those may be many: a test runner or a trainer has dozens. What lies above a
frame cannot change while the frame runs. So whoever enters a mode by a ``with`` statement looks
once at what lies above it, and no op inside has to look again.

A generator or coroutine is no anchor: whoever resumes it is above it then. Nor is a frame that
calls ``__enter__`` itself: it may be gone before the mode is left, and would be kept alive here.
"""

from __future__ import annotations

import dis
from types import FrameType

# Names of functions that C++ calls as handlers; torchao installs one under the second name.
handler_names = {"__torch_dispatch__", "_dispatch__torch_dispatch__", "tracked_handler"}

anchors: dict[FrameType, int] = {}
"""The frames, and how many ``with`` statements of each are entered."""

_ENTERING = dis.opmap.get("BEFORE_WITH", dis.opmap.get("SETUP_WITH"))  # Python 3.14 has neither
_RESUMABLE = 0x20 | 0x80 | 0x200  # CO_GENERATOR, CO_COROUTINE, CO_ASYNC_GENERATOR


def drop_anchor(frame: FrameType) -> None:
    """Note a frame whose ``with`` statement is entering a mode, unless a handler is above it."""
    if _is_entering(frame) and not _is_below_handler(frame):
        anchors[frame] = anchors.get(frame, 0) + 1


def weigh_anchor(frame: FrameType) -> None:
    """Forget a frame whose ``with`` statement is leaving the mode."""
    count = anchors.get(frame)
    if count == 1:
        del anchors[frame]
    elif count is not None:
        anchors[frame] = count - 1


def _is_entering(frame: FrameType) -> bool:
    code = frame.f_code
    return not code.co_flags & _RESUMABLE and code.co_code[frame.f_lasti] == _ENTERING


def _is_below_handler(frame: FrameType | None) -> bool:
    while frame is not None and frame not in anchors:
        if frame.f_code.co_name in handler_names:
            return True
        frame = frame.f_back
    return False
