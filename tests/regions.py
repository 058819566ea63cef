"""Regions to checkpoint: what the guarded contexts must run just as torch's own do."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

aten = torch.ops.aten
MATMULS = [aten.mm.default, aten.addmm.default, aten.bmm.default]


def inputs() -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    return torch.randn(2, 4, 4, requires_grad=True), torch.randn(4, 4, requires_grad=True)


def mlp(x, w):
    return (F.linear(F.gelu(F.linear(x, w)), w) + x).sin().sum()


def biased(x, w):
    return F.linear(F.relu(F.linear(x, w, w[0])), w, w[1]).exp().sum()


def attention(x, w):
    q, k, v = (x @ w).chunk(1, -1)[0], x @ w.t(), x.clone()
    return (torch.softmax(q @ k.transpose(-1, -2), -1) @ v).pow(2).sum()


def dropped(x, w):
    return F.dropout(F.dropout(x @ w, 0.5).tanh() @ w, 0.3).sin().sum()


def tuple_out(x, w):
    h = x @ w
    return (h.sin() * h).sum(), [h.cos(), 3, "text"], None


def views_saved(x, w):
    first, second = (x @ w).split(2, -1)
    return (first * second.transpose(0, 1).reshape(second.shape)).exp().sum()


def written_before_it_is_saved(x, w):
    h = x * 2
    h.mul_(3)
    return ((h @ w).sin() @ w).sum()


def list_out(x, w):
    return torch.stack([part.sin() @ w for part in torch.unbind(x @ w)]).pow(3).sum()


def complex_numbers(x, w):
    return torch.view_as_real(torch.fft.fft(x @ w) * 2).pow(2).sum()


REGIONS: list[Callable[..., Any]] = [
    mlp,
    biased,
    attention,
    dropped,
    tuple_out,
    views_saved,
    written_before_it_is_saved,
    list_out,
    complex_numbers,
]


def run(region: Callable[..., Any], context_fn: Any, **kwargs: Any) -> tuple[list[Any], list[Any]]:
    """What a checkpointed region returns, and the gradients of its inputs."""
    x, w = inputs()
    out = checkpoint(region, x, w, use_reentrant=False, context_fn=context_fn, **kwargs)
    leaves = tree_leaves(out)
    loss = sum(t.sum() for t in leaves if isinstance(t, torch.Tensor))
    loss.backward()
    values = [t.detach() if isinstance(t, torch.Tensor) else t for t in leaves]
    return values, [x.grad, w.grad]


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of all storages that ops made and that are still alive."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._storages: dict[int, Any] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for t in tree_leaves(out):
            if isinstance(t, torch.Tensor):
                self._add(t.untyped_storage())
        return out

    def _add(self, storage: Any) -> None:
        key = storage._cdata
        if key in self._storages:
            return
        size = storage.nbytes()

        def died(_: Any) -> None:
            self._storages.pop(key)
            self.now -= size

        self._storages[key] = weakref.ref(storage, died)
        self.now += size
        self.peak = max(self.peak, self.now)
