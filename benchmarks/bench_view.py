"""Marking a tensor as a view, against the native op that makes and marks one."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

import torch

import viewtrack
from benchmarks.registry import Side, pair

SIZE, STRIDE = (2, 3), (4, 1)


def _unmarked(base: torch.Tensor, n: int) -> Iterable[tuple[torch.Tensor, torch.Tensor]]:
    # `set_` is the one public way to a tensor on the same storage without autograd metadata.
    storage = base.untyped_storage()
    return [(torch.empty(0).set_(storage, 0, SIZE, STRIDE), base) for _ in range(n)]


def _sides(base: torch.Tensor) -> tuple[Side, Side]:
    ours = Side(viewtrack.mark_as_view, fresh=lambda n: _unmarked(base, n))
    return ours, Side(torch.as_strided, (base, SIZE, STRIDE, 0))


@pair("mark_as_view", target=6, note="base without grad")
def _plain() -> tuple[Side, Side]:
    return _sides(torch.ones(4, 4))


@pair("mark_as_view below autograd", target=10, note="as in a handler; against native there")
def _below() -> tuple[Side, Side]:
    # The guard that a native Autograd kernel enters before it redispatches.
    below = torch._C._AutoDispatchBelowAutograd
    ours, native = _sides(torch.ones(4, 4))
    return dataclasses.replace(ours, context=below), dataclasses.replace(native, context=below)


@pair("mark_as_view, base requires grad", target=6, note="grad_fn is settled at once")
def _requires_grad() -> tuple[Side, Side]:
    return _sides(torch.ones(4, 4, requires_grad=True).clone())
