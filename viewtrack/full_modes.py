"""Where `full.FullViews` hears of handlers: our own mode, and a bracket around each mode above it.

The bracket is an attribute of the mode that is entered (C++ asks the instance for
``__torch_dispatch__``), and goes when the mode is left. A bracket that somebody else put there
(`handler_calls.py`) stays inside of ours.
"""

from __future__ import annotations

import inspect
import threading
from types import MethodType
from typing import Any

import torch

from . import _torch
from ._torch.dynamo import skip_dynamo
from .full import FullViews
from .full_marks import Call
from .plan import plan_of
from .rules import behind
from .tracking import TrackingMode

_HANDLER = "__torch_dispatch__"


class _Here(threading.local):
    """What a thread keeps track of, while a tracker asks for it."""

    views: FullViews | None = None


_here = _Here()


def start(mode: TrackingMode) -> None:
    """Begin to note what handlers above `mode`, at the bottom of this thread's stack, keep."""
    _here.views = FullViews()
    setattr(mode, _HANDLER, MethodType(_Bottom(_here.views), mode))
    _lend_class(mode, TrackingMode, _Bracketed)
    _patch.acquire()


def stop(mode: TrackingMode) -> None:
    """Mark what was noted, and end."""
    views, _here.views = _here.views, None
    if views is not None:
        vars(mode).pop(_HANDLER, None)
        _lend_class(mode, _Bracketed, TrackingMode)
        _patch.release()
        views.settle()


class _Bracketed(TrackingMode):
    """Has no handlers of single ops (`op_handlers.py`): C++ would call them past the bracket."""


def _lend_class(mode: Any, cls: type, other: type) -> None:
    if type(mode) is cls:  # not one with a handler of its own
        mode.__class__ = other


class _Bottom:
    """Stands in for the handler of our own mode."""

    def __init__(self, views: FullViews) -> None:
        self.views = views

    @skip_dynamo
    def __call__(self, mode: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        run, views = type(mode).__torch_dispatch__, self.views
        views.next_op(func)
        if not isinstance(func, _torch.OpOverload) or any(map(_torch.is_infra_class, types)):
            return run(mode, func, types, args, kwargs)
        has_handler = any(map(_has_handler, types))
        if has_handler:
            with views.handler(func):
                out = run(mode, func, types, args, kwargs)
                if out is not NotImplemented:
                    out = views.handed_back(func, args, kwargs, out)
        else:
            out = run(mode, func, types, args, kwargs)
        if out is not NotImplemented:
            call = Call(func, args, kwargs or {})
            views.note(plan_of(func), call, out, made_inside=has_handler)
        return out


def _has_handler(cls: Any) -> bool:
    return cls.__torch_dispatch__ is not torch.Tensor.__torch_dispatch__


class _Bracket:
    """Stands in for the handler of a mode for as long as the mode is entered."""

    def __init__(self, mode: Any) -> None:
        self.displaced = vars(mode).get(_HANDLER)
        self.handler = getattr(mode, _HANDLER)
        self.depth = 1

    def __call__(self, mode: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        views = _here.views
        handler = behind(mode, self.displaced) or self.handler
        if views is None:
            return handler(func, types, args, kwargs)
        with views.handler(func):
            out = handler(func, types, args, kwargs)
            return views.handed_back(func, args, kwargs, out)


def _put_bracket(mode: Any) -> None:
    bracket = _bracket_of(mode)
    if bracket is not None:
        bracket.depth += 1
    elif _here.views is not None and not _is_left_alone(mode):
        # A bound method, since C++ refuses a handler that does not belong to the mode.
        setattr(mode, _HANDLER, MethodType(_Bracket(mode), mode))


def _is_left_alone(mode: Any) -> bool:
    """Our own modes, torch's machinery, and a handler that C++ is about to refuse."""
    if isinstance(mode, _torch.QuietMode) or mode.is_infra_mode():
        return True
    return isinstance(inspect.getattr_static(type(mode), _HANDLER), classmethod)


def _take_bracket(mode: Any) -> None:
    bracket = _bracket_of(mode)
    if bracket is not None:
        bracket.depth -= 1
        if not bracket.depth:
            delattr(mode, _HANDLER)
            if bracket.displaced is not None:
                setattr(mode, _HANDLER, bracket.displaced)


def _bracket_of(mode: Any) -> _Bracket | None:
    bracket = getattr(vars(mode).get(_HANDLER), "__func__", None)
    return bracket if isinstance(bracket, _Bracket) else None


class _Patch:
    """Puts and takes the brackets as modes are entered and left, while any thread wants them."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._wanted = 0
        self._displaced: tuple[Any, Any] | None = None

    def acquire(self) -> None:
        """Patch `TorchDispatchMode`, unless it is patched already."""
        with self._lock:
            self._wanted += 1
            if self._displaced is None:
                mode_class: Any = _torch.TorchDispatchMode
                self._displaced = mode_class.__enter__, mode_class.__exit__
                mode_class.__enter__, mode_class.__exit__ = _entering(*self._displaced)

    def release(self) -> None:
        """Undo that with the last one; not where somebody else's patch lies on ours."""
        with self._lock:
            self._wanted -= 1
            mode_class: Any = _torch.TorchDispatchMode
            ours_on_top = getattr(mode_class.__enter__, "is_ours", False)
            if not self._wanted and ours_on_top and self._displaced is not None:
                mode_class.__enter__, mode_class.__exit__ = self._displaced
                self._displaced = None


def _entering(enter: Any, leave: Any) -> tuple[Any, Any]:
    def enter_bracketed(mode: Any) -> Any:
        entered = enter(mode)
        _put_bracket(mode)
        return entered

    def leave_bracketed(mode: Any, *exc: Any) -> Any:
        _take_bracket(mode)
        return leave(mode, *exc)

    enter_bracketed.is_ours = True  # type: ignore[attr-defined]
    return enter_bracketed, leave_bracketed


_patch = _Patch()
