"""Where in the user's program an op was issued, and whether a handler issued it.

Both questions are answered by one walk up the Python frames, as far as an anchor (`anchors.py`). It
costs up to a microsecond, so it is made for writes only, and for whatever else a record asks to be
placed.

Whether an op comes from above autograd cannot be told from a mode at the bottom of the stack: the
excluded dispatch keys, the TLS snapshot and the stack are the same for an op that user code issued
and for one that another mode's handler issued. The frames of the handlers above tell.
"""

from __future__ import annotations

import linecache
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from types import CodeType, FrameType
from typing import Any, Protocol

import torch

from . import _torch, one_count
from .anchors import anchors, handler_names
from .by_hand import caller_of, is_by_hand
from .counted_above import is_counted
from .counted_above import state as above_here
from .handler_frames import given_to, is_for_higher_order, is_of_a_class
from .mode_frames import CODE as MODE_FRAME
from .mode_frames import has_one_above, wrapped
from .one_count import ASK, settle
from .plan import Plan, plan_of
from .stand_in import CODE as SUBCLASS_FRAME

_OWN = os.path.dirname(os.path.abspath(__file__)) + os.sep
_TORCH = os.path.dirname(os.path.abspath(torch.__file__)) + os.sep
# Whose frames are wrappers around somebody else's function: torch's own decorators are made of them
# (`typing_extensions.deprecated` around collectives).
_WRAPPERS = ("contextlib.py", "functools.py", "typing_extensions.py", "warnings.py")
_LIBRARY = os.path.dirname(os.path.abspath(os.__file__))
_user_file: dict[str, bool] = {}

_TRACKED = "tracked_handler"
_OF_TRACKED = (_OWN + "handler.py", _OWN + "handler_run.py")


@dataclass(frozen=True, slots=True)
class Site:
    """A line of the user's program.

    Attributes:
        filename: the file, as Python knows it.
        lineno: the line.
        function: the function that the line is in.
        in_handler: whether the line is in a ``__torch_dispatch__`` handler, or was called by one.
        stack: the whole Python stack, innermost first, where it was asked for.
    """

    filename: str
    lineno: int
    function: str
    in_handler: bool = False
    stack: tuple[tuple[str, int, str], ...] = ()

    def __str__(self) -> str:
        return f"{self.filename}:{self.lineno} in {self.function}"


UNKNOWN = Site("<unknown>", 0, "<unknown>")


class _HasSite(Protocol):
    @property
    def site(self) -> Site: ...


class AtSite:
    """A record with a `site`, whose parts can be asked for one by one."""

    __slots__ = ()

    @property
    def filename(self: _HasSite) -> str:
        """The file of the line."""
        return self.site.filename

    @property
    def lineno(self: _HasSite) -> int:
        """The line."""
        return self.site.lineno

    @property
    def function(self: _HasSite) -> str:
        """The function that the line is in."""
        return self.site.function


def is_user_file(filename: str) -> bool:
    """Whether a file belongs neither to torch nor to viewtrack, nor holds mere wrappers.

    What a compiler has written is torch's: of a compiled function its own line is known.
    """
    known = _user_file.get(filename)
    if known is None:
        path = filename if filename.startswith("<") else os.path.abspath(filename)
        folder, name = os.path.split(path)
        known = _user_file[filename] = not (
            path.startswith((_OWN, _TORCH, "<frozen", "<eval_with_key>"))
            or f"{os.sep}torchinductor_" in path
            or (name in _WRAPPERS and folder in (_LIBRARY, os.path.dirname(_TORCH[:-1])))
        )
    return known


