"""The stack of saved-tensor hooks, and what forbids them. Private torch, as all of the package.

Tried on torch 2.6.0, 2.9.1, 2.13.0 and 2.15.0.
"""

from __future__ import annotations

from collections.abc import Callable
from types import FunctionType
from typing import Any

import torch

__all__ = ["disabling", "hooks_on_top", "knows_the_top", "pop_hooks", "push_hooks"]

Pair = tuple[Any, Any]

_autograd: Any = torch._C._autograd
_top: Any = getattr(_autograd, "_top_saved_tensors_default_hooks", None)

knows_the_top = _top is not None
"""Whether torch tells which hooks are there: from 2.7 on."""

pop_hooks: Callable[[], None] = _autograd._pop_saved_tensors_default_hooks
"""Take off the pair of hooks that was pushed last; there must be one."""

_disable_saved_tensors_hooks: Any = torch.autograd.graph.disable_saved_tensors_hooks

disabling: FunctionType = _disable_saved_tensors_hooks.__wrapped__
"""The generator behind ``torch.autograd.graph.disable_saved_tensors_hooks``.

`torch.func.grad` and its like look the context manager up when they are called. Relies on its being
made by ``contextlib.contextmanager`` of a function without free variables, which raises if there
are hooks.
"""


def hooks_on_top() -> Pair | None:
    """The pair of hooks that was pushed last, also where a trace passes the hooks by."""
    pair: Pair | None = _top(True) if knows_the_top else None
    return pair


def push_hooks(pack: Any, unpack: Any) -> None:
    """Put a pair of hooks on the stack, also where new ones are forbidden, as for a trace.

    Where torch cannot forbid hooks while there are some, before 2.7, it does not come to that.
    """
    message = _autograd._saved_tensors_hooks_get_disabled_error_message()
    if message is None:
        _autograd._push_saved_tensors_default_hooks(pack, unpack)
        return
    _autograd._saved_tensors_hooks_enable()
    try:
        _autograd._push_saved_tensors_default_hooks(pack, unpack)
    finally:
        _autograd._saved_tensors_hooks_disable(message, False)
