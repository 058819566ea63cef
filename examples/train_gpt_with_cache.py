"""Train a small GPT whose blocks are checkpointed with a hand-made cache of matrix products.

Activation checkpointing throws the activations of a block away and computes them again in
backward. A matrix product is dear to compute again, so frameworks put a pair of dispatch modes
around the block: in forward one keeps the result of every `aten.mm`, in the recompute the other
hands the results out again instead of calling `aten.mm`. This file does the same in thirty lines.

Such a cache holds an alias of a tensor that the model goes on using. With `--bug` the activation of
the feed-forward layer works in place: it overwrites the cached product, the recompute applies the
activation a second time, and the gradients are wrong. Nothing complains.

    python examples/train_gpt_with_cache.py                                 # right gradients
    python examples/train_gpt_with_cache.py --bug                           # wrong ones, no error
    python -m viewtrack run examples/train_gpt_with_cache.py --bug          # says which line did it

The text is the language reference that Python itself ships for `help()`.
"""

from __future__ import annotations

import argparse
import functools
from collections import defaultdict, deque
from collections.abc import Callable
from contextlib import AbstractContextManager
from pydoc_data.topics import topics
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

CACHED_OPS = {torch.ops.aten.mm.default}

Cache = dict[Any, deque[Tensor]]
ContextFn = Callable[[], tuple[AbstractContextManager[Any], AbstractContextManager[Any]]]


class CachingMode(TorchDispatchMode):
    """Active in forward: keeps the result of every op in `CACHED_OPS`."""

    def __init__(self, cache: Cache) -> None:
        super().__init__()
        self.cache = cache

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if func in CACHED_OPS:
            self.cache[func].append(out.detach())
        return out


class CachedMode(TorchDispatchMode):
    """Active in the recompute: hands the kept results out again, in the order they were made."""

    def __init__(self, cache: Cache) -> None:
        super().__init__()
        self.cache = cache

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func in CACHED_OPS:
            return self.cache[func].popleft()
        return func(*args, **(kwargs or {}))


def cache_contexts() -> tuple[CachingMode, CachedMode]:
    """The pair `checkpoint(context_fn=...)` asks for: one for forward, one for the recompute."""
    cache: Cache = defaultdict(deque)
    return CachingMode(cache), CachedMode(cache)


class Attention(nn.Module):
    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(dim, 3 * dim, bias=False)
        self.proj = nn.Linear(dim, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        batch, time, dim = x.shape
        qkv = self.qkv(x).view(batch, time, 3, self.heads, dim // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.proj(y.transpose(1, 2).reshape(batch, time, dim))


class FeedForward(nn.Module):
    """SwiGLU, as in Llama: no layer has a bias."""

    def __init__(self, dim: int, inplace: bool) -> None:
        super().__init__()
        self.gate = nn.Linear(dim, 2 * dim, bias=False)
        self.up = nn.Linear(dim, 2 * dim, bias=False)
        self.down = nn.Linear(2 * dim, dim, bias=False)
        self.inplace = inplace

    def forward(self, x: Tensor) -> Tensor:
        gate = self.gate(x)
        gate = F.silu(gate, inplace=self.inplace)
        return self.down(gate * self.up(x))


class Block(nn.Module):
    def __init__(self, dim: int, heads: int, inplace: bool) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(dim)
        self.attention = Attention(dim, heads)
        self.feed_forward_norm = nn.RMSNorm(dim)
        self.feed_forward = FeedForward(dim, inplace)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.feed_forward(self.feed_forward_norm(x))


class GPT(nn.Module):
    def __init__(
        self, vocab: int, dim: int, heads: int, layers: int, context: int, inplace: bool
    ) -> None:
        super().__init__()
        self.context = context
        self.token = nn.Embedding(vocab, dim)
        self.position = nn.Embedding(context, dim)
        self.blocks = nn.ModuleList(Block(dim, heads, inplace) for _ in range(layers))
        self.norm = nn.RMSNorm(dim)
        self.head = nn.Linear(dim, vocab, bias=False)

    def forward(self, tokens: Tensor, targets: Tensor, context_fn: ContextFn | None) -> Tensor:
        x = self.token(tokens) + self.position.weight
        run = functools.partial(checkpoint, use_reentrant=False)
        if context_fn is not None:
            run = functools.partial(run, context_fn=context_fn)
        for block in self.blocks:
            x = run(block, x)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def load_text() -> tuple[Tensor, int]:
    """Python's own reference as one long int64 tensor of character numbers, and their count."""
    text = "\n".join(topics[name] for name in sorted(topics))
    vocabulary = {char: number for number, char in enumerate(sorted(set(text)))}
    return torch.tensor([vocabulary[char] for char in text]), len(vocabulary)


def draw_batch(text: Tensor, size: int, context: int) -> tuple[Tensor, Tensor]:
    starts = torch.randint(len(text) - context, (size, 1))
    window = text[starts + torch.arange(context + 1)]
    return window[:, :-1], window[:, 1:]


def gradients(model: GPT, batch: tuple[Tensor, Tensor], context_fn: ContextFn | None) -> Any:
    loss = model(*batch, context_fn)
    return torch.autograd.grad(loss, list(model.parameters()))


def gradient_difference(
    model: GPT, batch: tuple[Tensor, Tensor], context_fn: ContextFn | None
) -> float:
    """The largest relative difference that `context_fn` makes to the gradient of any parameter."""
    pairs = zip(gradients(model, batch, context_fn), gradients(model, batch, None), strict=True)
    return max(float((got - want).norm() / want.norm()) for got, want in pairs)


def train(model: GPT, text: Tensor, steps: int, context_fn: ContextFn | None) -> list[float]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for step in range(1, steps + 1):
        loss = model(*draw_batch(text, 8, model.context), context_fn)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
        if step == 1 or step % 10 == 0:
            print(f"step {step:3d}  loss {losses[-1]:.4f}")
    return losses


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--bug", action="store_true", help="let the activation work in place")
    parser.add_argument("--no-cache", action="store_true", help="checkpoint without the cache")
    parser.add_argument("--steps", type=int, default=40, help="training steps (default: 40)")
    parser.add_argument("--layers", type=int, default=3, help="blocks (default: 3)")
    parser.add_argument("--dim", type=int, default=64, help="width of a block (default: 64)")
    parser.add_argument("--seed", type=int, default=0, help="seed of weights and batches")
    args = parser.parse_args()
    if args.steps < 1:
        parser.error(f"`--steps` must be at least 1, got {args.steps}")
    return args


def main() -> None:
    args = parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(args.seed)
    text, vocab = load_text()
    model = GPT(vocab, args.dim, 4, args.layers, context=64, inplace=args.bug)
    context_fn = None if args.no_cache else cache_contexts

    print(f"{len(text)} characters of {vocab} kinds, {args.layers} blocks of width {args.dim}")
    difference = gradient_difference(model, draw_batch(text, 8, model.context), context_fn)
    losses = train(model, text, args.steps, context_fn)
    print(f"loss {losses[0]:.4f} -> {losses[-1]:.4f} in {args.steps} steps")
    print(f"gradient difference against the run without a cache: {difference:.1e}")


if __name__ == "__main__":
    main()
