"""The guard's own saved-tensor hooks, where torch allows none.

The transforms of `torch.func` that take gradients, and whoever else enters
``torch.autograd.graph.disable_saved_tensors_hooks``, raise if there are hooks. Those of the guard
are nothing that a program has asked for, so they are taken off for that long: what autograd saves
inside is not guarded, and its own check holds there. The user's hooks stay, and so does the error.

It is the code behind the context manager that is exchanged, since the compiler knows the function
itself. Before torch 2.7 nothing tells which hooks are there, so the class of hooks notes what is
entered.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from ._torch.dynamo import skip_dynamo
from ._torch.hooks import disabling, hooks_on_top, knows_the_top, pop_hooks, push_hooks
from .code_exchange import CodeExchange, copy_of

_hooks: Any = torch.autograd.graph.saved_tensors_hooks
_stock = contextmanager(copy_of(disabling))


class _Entered(threading.local):
    """The hooks that were entered in this thread, while somebody minded."""

    def __init__(self) -> None:
        self.pairs: list[tuple[Any, Any]] = []


_entered = _Entered()


def is_step_aside(pack: Any) -> bool:
    """Whether a pack hook is one that the guard pushed for itself."""
    return getattr(pack, "steps_aside", False) is True


@contextmanager
def aside() -> Iterator[None]:
    """Take our hooks off the stack, down to the first of somebody else."""
    taken = []
    try:
        while (top := _top()) is not None and is_step_aside(top[0]):
            pop_hooks()
            taken.append(top)
            if not knows_the_top:
                _entered.pairs.pop()
        yield
    finally:
        for pair in reversed(taken):
            push_hooks(*pair)
            if not knows_the_top:
                _entered.pairs.append(pair)


def _top() -> tuple[Any, Any] | None:
    if knows_the_top:
        return hooks_on_top()
    return _entered.pairs[-1] if _entered.pairs else None


@contextmanager
def disabled(message: str) -> Iterator[None]:
    """As ``disable_saved_tensors_hooks``, with our hooks out of the way."""
    with aside(), _stock(message):
        yield


@skip_dynamo
def _disabling(error_message: str) -> Any:
    # It runs with the globals of torch's function.
    from viewtrack.step_aside import disabled

    with disabled(error_message):
        yield


@skip_dynamo
def _enter(hooks: Any) -> Any:
    value = exchange.enter(hooks)
    _entered.pairs.append((hooks.pack_hook, hooks.unpack_hook))
    return value


@skip_dynamo
def _exit(hooks: Any, *exc: Any) -> Any:
    if _entered.pairs:
        _entered.pairs.pop()
    return exchange.exit(hooks, *exc)


class _Exchange:
    """Exchanges torch's code, while any guard is active."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._wanted = 0
        self._code = CodeExchange((disabling, _disabling))
        self.enter, self.exit = _hooks.__enter__, _hooks.__exit__

    @contextmanager
    def wanted(self) -> Iterator[None]:
        """Let torch's contexts find our hooks out of their way inside."""
        self.acquire()
        try:
            yield
        finally:
            self.release()

    def acquire(self) -> None:
        """Exchange it, unless it is, or somebody else has exchanged it."""
        with self._lock:
            self._wanted += 1
            self._code.acquire()
            if self._wanted == 1 and not knows_the_top:
                self.enter, self.exit = _hooks.__enter__, _hooks.__exit__
                _hooks.__enter__, _hooks.__exit__ = _enter, _exit

    def release(self) -> None:
        """Undo that with the last one."""
        with self._lock:
            self._wanted -= 1
            self._code.release()
            if self._wanted:
                return
            if _hooks.__enter__ is _enter and _hooks.__exit__ is _exit:
                _hooks.__enter__, _hooks.__exit__ = self.enter, self.exit


exchange = _Exchange()
