"""``Tensor.register_hook`` on a stale view, which kills stock torch before 2.15 (pytorch#196459).

It gives the tensor a dict of hooks and then reads ``grad_fn``. If the tensor is a view whose base
was written since, that makes a new grad_fn and takes the dict away again; what is to register it
finds none, and the process dies. Where the view had a dict already, the hook goes to the grad_fn of
before the write, and never runs. Reading ``grad_fn`` first mends both, as torch does from 2.15 on.

It is the code of the function that is exchanged and not the function, which people look up in
tables (``__torch_function__``). Tried on torch 2.6.0, 2.9.1, 2.13.0, 2.14.1 and 2.15.0.
"""

from __future__ import annotations

import contextlib
import threading
from types import FunctionType
from typing import Any

import torch
from torch.overrides import has_torch_function

from ._torch.dynamo import skip_dynamo

_function: Any = torch.Tensor.register_hook
_stock = FunctionType(
    _function.__code__,
    _function.__globals__,
    _function.__name__,
    _function.__defaults__,
    _function.__closure__,
)


def register(t: torch.Tensor, hook: Any) -> Any:
    """Register a hook as stock torch does, on a view with a fresh grad_fn."""
    if not has_torch_function((t,)):  # torch comes here again after that
        # Where native refuses the view for its creation_meta, so does what follows.
        with contextlib.suppress(RuntimeError):
            _ = t.grad_fn
    return _stock(t, hook)


@skip_dynamo
def _refreshing(self: Any, hook: Any) -> Any:
    # It runs with the globals of torch's function.
    from viewtrack.register_hook import register

    return register(self, hook)


class _Mend:
    """Exchanges the code, while anybody wants it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._wanted = 0

    def acquire(self) -> None:
        """Mend the function, unless it is mended, or somebody else has exchanged its code."""
        with self._lock:
            self._wanted += 1
            if _function.__code__ is _stock.__code__:
                _function.__code__ = _refreshing.__code__

    def release(self) -> None:
        """Undo that with the last one."""
        with self._lock:
            self._wanted -= 1
            if not self._wanted and _function.__code__ is _refreshing.__code__:
                _function.__code__ = _stock.__code__


mend = _Mend()
