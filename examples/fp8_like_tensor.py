"""A weight kept as float8 numbers and one scale, trained inside a real module.

`TrackedTensor` sees to what makes such wrappers hard: views alias the weight's storage, in-place
ops return the weight itself, and the version counters of the wrapper and of the numbers inside move
together. What is left to write is how values are kept (`quantize`, `dequantize`) and how an op is
run (`run`): view ops on the numbers, any other op on the values.

    python examples/fp8_like_tensor.py
"""

from __future__ import annotations

import argparse
import copy
import inspect
import textwrap
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

import viewtrack as vt

FP8 = torch.float8_e4m3fn
CONTEXT = 8


def quantize(values: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Float8 numbers that stand for `values`, rounded up or down by chance, so that small updates
    add up in the mean."""
    limit = torch.finfo(FP8).max
    noise = 1 + (torch.rand_like(values) - 0.5) / 8  # three bits of mantissa
    return (values / scale * noise).clamp(-limit, limit).to(FP8)


class Fp8LikeTensor(vt.TrackedTensor):
    """Stands for ``numbers * scale``, of shape and dtype as the user sees them."""

    def __init__(self, numbers: torch.Tensor, scale: torch.Tensor, **kwargs: Any) -> None:
        super().__init__(numbers)
        self.scale = scale

    @classmethod
    def from_float(cls, values: torch.Tensor) -> Fp8LikeTensor:
        scale = 4 * values.abs().amax() / torch.finfo(FP8).max  # room for weights to grow
        return cls(quantize(values, scale), scale, dtype=values.dtype)

    def like(self, inner: torch.Tensor) -> Fp8LikeTensor:
        return type(self)(inner, self.scale, dtype=self.dtype)

    def dequantize(self) -> torch.Tensor:
        return self.unwrap().to(self.dtype) * self.scale

    @classmethod
    def run(cls, func: Any, args: Any, kwargs: Any) -> Any:
        if func.is_view:
            out = func(args[0].unwrap(), *args[1:], **kwargs)
            return pytree.tree_map_only(torch.Tensor, args[0].like, out)
        if torch.Tag.inplace_view in func.tags:  # t_, squeeze_: they move no value
            return args[0].like(func(args[0].unwrap(), *args[1:], **kwargs))
        own = {id(t): t for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, cls)}
        values = {key: t.dequantize() for key, t in own.items()}
        as_values = lambda t: values.get(id(t), t)  # noqa: E731
        out = func(*pytree.tree_map(as_values, args), **pytree.tree_map(as_values, kwargs))
        if func._schema.is_mutable:
            for key, t in own.items():
                t.unwrap().copy_(quantize(values[key], t.scale))
        return out  # plain values; for a written argument the base class returns the argument

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["_inner", "scale"], self.dtype

    @classmethod
    def __tensor_unflatten__(cls, parts: Any, dtype: Any, size: Any, stride: Any) -> Fp8LikeTensor:
        return cls(parts["_inner"], parts["scale"], dtype=dtype)


class NextCharacter(nn.Module):
    """Guesses the next character from the last few."""

    def __init__(self, vocabulary: int, width: int = 64) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, 16)
        self.hidden = nn.Linear(16 * CONTEXT, width)
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.hidden(self.embedding(x).flatten(1)).relu()))


def with_fp8_weights(module: nn.Module) -> nn.Module:
    """The same module with the weights of its Linear layers kept as float8."""
    module = copy.deepcopy(module)
    for layer in module.modules():
        if isinstance(layer, nn.Linear):
            layer.weight = nn.Parameter(Fp8LikeTensor.from_float(layer.weight.detach()))
    return module


def train(module: nn.Module, text: torch.Tensor, steps: int) -> tuple[float, float]:
    """Loss over the first and the last ten steps."""
    torch.manual_seed(1)
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2, foreach=False)
    losses = []
    for _ in range(steps):
        start = torch.randint(len(text) - CONTEXT - 1, (64,))
        windows = text[start[:, None] + torch.arange(CONTEXT + 1)]
        loss = nn.functional.cross_entropy(module(windows[:, :-1]), windows[:, -1])
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(module.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
    return sum(losses[:10]) / 10, sum(losses[-10:]) / 10


def show_views(weight: torch.Tensor) -> None:
    """Write to a part of the weight, and see that the whole knows."""
    with torch.no_grad():
        before = weight._version
        row = weight[0]
        row.zero_()
        print(
            f"a row is a view of the weight: {row._base is weight}; "
            f"after row.zero_() the weight's row is {weight[0].dequantize().abs().max():.0f}, "
            f"versions of weight, row and numbers moved by "
            f"{weight._version - before} {row._version - before} "
            f"{weight.unwrap()._version - before}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=200)
    steps = parser.parse_args().steps
    torch.manual_seed(0)
    characters = inspect.getsource(textwrap)
    vocabulary = sorted(set(characters))
    text = torch.tensor([vocabulary.index(c) for c in characters])

    plain = NextCharacter(len(vocabulary))
    fp8 = with_fp8_weights(plain)
    for name, module in (("float32 weights", plain), ("float8 weights", fp8)):
        first, last = train(module, text, steps)
        print(f"{name:<16} loss {first:.2f} -> {last:.2f}")

    weight = fp8.hidden.weight
    print(
        f"the weight is a {type(weight).__name__} of {weight.dtype}, {weight.unwrap().nbytes} bytes"
    )
    show_views(weight)
    again = copy.deepcopy(fp8)
    print(f"a copy gives the same: {torch.equal(again(text[None, :8]), fp8(text[None, :8]))}")


if __name__ == "__main__":
    main()
