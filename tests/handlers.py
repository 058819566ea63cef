"""Dispatch modes as people write them, to run ops above them and in their handlers."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class NoOp(TorchDispatchMode):
    """Passes every op on."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


class On(TorchDispatchMode):
    """Passes every op on, and calls `then(out)` after `op`."""

    def __init__(self, op: Any, then: Callable[[Any], Any]) -> None:
        super().__init__()
        self.op = op
        self.then = then
        self.kept: list[Any] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if func is self.op:
            self.kept.append(self.then(out))
        return out


class Wrapper(torch.Tensor):
    """A wrapper subclass that unwraps, calls, and hands a written argument back."""

    @staticmethod
    def __new__(cls, inner: torch.Tensor, requires_grad: bool = False):
        return torch.Tensor._make_wrapper_subclass(
            cls, inner.shape, dtype=inner.dtype, requires_grad=requires_grad
        )

    def __init__(self, inner: torch.Tensor, requires_grad: bool = False) -> None:
        self.inner = inner

    def __repr__(self):
        return f"Wrapper({self.inner})"

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        plain, named = torch.utils._pytree.tree_map_only(
            Wrapper, lambda t: t.inner, (args, kwargs or {})
        )
        out = func(*plain, **named)
        if func._schema.is_mutable:
            return args[0] if out is not None else None
        return torch.utils._pytree.tree_map_only(torch.Tensor, Wrapper, out)


def moves(tensors: Iterable[torch.Tensor], body: Callable[[], Any]) -> list[int]:
    """By how much `body` moves the counters of `tensors`."""
    tensors = list(tensors)
    before = [t._version for t in tensors]
    body()
    return [t._version - was for t, was in zip(tensors, before, strict=True)]
