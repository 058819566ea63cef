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

import torch

from . import _torch
from ._torch.dynamo import skip_dynamo
from .rules import behind
from .rules import exchange as exchange_of_rules
from .site import Place

_HANDLER = "__torch_dispatch__"
_serials = itertools.count(1)


class HandlerCall:
    """One call of a mode's handler.

    Attributes:
        mode: the mode.
        func: the op that the handler was called for.
        args: its positional arguments.
        kwargs: its keyword arguments.
        outer: the handler call that this one happens in, if any.
        serial: a number of its own; later calls have larger ones.
        has_run: whether `func` itself reached the bottom of the stack during the call.
        place: the line that called `func`, once somebody has looked.
        reads: what somebody noted of tensors that the handler read.
    """

    __slots__ = ("args", "func", "has_run", "kwargs", "mode", "outer", "place", "reads", "serial")

    def __init__(
        self, mode: Any, func: Any, args: Any, kwargs: Any, outer: HandlerCall | None
    ) -> None:
        self.mode = mode
        self.func = func
        self.args = args
        self.kwargs = kwargs
        self.outer = outer
        self.serial = next(_serials)
        self.has_run = False
        self.place: Place | None = None
        self.reads: list[Any] = []


class HandlerCalls(threading.local):
    """The handler calls that are running in this thread.

    Args:
        returned: called with each handler call that returned, and what it returned.
        raised: called with each handler call that raised, and what it raised.

    Attributes:
        innermost: the handler call that was entered last, or None.
    """

    innermost: HandlerCall | None = None

    def __init__(
        self,
        returned: Callable[[HandlerCall, Any], None],
        raised: Callable[[HandlerCall, Exception], None],
    ) -> None:
        self._returned = returned
        self._raised = raised

    def issuer(self, func: Any) -> HandlerCall | None:
        """The handler call that issued `func` itself; None where handlers only passed it on."""
        call = self.innermost
        while call is not None and call.func is func:
            call.has_run = True
            call = call.outer
        return call

    def run(self, mode: Any, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        """Call the handler of `mode`, and note that it is running."""
        outer = self.innermost
        call = self.innermost = HandlerCall(mode, func, args, kwargs, outer)
        try:
            method = behind(mode, None) or MethodType(type(mode).__torch_dispatch__, mode)
            out = method(func, types, args, kwargs)
        except Exception as error:
            self._raised(call, error)
            raise
        finally:
            self.innermost = outer
        self._returned(call, out)
        if outer is not None and outer.func is func:
            outer.has_run = True  # if it was not run, that is not the outer handler's doing
        return out

    @contextmanager
    def watch(self) -> Iterator[None]:
        """Bracket the handlers of all modes that are entered inside."""
        mode_class: Any = _torch.TorchDispatchMode
        enter, leave = mode_class.__enter__, mode_class.__exit__

        def enter_bracketed(mode: Any) -> Any:
            if not torch.compiler.is_compiling():  # traced code is left alone
                _put_bracket(mode, self)
            return enter(mode)

        def leave_bracketed(mode: Any, *exc: Any) -> Any:
            try:
                return leave(mode, *exc)
            finally:
                _take_bracket(mode)

        _set(mode_class, enter_bracketed, leave_bracketed)
        exchange_of_rules.acquire()
        try:
            yield
        finally:
            exchange_of_rules.release()
            _set(mode_class, enter, leave)


def _set(mode_class: Any, enter: Any, leave: Any) -> None:
    mode_class.__enter__ = enter
    mode_class.__exit__ = leave


class _Bracket:
    """Stands in for the handler of one mode, for as long as the mode is entered."""

    displaced = None  # it calls the handler of the class

    def __init__(self, calls: HandlerCalls) -> None:
        self.calls = calls
        self.depth = 0

    @skip_dynamo
    def __call__(self, mode: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self.calls.run(mode, func, types, args, kwargs)


def _put_bracket(mode: Any, calls: HandlerCalls) -> None:
    if _HANDLER not in vars(mode):
        # Not ours, nor torch's own machinery: fake tensors, functionalization, tracing.
        if isinstance(mode, _torch.QuietMode) or mode.is_infra_mode():
            return
        # A bound method, since C++ refuses a handler that does not belong to the mode. The cycle
        # that this makes ends when the mode is left.
        setattr(mode, _HANDLER, MethodType(_Bracket(calls), mode))
    bracket = _bracket_of(mode)
    if bracket is not None:
        bracket.depth += 1


def _take_bracket(mode: Any) -> None:
    bracket = _bracket_of(mode)
    if bracket is not None:
        bracket.depth -= 1
        if not bracket.depth:
            delattr(mode, _HANDLER)


def _bracket_of(mode: Any) -> _Bracket | None:
    bracket = getattr(vars(mode).get(_HANDLER), "__func__", None)
    return bracket if isinstance(bracket, _Bracket) else None


def caller_of(
    call: HandlerCall, innermost: HandlerCall, frame: FrameType | None
) -> FrameType | None:
    """The frame that called the op which `call`'s handler was called for.

    Where handlers passed the op on from one to the next, it is the caller of the first.

    Args:
        call: a running handler call.
        innermost: the one that was entered last.
        frame: a frame inside of it.
    """
    while call.outer is not None and call.outer.func is call.func:
        call = call.outer
    passed: HandlerCall | None = innermost
    while frame is not None and passed is not None:
        if frame.f_code is _Bracket.__call__.__code__:
            if passed is call:
                return frame.f_back
            passed = passed.outer
        frame = frame.f_back
    return None
