"""What the frame of a handler tells: whose it is, and what it was called with."""

from __future__ import annotations

from types import CodeType, FrameType
from typing import Any

from . import _torch
from .mode_frames import CODE as MODE_FRAME


def is_of_a_class(frame: FrameType, code: CodeType) -> bool:
    """Whether the handler is a class's: a mode's cannot go above autograd again."""
    return code.co_argcount > 0 and isinstance(frame.f_locals.get(code.co_varnames[0]), type)


def is_for_higher_order(frame: FrameType, code: CodeType) -> bool:
    """Whether a handler was called for a higher-order op: by Python, which excludes no key."""
    values = frame.f_locals
    if code is MODE_FRAME:
        first = values["given"][:1]
    else:
        first = [values.get(name) for name in code.co_varnames[: min(code.co_argcount, 2)]]
    return any(isinstance(value, _torch.HigherOrderOperator) for value in first)


def given_to(frame: FrameType, code: CodeType) -> tuple[Any, Any, Any, Any] | None:
    """The op, args and kwargs that a handler's frame was called with, and all its variables.

    A handler is ``(self or cls, func, types, args, kwargs)``, or the same without the first.
    """
    names = code.co_varnames[: code.co_argcount]
    values = frame.f_locals
    for start in (1, 0):
        if len(names) > start and isinstance(values.get(names[start]), _torch.OpOverload):
            rest = [values.get(name) for name in names[start + 2 : start + 4]]
            args = rest[0] if rest and isinstance(rest[0], tuple) else ()
            kwargs = rest[1] if len(rest) > 1 and isinstance(rest[1], dict) else {}
            return values[names[start]], args, kwargs, values
    if code is MODE_FRAME:
        func, _, args, kwargs = (*values["given"], {})[:4]
        return (func, args, kwargs, values) if isinstance(func, _torch.OpOverload) else None
    return None
