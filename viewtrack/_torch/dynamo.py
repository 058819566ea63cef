"""Keeps dynamo away from our handlers. Private torch, as all of the package.

While compiled code runs, dynamo looks at every Python frame that starts, handlers of dispatch modes
included. Ours would be traced, and where they cannot be, break graphs and warn.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import torch

F = TypeVar("F", bound=Callable[..., Any])

_C: Any = torch._C
_eval_frame: Any = _C._dynamo.eval_frame


def skip_dynamo(function: F) -> F:
    """Let dynamo pass over a function and what it calls, as ``torch.compiler.disable`` does.

    Without its price: importing torch._dynamo, and 0.8 microseconds at every call. On 2.6 the
    functions that it calls are still looked at.
    """
    code = function.__code__
    if hasattr(_eval_frame, "set_code_exec_strategy"):  # from 2.7 on
        skip = _eval_frame._FrameAction.SKIP
        _eval_frame.set_code_exec_strategy(code, _eval_frame._FrameExecStrategy(skip, skip))
    else:
        _eval_frame.skip_code(code)
    return function


def break_graph(function: F) -> F:
    """Let dynamo break the graph at each call of a function, and run it as it is.

    Traced instead, what it does to dispatch keys and modes would happen while fake tensors stand in
    for the real ones. Relies on the attribute that ``torch.compiler.disable`` sets.
    """
    if not hasattr(_eval_frame, "set_code_exec_strategy"):
        function = _switching_dynamo_off(function)
    function._torchdynamo_disable = True  # type: ignore[attr-defined]
    return skip_dynamo(function)


def _switching_dynamo_off(function: F) -> F:
    """Before 2.7 a skipped frame's callees are traced, unless dynamo is off while it runs."""

    @functools.wraps(function)
    def switched(*args: Any, **kwargs: Any) -> Any:
        before = _eval_frame.set_eval_frame(None)
        try:
            return function(*args, **kwargs)
        finally:
            _eval_frame.set_eval_frame(before)

    return switched  # type: ignore[return-value]


def is_tracing() -> bool:
    """Whether `make_fx` is recording in this thread, in whatever mode.

    Relies on the slot that the proxy mode has on the stack of modes.
    """
    return _C._get_dispatch_mode(_PROXY) is not None


_PROXY = _C._TorchDispatchModeKey.PROXY
