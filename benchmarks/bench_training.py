"""A training step of a small GPT under track(), against the same step on stock torch.

How much any dispatch mode costs such a step depends on the CPU and its caches: a mode that does
nothing took 1.12 times as long as stock torch on one, and 1.38 on another. So the step is also held
against such a mode.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

import viewtrack
from benchmarks.bench_handler import tracked_mode
from benchmarks.bench_track import NoOpMode
from benchmarks.registry import Side, pair

Context = Callable[[], contextlib.AbstractContextManager[Any]]

LAYERS, WIDTH, HEADS, LENGTH, VOCABULARY = 12, 256, 4, 128, 256


class Block(torch.nn.Module):
    """Causal attention and an MLP, each after a LayerNorm and added to its input."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1 = torch.nn.LayerNorm(WIDTH)
        self.qkv = torch.nn.Linear(WIDTH, 3 * WIDTH)
        self.out = torch.nn.Linear(WIDTH, WIDTH)
        self.norm2 = torch.nn.LayerNorm(WIDTH)
        self.up = torch.nn.Linear(WIDTH, 4 * WIDTH)
        self.down = torch.nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, _ = x.shape
        parts = self.qkv(self.norm1(x)).split(WIDTH, dim=-1)
        q, k, v = (t.view(batch, length, HEADS, -1).transpose(1, 2) for t in parts)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, length, WIDTH))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT(torch.nn.Module):
    """Token and position embeddings, blocks, and a head; returns the loss of the next token."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = torch.nn.Embedding(VOCABULARY, WIDTH)
        self.positions = torch.nn.Embedding(LENGTH, WIDTH)
        self.blocks = torch.nn.Sequential(*(Block() for _ in range(LAYERS)))
        self.norm = torch.nn.LayerNorm(WIDTH)
        self.head = torch.nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        read, wanted = tokens[:, :-1], tokens[:, 1:]
        x = self.tokens(read) + self.positions(torch.arange(read.shape[1]))
        logits = self.head(self.norm(self.blocks(x)))
        return F.cross_entropy(logits.flatten(0, 1), wanted.flatten())


def _step(model: GPT, optimizer: torch.optim.Optimizer, tokens: torch.Tensor) -> None:
    optimizer.zero_grad()
    model(tokens).backward()
    optimizer.step()


def _sides(ours: Context, reference: Context = contextlib.nullcontext) -> tuple[Side, Side]:
    torch.manual_seed(0)
    model = GPT()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    args = (model, optimizer, torch.randint(VOCABULARY, (1, LENGTH + 1)))
    return Side(_step, args, ours), Side(_step, args, reference)


def _unrecorded() -> contextlib.AbstractContextManager[Any]:
    return viewtrack.track(record="none")


@pair("GPT step, 12 layers d256 s128, track(record='none')", target=1.20)
def _track() -> tuple[Side, Side]:
    return _sides(_unrecorded)


@pair("GPT step, the same, to a mode that does nothing", target=1.05)
def _to_a_mode() -> tuple[Side, Side]:
    return _sides(_unrecorded, NoOpMode)


@pair("GPT step, the same, under a tracked handler", target=1.10, note="to the same, undecorated")
def _tracked() -> tuple[Side, Side]:
    return _sides(tracked_mode(), NoOpMode)
