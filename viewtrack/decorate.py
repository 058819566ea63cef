"""A tracker as a decorator: of functions, and of those that stop halfway and go on later.

A generator or coroutine is tracked step by step, since what runs between its steps is not its own;
``torch.no_grad`` does the same.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager
from typing import Any, ParamSpec, TypeVar, cast

P = ParamSpec("P")
R = TypeVar("R")


def tracked_calls(tracker: AbstractContextManager[Any], fn: Callable[P, R]) -> Callable[P, R]:
    """A function that does what `fn` does with `tracker` active."""
    if inspect.isclass(fn) or inspect.isasyncgenfunction(fn):
        kind = "a class" if inspect.isclass(fn) else "an async generator function"
        raise TypeError(
            f"track: `{fn.__qualname__}` is {kind}; decorate its methods, or use `with` inside it"
        )
    wrapper: Any
    if inspect.isgeneratorfunction(fn):

        def wrapper(*args: P.args, **kwargs: P.kwargs) -> Any:
            return (yield from _steps(tracker, cast(Any, fn(*args, **kwargs))))

    elif inspect.iscoroutinefunction(fn):

        async def wrapper(*args: P.args, **kwargs: P.kwargs) -> Any:
            return await _Awaited(_steps(tracker, cast(Any, fn(*args, **kwargs)).__await__()))

    else:

        def wrapper(*args: P.args, **kwargs: P.kwargs) -> Any:
            with tracker:
                return fn(*args, **kwargs)

    return cast(Callable[P, R], functools.wraps(fn)(wrapper))


class _Awaited:
    def __init__(self, steps: Generator[Any, Any, Any]) -> None:
        self._steps = steps

    def __await__(self) -> Generator[Any, Any, Any]:
        return self._steps


def _steps(
    tracker: AbstractContextManager[Any], inner: Generator[Any, Any, Any]
) -> Generator[Any, Any, Any]:
    step: Callable[[], Any] = functools.partial(next, inner)
    try:
        while True:
            with tracker:
                try:
                    value = step()
                except StopIteration as stop:
                    return stop.value
            try:
                sent = yield value
            except GeneratorExit:
                raise
            except BaseException as error:
                step = functools.partial(inner.throw, error)
            else:
                step = functools.partial(inner.send, sent)
    finally:
        with tracker:
            inner.close()
