"""A step with the guarded contexts, against the same step with torch's own.

The step is forward and backward of a TransformerEncoderLayer whose matmuls are saved.
"""

from __future__ import annotations

import functools
import time
from statistics import median
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint
from torch.utils.checkpoint import create_selective_checkpoint_contexts as stock_contexts

import viewtrack as vt
from benchmarks.registry import Side, pair, quantity

aten = torch.ops.aten
MATMULS = [aten.mm.default, aten.addmm.default, aten.bmm.default]


def _step(layer: torch.nn.Module, x: torch.Tensor, context_fn: Any) -> None:
    checkpoint(layer, x, use_reentrant=False, context_fn=context_fn).sum().backward()


def _sides(width: int, hidden: int, batch: int, length: int, check: str) -> tuple[Side, Side]:
    torch.manual_seed(0)
    layer = torch.nn.TransformerEncoderLayer(width, 4, hidden, batch_first=True, dropout=0.0)
    x = torch.randn(batch, length, width, requires_grad=True)
    ours = functools.partial(
        vt.checkpoint.create_selective_checkpoint_contexts, MATMULS, check=check
    )
    stock = functools.partial(stock_contexts, MATMULS)
    return Side(_step, (layer, x, ours)), Side(_step, (layer, x, stock))


@pair("checkpointed layer d64, check='storage'", target=0.85)
def _small() -> tuple[Side, Side]:
    return _sides(64, 256, 2, 16, "storage")


@pair("checkpointed layer d256, check='storage'", target=1.00)
def _large() -> tuple[Side, Side]:
    return _sides(256, 1024, 4, 128, "storage")


@pair("checkpointed layer d256, check='content'", target=1.10)
def _large_content() -> tuple[Side, Side]:
    return _sides(256, 1024, 4, 128, "content")


def _time_of_a_write(guarded: int, writes: int = 2000) -> float:
    kept = [torch.ones(1) for _ in range(guarded)]
    t = torch.ones(4)
    guard = vt.MutationGuard()
    for one in (*kept, t):
        guard.save(one)
    with vt.track(record="none"):
        times = []
        for _ in range(9):
            start = time.perf_counter()
            for _ in range(writes // 9):
                t.add_(1)
            times.append(time.perf_counter() - start)
    return median(times)


@quantity(
    "a write while 100,000 tensors are guarded, to one while 10 are",
    target=1.2,
    unit="times",
    repeats=3,
)
def _many_guarded() -> float:
    return _time_of_a_write(100_000) / _time_of_a_write(10)
