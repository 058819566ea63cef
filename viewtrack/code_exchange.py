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
    """Gives functions the code of others, and the defaults of their arguments.

    The code runs with the globals of the function that it is given to.

    Args:
        functions: each function with the one whose code it is to have.
    """

    def __init__(self, *functions: tuple[Any, Any]) -> None:
        self._exchanged = [_Exchanged(f, ours) for f, ours in functions]
        self._lock = threading.Lock()
        self._wanted = 0

    def acquire(self) -> None:
        """Exchange the codes, unless that is done, or somebody else has exchanged one."""
        with self._lock:
            self._wanted += 1
            for exchanged in self._exchanged:
                exchanged.begin()

    @property
    def is_done(self) -> bool:
        """Whether all have the codes they were to have."""
        return all(exchanged.is_done for exchanged in self._exchanged)

    def release(self) -> None:
        """Undo that with the last one."""
        with self._lock:
            self._wanted -= 1
            if not self._wanted:
                for exchanged in self._exchanged:
                    exchanged.end()


class _Exchanged:
    def __init__(self, function: Any, ours: Any) -> None:
        self._function = function
        self._stock = function.__code__, function.__defaults__
        self._ours = ours.__code__, ours.__defaults__

    @property
    def is_done(self) -> bool:
        return self._function.__code__ is self._ours[0]

    # Another thread may call the function in between: code has its defaults before it is there.

    def begin(self) -> None:
        if self._function.__code__ is self._stock[0]:
            self._function.__defaults__ = self._ours[1]
            self._function.__code__ = self._ours[0]

    def end(self) -> None:
        if self.is_done:
            self._function.__code__, self._function.__defaults__ = self._stock
