"""Whether a function can be a handler, and whether it takes a mode or class first."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

Handler = Callable[..., Any]


def takes_func_first(handler: Handler) -> bool:
    """Whether it is called with the op first, and not with a mode or class before."""
    names = list(inspect.signature(handler).parameters)
    return bool(names) and names[0] not in ("self", "cls") and len(names) < 5


def check_signature(handler: Handler, takes_owner: bool) -> None:
    """Refuse a function that cannot be called as a handler.

    Args:
        handler: the function.
        takes_owner: whether it is called with a mode or class first.

    Raises:
        TypeError: it takes other arguments.
    """
    signature = inspect.signature(handler, follow_wrapped=False)
    try:
        signature.bind(*[None] * (5 if takes_owner else 4))
    except TypeError:
        name = getattr(handler, "__qualname__", type(handler).__qualname__)
        raise TypeError(
            f"tracked: `{name}` takes `{signature}`, and cannot be a handler; give it the "
            f"parameters `({'self, ' if takes_owner else ''}func, types, args=(), kwargs=None)`"
        ) from None