def locate(
    frame: FrameType | None,
    plan: Plan,
    args: Any,
    kwargs: Any,
    what: int = ASK,
    written: Sequence[Any] = (),
) -> tuple[int, bool, FrameType | None]:
    """Walk up from `frame`, the caller of a handler of ours.

    Args:
        frame: where to start.
        plan: the plan of the op that reached the handler.
        args: its positional arguments.
        kwargs: its keyword arguments.
        what: what is to be done about the one write that a kernel counts (`one_count.py`).
        written: what is written, if not all that the op writes.

    Returns:
        Whether an ADInplaceOrView kernel above counts the write, and as what; whether a handler
        further up issued the op, rather than passed it on from above autograd; and the frame of the
        user's line that did: in the handler then, else beyond the handlers that passed it on.
    """
    if above_here.ids and is_counted(plan, args, kwargs):  # for a wrapper around what is written
        return one_count.ABOVE, *issued_in_handler(frame, plan)
    user: FrameType | None = None
    counted: int = plan.has_native_kernel and not plan.is_composite
    settled, outermost = False, None
    while frame is not None and frame not in anchors:
        code = frame.f_code
        if code.co_name in handler_names and _is_handler(frame, code):
            settled = settled or _is_tracked(frame)
            given = given_to(frame, code)
            written = written or plan.tensors_written(args, kwargs)
            above = _passes_on(given, written)
            if above is None:
                user = user or _beyond(frame, code)
                if given is None and is_for_higher_order(frame, code):
                    frame = frame.f_back
                    continue
                again_above = is_of_a_class(frame, code) and _torch.in_reentrant_dispatch()
                if settled or again_above:
                    return counted, not again_above, user
                return what and _as_an_alias(frame.f_back, given, written, what), True, user
            if not settled:
                # Only the outermost handler has a kernel above it: the others were called below.
                counted, outermost = above.has_native_kernel, given
            user = None
        elif user is None and is_user_file(code.co_filename):
            user = frame
        frame = frame.f_back
    if outermost is not None and what and counted:
        counted = settle(outermost[3], written, what)
    return counted, False, user or user_frame(frame)


def _as_an_alias(frame: FrameType | None, given: Any, written: Sequence[Any], what: int) -> int:
    """How a handler's write to something else than it was given is counted.

    It is as a write to what it was given, if it is an alias of that.

    Args:
        frame: the caller of the handler.
        given: what the handler was called with.
        written: what it writes.
        what: what is to be done, as for `locate`.
    """
    if given is None or not plan_of(given[0]).writes:
        return one_count.HERE
    func, args, kwargs, variables = given
    above = plan_of(func)
    wanted, others = one_count.originals(written, above, args, kwargs)
    if not wanted:
        return one_count.HERE
    counted = locate(frame, above, args, kwargs, what, wanted)[0]
    if counted == one_count.ABOVE:  # by a kernel directly above this handler
        counted = settle(variables, wanted, what)
    if counted and what == one_count.TAKE:
        one_count.count(others)
    return one_count.AS_THE_ONE_BY_ALIAS if counted else one_count.HERE


_own_handlers = {
    _OWN + name
    for name in (
        "tracking.py",
        "observing.py",
        "op_handlers.py",
        os.path.join("_torch", "__init__.py"),
        os.path.join("_torch", "view_fn.py"),
        os.path.join("checkpoint", "contexts.py"),
        os.path.join("checkpoint", "foreign.py"),
    )
}


def _is_handler(frame: FrameType, code: CodeType) -> bool:
    """Whether a frame of a handler's name is one that C++ called, and not one of ours."""
    if code.co_filename in _own_handlers:
        return False
    caller = caller_of(frame)
    if caller is None:
        return True
    calling = caller.f_code
    if calling is MODE_FRAME or calling is SUBCLASS_FRAME or (wrapped and has_one_above(frame)):
        return False  # there all is as the handler was given it
    return not (is_by_hand(caller) and is_user_file(calling.co_filename))


def _is_tracked(frame: FrameType) -> bool:
    """Whether the handler in `frame` is `tracked`: what it issues has kernels of its own above."""
    caller = frame if frame.f_code.co_name == _TRACKED else frame.f_back
    return (
        caller is not None
        and caller.f_code.co_name == _TRACKED
        and caller.f_code.co_filename in _OF_TRACKED
    )


def _passes_on(given: Any, written: Sequence[Any]) -> Plan | None:
    """The plan of the op that a handler was given, if that writes the same tensors.

    The handler may write by another op (``add_`` by ``copy_``): one write of the user is one count.
    """
    if given is None:
        return None
    above = plan_of(given[0])
    declared = above.tensors_written(given[1], given[2])
    for t in written:
        for known in declared:
            if t is known:
                break
        else:
            return None
    return above if written else None


