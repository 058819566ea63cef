"""The calls of torch's own OpInfo database: every op, variant, dtype and sample."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import torch

from .. import _torch
from .._torch.opinfo import op_database
from .call import Call, Variant

DTYPES = (torch.float32, torch.complex64, torch.int64)

# Ops whose result is memory as it was found.
_UNINITIALISED = frozenset(
    {
        "empty",
        "empty_like",
        "empty_permuted",
        "empty_strided",
        "new_empty",
        "new_empty_strided",
        "resize_",
        "resize_as_",
    }
)


def calls(op: Any, samples: int | None = None) -> Iterator[Call]:
    """The calls of one entry of the database.

    Args:
        op: an OpInfo, or a ForeachFuncInfo.
        samples: how many samples of each dtype to take; all of them by default.
    """
    for dtype in DTYPES:
        if dtype in op.supported_dtypes("cpu"):
            for index, sample in enumerate(itertools.islice(_samples(op, dtype), samples)):
                yield from _variants(op, sample, f"{op.full_name}[{dtype}, {index}]")


def database(name_contains: str = "") -> list[Any]:
    """The entries whose name contains a text, foreach ops included."""
    return [op for op in op_database() if name_contains in op.full_name]


def _samples(op: Any, dtype: torch.dtype) -> Iterator[Any]:
    differentiable = dtype.is_floating_point or dtype.is_complex
    yield from op.sample_inputs(
        "cpu", dtype, requires_grad=differentiable and bool(op.supports_autograd)
    )


def _variants(op: Any, sample: Any, name: str) -> Iterator[Call]:
    args = (_settled(sample.input), *_settled(tuple(sample.args)))
    kwargs = _settled(dict(sample.kwargs))
    values = op.name not in _UNINITIALISED

    def call(fn: Any, variant: Variant) -> Call:
        return Call(fn, args, kwargs, f"{name} {variant}", variant, values)

    yield call(op.op, "function")
    inplace = op.inplace_variant
    if inplace is not None:
        yield call(inplace, "in-place")
        yield call(inplace, "in-place on a view")
    if getattr(op, "supports_out", False) and "out" not in kwargs:
        yield from _out_variant(call(op.op, "out"))


def _out_variant(call: Call) -> Iterator[Call]:
    """The same with ``out=`` tensors of the right shape, where the function takes any."""
    inputs = call.inputs(requires_grad=False)
    try:
        expected = call.fn(*inputs.args, **inputs.kwargs)
    except Exception:  # a sample that the op refuses is compared as it is, by the other variants
        return
    tensors = list(expected) if isinstance(expected, (list, tuple)) else [expected]
    if not all(isinstance(t, torch.Tensor) and t.layout is torch.strided for t in tensors):
        return
    out: Any = tuple(torch.zeros_like(t.detach()) for t in tensors)
    out = out if isinstance(expected, (list, tuple)) else out[0]
    yield Call(
        call.fn,
        _without_grad(call.args),
        {**_without_grad(call.kwargs), "out": out},
        call.name,
        "out",
        call.compares_values,
    )


def _without_grad(tree: Any) -> Any:
    return _torch.tree_map_only(torch.Tensor, lambda t: t.detach(), tree)


def _settled(tree: Any) -> Any:
    """Arguments that can be copied: leaves of autograd, and what an iterator yields as a list."""
    if isinstance(tree, Iterator):
        tree = list(tree)
    return _torch.tree_map_only(torch.Tensor, _leaf, tree)


def _leaf(t: torch.Tensor) -> torch.Tensor:
    return t if t.is_leaf else t.detach().requires_grad_(t.requires_grad)
