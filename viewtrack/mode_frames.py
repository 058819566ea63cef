"""A frame for handlers of modes that cannot be known by their own.

`site.py` knows the frame of a handler by its name, and reads from it what the handler was called
with. That fails where the function has another name (assigned to the attribute, a lambda, a
decorator's wrapper), and where it exchanges the op or the arguments that it was given. While a
tracker is active, a mode with such a handler gets a function in front of it when it is entered: an
attribute of that instance (C++ asks the instance for ``__torch_dispatch__``), whose frame has the
right name and keeps what it was given. It goes when the mode is left. Subclasses need none:
`stand_in.py` leaves a frame for each.

For that the code of ``TorchDispatchMode.__enter__`` and ``__exit__`` is exchanged. Whoever
exchanges the methods themselves (`handler_calls.py`, `full_modes.py`) does so on top of that.
"""

from __future__ import annotations

import dis
import functools
import threading
import weakref
from types import CodeType, FrameType, MethodType
from typing import Any

import torch

from . import _torch
from ._torch.dynamo import skip_dynamo
from .anchors import handler_names
from .code_exchange import CodeExchange, copy_of
from .rules import behind, stands_in_front

_HANDLER = "__torch_dispatch__"


class _Here(threading.local):
    """How many trackers of a thread want frames."""

    wanted = 0


_here = _Here()


def start() -> None:
    """Give frames to the modes that are entered in this thread from now on."""
    _here.wanted += 1
    _exchange.acquire()


def stop() -> None:
    """End that."""
    _here.wanted -= 1
    _exchange.release()


def enter(mode: Any) -> Any:
    """Enter a mode as torch does, and give it a frame if it needs one."""
    entered = _stock_enter(mode)
    if _here.wanted and not _is_known(mode):
        frame, handler = _handler_of(mode)
        if frame is not None:
            if not frame.depth:  # it was left where it was, beneath somebody else's
                _exchange.acquire()
            frame.depth += 1
        elif not (_can_be_read(mode, handler) or torch.compiler.is_compiling()):
            # A bound method, since C++ refuses a handler that does not belong to the mode.
            vars(mode)[_HANDLER] = MethodType(_frame_before(vars(mode).get(_HANDLER)), mode)
            _exchange.acquire()
    return entered


def leave(mode: Any, *error: Any) -> Any:
    """Leave a mode as torch does, and take the frame that it was given."""
    frame = _handler_of(mode)[0] if _HANDLER in vars(mode) else None
    if frame is not None:
        frame.depth -= 1
        if not frame.depth:
            _take(mode, frame)
    return _stock_leave(mode, *error)


def _take(mode: Any, frame: Any) -> None:
    if _function_of(vars(mode).get(_HANDLER)) is frame:  # nobody's lies on it
        del vars(mode)[_HANDLER]
        if frame.displaced is not None:
            vars(mode)[_HANDLER] = frame.displaced
    _exchange.release()


def _frame_before(displaced: Any) -> Any:
    def __torch_dispatch__(mode: Any, *given: Any, **named: Any) -> Any:
        method = behind(mode, displaced)
        if method is not None:
            return method(*given, **named)
        return type(mode).__torch_dispatch__(mode, *given, **named)

    frame: Any = __torch_dispatch__
    frame.displaced, frame.depth = displaced, 1
    return frame


CODE = skip_dynamo(_frame_before(None)).__code__
"""The code of the frames that modes are given."""


def _handler_of(mode: Any) -> tuple[Any, Any]:
    """The function that was put in front of a mode's handler, if any, and the handler."""
    method: Any = vars(mode).get(_HANDLER)
    while method is not None:
        if not stands_in_front(method):  # neither ours nor of those who do the like
            return None, method
        function = _function_of(method)
        if getattr(function, "__code__", None) is CODE:
            return function, None
        method = function.displaced
    handler = next(vars(cls)[_HANDLER] for cls in type(mode).__mro__ if _HANDLER in vars(cls))
    return None, handler.__get__(mode, type(mode)) if hasattr(handler, "__get__") else handler