def handler_of(frame: FrameType | None, plan: Plan, args: Any, kwargs: Any) -> FrameType | None:
    """The innermost handler's frame, from `frame` outwards, if what an op writes was given to it.

    Args:
        frame: where to start.
        plan: the plan of the op.
        args: its positional arguments.
        kwargs: its keyword arguments.
    """
    while frame is not None:
        code = frame.f_code
        if code.co_name in handler_names and _is_handler(frame, code):
            written = plan.tensors_written(args, kwargs)
            return None if _passes_on(given_to(frame, code), written) is None else frame
        frame = frame.f_back
    return None


# A place is what a `Site` is made of, kept as it is until somebody asks: reading f_lineno walks the
# line table, which costs more than all the rest.
Place = tuple[CodeType | None, int, bool, tuple[tuple[str, int, str], ...]]


def place_of(frame: FrameType | None, in_handler: bool = False, stack: bool = False) -> Place:
    """Note where a frame is now."""
    if frame is None:
        return (None, -1, in_handler, ())
    return (frame.f_code, frame.f_lasti, in_handler, _stack(frame) if stack else ())


def site_at(place: Place) -> Site:
    """Make a `Site` of a place."""
    code, lasti, in_handler, stack = place
    if code is None:
        return UNKNOWN
    return Site(code.co_filename, _line(code, lasti), code.co_name, in_handler, stack)


def _line(code: CodeType, lasti: int) -> int:
    for start, end, line in code.co_lines():
        if start <= lasti < end and line is not None:
            return line
    return code.co_firstlineno


def with_source(site: Site) -> str:
    """A site, and the source line where it can be read."""
    source = linecache.getline(site.filename, site.lineno).strip()
    return f"{site}:  {source}" if source else str(site)


def caller(depth: int = 1) -> Site:
    """The user's line that called the viewtrack function which asks.

    Args:
        depth: how many frames above the asking function to start.
    """
    return site_at(place_of(user_frame(sys._getframe(depth))))


def user_frame(frame: FrameType | None) -> FrameType | None:
    """The first frame of user code, from `frame` outwards."""
    while frame is not None:
        filename = frame.f_code.co_filename
        known = _user_file.get(filename)  # without a call for each of many frames
        if known or (known is None and is_user_file(filename)):
            break
        frame = frame.f_back
    return frame


def issued_in_handler(
    frame: FrameType | None, plan: Plan, args: Any = ()
) -> tuple[bool, FrameType | None]:
    """Whether a handler issued an op, or was called for it and passed it on, as it was, from above.

    Args:
        frame: where to start.
        plan: the plan of the op.
        args: its positional arguments; without any, the handler's op alone decides.

    Returns:
        Whether a handler did, and the frame of the user's line that the op is from: in the handler
        if that is user code, else beyond it.
    """
    user: FrameType | None = None
    while frame is not None:
        if frame in anchors:
            return False, user or user_frame(frame)
        code = frame.f_code
        if code.co_name in handler_names and _is_handler(frame, code):
            given = given_to(frame, code)
            if given is None or plan_of(given[0]) is not plan or not _same_first(args, given[1]):
                return True, user or _beyond(frame, code)
            user = None
        elif user is None and is_user_file(code.co_filename):
            user = frame
        frame = frame.f_back
    return False, user


def _beyond(frame: FrameType, code: CodeType) -> FrameType | None:
    """The user's line that a handler's own work is put down to.

    It is in the handler, if that is user code. If it is torch's or ours, it is the line that the op
    is from which the handler was called for, and not a handler on the way that passed it on.
    """
    given = None if is_user_file(code.co_filename) else given_to(frame, code)
    if given is None:
        return user_frame(frame)
    return issued_in_handler(frame.f_back, plan_of(given[0]), given[1])[1]


def _same_first(args: Any, given: Any) -> bool:
    return not args or (bool(given) and args[0] is given[0])


def _stack(frame: FrameType | None) -> tuple[tuple[str, int, str], ...]:
    lines = []
    while frame is not None:
        lines.append((frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name))
        frame = frame.f_back
    return tuple(lines)
