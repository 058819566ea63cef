"""Exchanging the code of functions of torch's, for as long as somebody wants it.

The code and not the function, of which others may hold references, and which people look up in
tables (``__torch_function__``).
"""

from __future__ import annotations

import threading
from types import FunctionType
from typing import Any


def copy_of(function: Any) -> Any:
    """A function that stays as it is when the code of `function` is exchanged."""
    return FunctionType(
        function.__code__,
        function.__globals__,
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )


class CodeExchange:
    """Gives functions the code of others. That runs with the globals of the function it is given.

    Args:
        functions: each function with the one whose code it is to have.
    """

    def __init__(self, *functions: tuple[Any, Any]) -> None:
        self._codes = [(f, f.__code__, ours.__code__) for f, ours in functions]
        self._lock = threading.Lock()
        self._wanted = 0

    def acquire(self) -> None:
        """Exchange the codes, unless that is done, or somebody else has exchanged one."""
        with self._lock:
            self._wanted += 1
            for function, stock, ours in self._codes:
                if function.__code__ is stock:
                    function.__code__ = ours

    @property
    def is_done(self) -> bool:
        """Whether all have the codes they were to have."""
        return all(function.__code__ is ours for function, _, ours in self._codes)

    def release(self) -> None:
        """Undo that with the last one."""
        with self._lock:
            self._wanted -= 1
            for function, stock, ours in self._codes:
                if not self._wanted and function.__code__ is ours:
                    function.__code__ = stock
