"""Which handlers of dispatch modes are running, and what they hand back.

A mode at the bottom of the stack sees every op, but not what becomes of its results: whether a
handler above keeps one, and hands it out later without calling anything. So while `HandlerCalls`
watches, each mode that is entered gets a bracket around its handler. The bracket is an attribute of
that one instance (C++ asks the instance for ``__torch_dispatch__``), taken off when the mode is
left.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType, MethodType
from typing import Any

from . import _torch

_NAME = "__torch_dispatch__"


class HandlerCall:
    """One call of a mode's handler.

    Attributes:
        mode: the mode.
        func: the OpOverload that the handler was called for.
        args: its positional arguments.
        kwargs: its keyword arguments.
        outer: the handler call that this one happens in, if any.
        serial: a number of its own; later calls have larger ones.
        has_run: whether `func` itself reached the bottom of the stack during the call.
    """

    __slots__ = ("args", "func", "has_run", "kwargs", "mode", "outer", "serial")

    def __init__(
        self, mode: Any, func: Any, args: Any, kwargs: Any, outer: HandlerCall | None, serial: int
    ) -> None:
        self.mode = mode
        self.func = func
        self.args = args
        self.kwargs = kwargs
        self.outer = outer
        self.serial = serial
        self.has_run = False

    @property
    def keeper(self) -> str:
        """The name of the mode's class, as a report shows it."""
        return type(self.mode).__qualname__


class HandlerCalls(threading.local):
    """The handler calls that are running in this thread.

    Args:
        on_return: called with each handler call that returned, and what it returned.

    Attributes:
        innermost: the handler call that was entered last, or None.
    """

    innermost: HandlerCall | None = None

    def __init__(self, on_return: Callable[[HandlerCall, Any], None]) -> None:
        self.on_return = on_return

    def issuer(self, func: Any) -> HandlerCall | None:
        """The handler call that issued `func` itself; None where handlers only passed it on."""
        call = self.innermost
        while call is not None and call.func is func:
            call.has_run = True
            call = call.outer
        return call

    def run(self, mode: Any, handler: Any, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        """Call a handler, and note that it is running."""
        outer = self.innermost
        call = self.innermost = HandlerCall(mode, func, args, kwargs, outer, next(_serials))
        try:
            out = handler(mode, func, types, args, kwargs)
        finally:
            self.innermost = outer
        self.on_return(call, out)
        if outer is not None and outer.func is func:
            outer.has_run = True  # it is not the outer handler that kept `func` from running
        return out

    @contextmanager
    def watch(self) -> Iterator[None]:
        """Bracket the handlers of all modes that are entered inside."""
        enter, leave = _torch.TorchDispatchMode.__enter__, _torch.TorchDispatchMode.__exit__

        def enter_bracketed(mode: Any) -> Any:
            _bracket(mode, self)
            return enter(mode)

        def leave_bracketed(mode: Any, *exc: Any) -> Any:
            try:
                return leave(mode, *exc)
            finally:
                _unbracket(mode)

        setattr(_torch.TorchDispatchMode, "__enter__", enter_bracketed)
        setattr(_torch.TorchDispatchMode, "__exit__", leave_bracketed)
        try:
            yield
        finally:
            setattr(_torch.TorchDispatchMode, "__enter__", enter)
            setattr(_torch.TorchDispatchMode, "__exit__", leave)


_serials = itertools.count(1)


class _Bracket:
    """Stands in for the handler of one mode, for as long as the mode is entered."""

    def __init__(self, calls: HandlerCalls) -> None:
        self.calls = calls
        self.depth = 1

    def __call__(
        self, mode: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return self.calls.run(mode, type(mode).__torch_dispatch__, func, types, args, kwargs)


def _bracket(mode: Any, calls: HandlerCalls) -> None:
    own = vars(mode).get(_NAME)
    if own is None:
        if not _torch.is_infra_mode(mode):
            # A bound method, since C++ refuses a handler that does not belong to the mode. The
            # cycle that this makes ends when the mode is left.
            setattr(mode, _NAME, MethodType(_Bracket(calls), mode))
    elif isinstance(bracket := own.__func__, _Bracket):
        bracket.depth += 1


def _unbracket(mode: Any) -> None:
    bracket = getattr(vars(mode).get(_NAME), "__func__", None)
    if isinstance(bracket, _Bracket):
        bracket.depth -= 1
        if bracket.depth == 0:
            delattr(mode, _NAME)


def beyond(call: HandlerCall, innermost: HandlerCall | None, frame: FrameType) -> FrameType | None:
    """The frame that called the op which `call`'s handler was called for.

    Args:
        call: a running handler call.
        innermost: the one entered last.
        frame: a frame inside of it.
    """
    while call.outer is not None and call.outer.func is call.func:
        call = call.outer
    while True:
        walked: FrameType | None = frame
        while walked is not None and walked.f_code is not _Bracket.__call__.__code__:
            walked = walked.f_back
        if walked is None or innermost is None:
            return walked
        frame = walked.f_back  # type: ignore[assignment]
        if innermost is call:
            return frame
        innermost = innermost.outer
