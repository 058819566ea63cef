"""Everything that a caller can see of one call, as plain data that can be compared.

Names of what is seen: ``out[0]._version``, ``in[1].grad_fn``, ``grad[0]``, ``error``,
``counter(in[0])``. Where memory or a counter is shared, it is named by the first that shares it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from .. import _torch
from ..info import version
from ..ledger import key_of
from .call import Call, Inputs

Observation = dict[str, Any]
Under = Callable[[], AbstractContextManager[Any]]

_ADDRESS = re.compile(r"0x[0-9a-f]+")


def observe(call: Call, under: Under = nullcontext) -> Observation:
    """Make a call on fresh inputs, and its backward, and see what comes of it.

    Args:
        call: what to call.
        under: makes the context manager to call it in, with its backward.

    Returns:
        What was seen, by name.
    """
    inputs = call.inputs()
    torch.default_generator.manual_seed(0)
    seen: Observation = {}
    out: Any = None
    with under():
        try:
            out = call.fn(*inputs.args, **inputs.kwargs)
        except Exception as error:
            seen["error"] = describe_error(error)
        outputs = [t for t in _torch.tree_leaves(out) if isinstance(t, torch.Tensor)]
        named = _named(inputs.tensors, outputs)
        owners, keys = _firsts(named, id), _firsts(named, key_of)
        for name, t in named.items():
            seen[f"{name}.is"] = owners[id(t)]
            seen[f"{name}.storage"] = keys[key_of(t)]
            seen.update(_metadata(name, t, owners))
        if call.compares_values and outputs:
            seen.update(_gradients(inputs, outputs))
    if call.compares_values:
        seen["out"] = [x for x in _torch.tree_leaves(out) if not isinstance(x, torch.Tensor)]
        seen.update({f"{name}.value": value_of(t) for name, t in named.items()})
    seen.update(counters(named))
    return seen


def describe_error(error: Exception) -> str:
    """An error's type and text, without addresses."""
    return f"{type(error).__name__}: {_ADDRESS.sub('0x', str(error))}"


def _named(
    inputs: Iterable[torch.Tensor], outputs: Iterable[torch.Tensor]
) -> dict[str, torch.Tensor]:
    named = {f"in[{index}]": t for index, t in enumerate(inputs)}
    named.update({f"out[{index}]": t for index, t in enumerate(outputs)})
    return named


def _firsts(named: dict[str, torch.Tensor], key: Callable[[Any], int]) -> dict[int, str]:
    """The name of the first tensor with each key."""
    firsts: dict[int, str] = {}
    for name, t in named.items():
        firsts.setdefault(key(t), name)
    return firsts


def _metadata(name: str, t: torch.Tensor, owners: dict[int, str]) -> Observation:
    base = t._base if t._is_view() else None
    facts = {
        "type": type(t),
        "dtype": t.dtype,
        "layout": t.layout,
        "size": tuple(t.size()),
        "stride": geometry(t),
        "requires_grad": t.requires_grad,
        "is_leaf": t.is_leaf,
        "grad_fn": describe_graph(t.grad_fn),
        "_is_view": t._is_view(),
        "_base": None if base is None else _name_of(base, owners),
        "creation_meta": str(_torch.creation_meta(t)),
        "_version": version(t),
        "is_inference": t.is_inference(),
        "bits": (t.is_conj(), t.is_neg()),
    }
    return {f"{name}.{fact}": value for fact, value in facts.items()}


def _name_of(base: torch.Tensor, owners: dict[int, str]) -> str:
    """The base by its name; if it was made inside, by its looks."""
    name = owners.get(id(base))
    return name or f"inner {tuple(base.size())} {describe_graph(base.grad_fn)}"


def geometry(t: torch.Tensor) -> Any:
    """Stride and offset; None for a tensor that has none."""
    try:
        return tuple(t.stride()), t.storage_offset()
    except (RuntimeError, NotImplementedError):
        return None


def describe_graph(node: Any, depth: int = 2) -> str:
    """A grad_fn by name, with the names of the nodes that it leads to."""
    if node is None:
        return "-"
    if depth == 0:
        return str(node.name())
    following = ", ".join(describe_graph(n, depth - 1) for n, _ in node.next_functions)
    return f"{node.name()}({following})"


def _gradients(inputs: Inputs, outputs: list[torch.Tensor]) -> Observation:
    ends = [t for t in outputs if t.requires_grad and (t.is_floating_point() or t.is_complex())]
    if not ends or not inputs.leaves:
        return {}
    torch.default_generator.manual_seed(1)
    try:
        grads = torch.autograd.grad(
            ends,
            inputs.leaves,
            [torch.randn_like(t.detach()) for t in ends],
            allow_unused=True,
        )
    except Exception as error:
        return {"grad": describe_error(error)}
    return {
        f"grad[{index}]": None if grad is None else value_of(grad)
        for index, grad in enumerate(grads)
    }


def value_of(t: torch.Tensor) -> torch.Tensor:
    """A copy of t's values, without autograd."""
    with torch.no_grad():
        return t.detach().clone()


def counters(named: dict[str, torch.Tensor]) -> Observation:
    """Which tensors share a counter, told by writing a number of its own to each. Spoils them."""
    counted = {name: t for name, t in named.items() if version(t) is not None}
    for number, t in enumerate(counted.values()):
        _torch.set_version(t, number)
    first: dict[int, str] = {}
    return {f"counter({name})": first.setdefault(t._version, name) for name, t in counted.items()}


def same(a: Any, b: Any) -> bool:
    """Whether two things that were seen are the same; tensors bit by bit, NaN being NaN."""
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        return _same_values(a, b)
    if isinstance(a, float) and isinstance(b, float):
        return a == b or (a != a and b != b)
    if isinstance(a, (list, tuple)) and type(a) is type(b):
        return len(a) == len(b) and all(map(same, a, b))
    return type(a) is type(b) and bool(a == b)


def _same_values(a: torch.Tensor, b: torch.Tensor) -> bool:
    if a.size() != b.size() or a.dtype is not b.dtype or a.layout is not b.layout:
        return False
    if a.layout is not torch.strided:
        a, b = a.to_dense(), b.to_dense()
    if a.is_quantized:
        a, b = a.dequantize(), b.dequantize()
    if a.dtype is torch.complex32:  # no CPU kernel compares these
        a, b = a.to(torch.complex64), b.to(torch.complex64)
    if torch.equal(a, b):
        return True
    return bool(((a == b) | ((a != a) & (b != b))).all())