def _function_of(method: Any) -> Any:
    return getattr(method, "__func__", None)


def _is_known(mode: Any) -> bool:
    """Whether the handler of a mode was found before to need no frame. It spares most the rest."""
    if _HANDLER in vars(mode):
        return False
    return isinstance(mode, _torch.QuietMode) or type(mode).__torch_dispatch__ in _readable


_readable: weakref.WeakSet[Any] = weakref.WeakSet()


def _can_be_read(mode: Any, handler: Any) -> bool:
    """Whether `site.py` can read from the frame of a mode's handler what it was called with."""
    if mode.is_infra_mode() or getattr(handler, "__self__", None) is not mode:
        return True  # torch's own machinery; a handler that C++ is about to refuse
    function = outermost = _function_of(handler)
    while _torch.is_dynamo_disable(function):
        function = function.__wrapped__
    if _is_plain(function):
        _readable.add(outermost)
        return True
    _note_wrapped(function)
    return False


wrapped: dict[int, weakref.ref[CodeType]] = {}
"""Functions that only a frame of ours above can stand for, by the ids of their code."""


def _note_wrapped(function: Any) -> None:
    """Note the functions of a handler's name that decorators call, and that cannot be read."""
    while (function := getattr(function, "__wrapped__", None)) is not None:
        code = getattr(function, "__code__", None)
        if code is not None and code.co_name in handler_names and not _is_plain(function):
            wrapped[id(code)] = weakref.ref(code, functools.partial(_forget, id(code)))


def _forget(key: int, _: Any) -> None:
    wrapped.pop(key, None)


def has_one_above(frame: FrameType) -> bool:
    """Whether the function in `frame` is one that decorators of a mode's handler call."""
    if id(frame.f_code) not in wrapped:
        return False
    above = frame.f_back
    while above is not None and above.f_code.co_name not in handler_names:
        above = above.f_back
    return above is not None and above.f_code is CODE


_known_plain: weakref.WeakKeyDictionary[CodeType, bool] = weakref.WeakKeyDictionary()


def _is_plain(function: Any) -> bool:
    """Whether a function has a handler's name, and keeps the op and the arguments it is given."""
    code = getattr(function, "__code__", None)
    if not isinstance(code, CodeType):
        return False
    known = _known_plain.get(code)
    if known is None:
        _, func, _, args, *_ = *code.co_varnames[: code.co_argcount], None, None, None, None
        known = code.co_name in handler_names and args is not None
        known = _known_plain[code] = known and not _rebinds(code, {func, args})
    return known


def _rebinds(code: CodeType, names: set[Any]) -> bool:
    """Whether code gives one of its variables another value, or deletes it."""
    for instruction in dis.get_instructions(code):
        kind, _, place = instruction.opname.partition("_")
        if kind in ("STORE", "DELETE") and place.startswith(("FAST", "DEREF")):
            value = instruction.argval  # two names, where Python 3.13 does two things at once
            if not names.isdisjoint(value if isinstance(value, tuple) else (value,)):
                return True
    return False


# ------------------------------------------------------------------------------ the exchange


_enter, _leave = _torch.TorchDispatchMode.__enter__, _torch.TorchDispatchMode.__exit__
_stock_enter, _stock_leave = copy_of(_enter), copy_of(_leave)


# These two run with the globals of torch's module. An import of ours takes longer than the rest.


@skip_dynamo
def _entering(self: Any) -> Any:
    import sys

    return sys.modules["viewtrack.mode_frames"].enter(self)


@skip_dynamo
def _leaving(self: Any, exc_type: Any, exc_val: Any, exc_tb: Any) -> Any:
    import sys

    return sys.modules["viewtrack.mode_frames"].leave(self, exc_type, exc_val, exc_tb)


_exchange = CodeExchange((_enter, _entering), (_leave, _leaving))
