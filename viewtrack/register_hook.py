"""``Tensor.register_hook`` on a stale view, which kills stock torch before 2.15 (pytorch#196459).

It gives the tensor a dict of hooks and then reads ``grad_fn``. If the tensor is a view whose base
was written since, that makes a new grad_fn and takes the dict away again; what is to register it
finds none, and the process dies. Where the view had a dict already, the hook goes to the grad_fn of
before the write, and never runs. Reading ``grad_fn`` first mends both, as torch does from 2.15 on.

Tried on torch 2.6.0, 2.9.1, 2.13.0, 2.14.1 and 2.15.0.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch.overrides import has_torch_function

from ._torch.dynamo import skip_dynamo
from .code_exchange import CodeExchange, copy_of

_stock = copy_of(torch.Tensor.register_hook)


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


mend = CodeExchange((torch.Tensor.register_hook, _refreshing))
