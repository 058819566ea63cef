"""Handlers that a program calls itself, as a unit test of a mode does.

Such a frame looks like that of a handler that C++ called, and yet what it issues is above autograd.
The call in the frame that it was called from tells: ``mode.__torch_dispatch__(op, (), args)`` and
not ``x.add_(1)``. It is read from the source, once for each call, so where there is none (or where
Python 3.10 does not know the column) the frame is taken for a real handler's.
"""

from __future__ import annotations

import ast
import itertools
import linecache
import os
from collections.abc import Iterable
from types import CodeType, FrameType
from typing import Any

import torch

from .anchors import handler_names

_HERE = os.path.dirname(os.path.abspath(__file__))
_TORCH = os.path.dirname(os.path.abspath(torch.__file__))

#: Whose frames only pass a call on to a handler: `tracked`, and torch's dynamo-disable.
_PASSING = {
    os.path.join(_HERE, "handler.py"),
    os.path.join(_HERE, "handler_run.py"),
    os.path.join(_TORCH, "_compile.py"),
    os.path.join(_TORCH, "_dynamo", "eval_frame.py"),
}

# By code object and instruction. The code is kept, so that its id stays its own.
_calls: dict[tuple[int, int], tuple[CodeType, bool]] = {}
_MOST_CALLS = 1000


def caller_of(frame: FrameType) -> FrameType | None:
    """The frame that called the handler in `frame`, or the op that it was called for."""
    caller = frame.f_back
    while caller is not None and caller.f_code.co_filename in _PASSING:
        caller = caller.f_back
    return caller


def is_by_hand(caller: FrameType) -> bool:
    """Whether a frame is calling a handler by its name; it is not if C++ called the handler."""
    code, lasti = caller.f_code, caller.f_lasti
    known = _calls.get((id(code), lasti))
    if known is None:
        if len(_calls) >= _MOST_CALLS:
            _calls.clear()
        known = _calls[id(code), lasti] = code, _names_a_handler(code, lasti)
    return known[1]


def _names_a_handler(code: CodeType, lasti: int) -> bool:
    """Whether the instruction calls something by a handler's name, with arguments spelled out."""
    try:
        tree = ast.parse(f"({_source_of(code, lasti)})", mode="eval").body
    except (SyntaxError, ValueError):
        return False
    if not isinstance(tree, ast.Call) or any(isinstance(arg, ast.Starred) for arg in tree.args):
        return False
    called = tree.func
    name = called.attr if isinstance(called, ast.Attribute) else getattr(called, "id", None)
    return name in handler_names


def _source_of(code: CodeType, lasti: int) -> str:
    positions: Iterable[Any] = getattr(code, "co_positions", tuple)()
    first, last, start, end = next(itertools.islice(positions, lasti // 2, None), (None,) * 4)
    if first is None or last is None or start is None or end is None:
        return ""
    lines = [linecache.getline(code.co_filename, n).encode() for n in range(first, last + 1)]
    lines[-1] = lines[-1][:end]
    lines[0] = lines[0][start:]
    return b"".join(lines).decode()
