"""The operations that `SubclassConformance` tries on a wrapper subclass.

Each is a function of a tensor `x` of shape (2, 3) and of `of`, which makes a tensor of the class
under test from a plain one. It runs once on the class and once on plain tensors.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch

Kind = Literal["view", "functional", "in-place", "out", "foreach", "metadata"]
Of = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class Operation:
    """One operation of the table.

    Attributes:
        name: how it is called in test names and in `SubclassConformance.unsupported`.
        kind: what it does to memory.
        run: the operation itself.
    """

    name: str
    kind: Kind
    run: Callable[[torch.Tensor, Of], Any]


def _ones(*shape: int) -> torch.Tensor:
    return torch.ones(*shape)


_VIEWS: dict[str, Callable[[torch.Tensor, Of], Any]] = {
    "alias": lambda x, of: torch.ops.aten.alias.default(x),
    "as_strided": lambda x, of: x.as_strided((2, 2), (3, 1), 1),
    "chunk": lambda x, of: x.chunk(3, 1),
    "detach": lambda x, of: x.detach(),
    "diagonal": lambda x, of: x.diagonal(),
    "expand": lambda x, of: x.unsqueeze(0).expand(4, 2, 3)[0],
    "flatten": lambda x, of: x.flatten(),
    "index_slice": lambda x, of: x[:, 1:],
    "narrow": lambda x, of: x.narrow(1, 1, 2),
    "permute": lambda x, of: x.permute(1, 0),
    "select": lambda x, of: x[1],
    "split": lambda x, of: x.split(2, 1),
    "split_with_sizes": lambda x, of: x.split([1, 2], 1),
    "squeeze": lambda x, of: x.unsqueeze(0).squeeze(0),
    "t": lambda x, of: x.t(),
    "tensor_split": lambda x, of: x.tensor_split(2, 1),
    "transpose": lambda x, of: x.transpose(0, 1),
    "unbind": lambda x, of: x.unbind(0),
    "unfold": lambda x, of: x.unfold(1, 2, 2)[0],
    "unsqueeze": lambda x, of: x.unsqueeze(1),
    "view": lambda x, of: x.view(6),
    "view_as": lambda x, of: x.view_as(of(_ones(3, 2))),
}

_FUNCTIONAL: dict[str, Callable[[torch.Tensor, Of], Any]] = {
    "add": lambda x, of: x + x,
    "cat": lambda x, of: torch.cat([x, x]),
    "clone": lambda x, of: x.clone(),
    "contiguous_copy": lambda x, of: x.t().contiguous(),
    "linear": lambda x, of: torch.nn.functional.linear(x, of(_ones(4, 3))),
    "matmul": lambda x, of: x @ x.t(),
    "max_dim": lambda x, of: torch.max(x, 1),
    "mul_scalar": lambda x, of: x * 2,
    "sin": lambda x, of: x.sin(),
    "sum": lambda x, of: x.sum(),
    "to_dtype": lambda x, of: x.to(torch.float64),
    "where": lambda x, of: torch.where(x > 1, x, x * 2),
    "zeros_like": lambda x, of: torch.zeros_like(x),
}

_INPLACE: dict[str, Callable[[torch.Tensor, Of], Any]] = {
    "add_": lambda x, of: x.add_(1),
    "add_tensor_": lambda x, of: x.add_(of(_ones(2, 3))),
    "clamp_": lambda x, of: x.clamp_(1, 3),
    "copy_": lambda x, of: x.copy_(of(_ones(2, 3))),
    "fill_": lambda x, of: x.fill_(2),
    "index_put_": lambda x, of: x.index_put_((torch.tensor([1, 0]),), of(_ones(2, 3))),
    "masked_fill_": lambda x, of: x.masked_fill_(x > 2, 0.0),
    "mul_": lambda x, of: x.mul_(2),
    "relu_": lambda x, of: torch.relu_(x),
    "setitem": lambda x, of: x.__setitem__(0, 5.0),
    "zero_": lambda x, of: x.zero_(),
}

_OUT: dict[str, Callable[[torch.Tensor, Of], Any]] = {
    "add_out": lambda x, of: torch.add(x, x, out=of(_ones(2, 3))),
    "cat_out": lambda x, of: torch.cat([x, x], out=of(_ones(4, 3))),
    "max_dim_out": lambda x, of: torch.max(
        x, 1, out=(of(_ones(2)), of(torch.zeros(2, dtype=torch.long)))
    ),
    "mm_out": lambda x, of: torch.mm(x, x.t(), out=of(_ones(2, 2))),
    "resized_out": lambda x, of: torch.add(x, x, out=of(_ones(0))),
}

_FOREACH: dict[str, Callable[[torch.Tensor, Of], Any]] = {
    "_foreach_add": lambda x, of: torch._foreach_add([x, x], 1.0),
    "_foreach_add_": lambda x, of: torch._foreach_add_([x], 1.0),
    "_foreach_addcmul_": lambda x, of: torch._foreach_addcmul_([x], [x], [x]),
    "_foreach_copy_": lambda x, of: torch._foreach_copy_([x], [of(_ones(2, 3))]),
    "_foreach_mul_": lambda x, of: torch._foreach_mul_([x], [x]),
    "_foreach_zero_": lambda x, of: torch._foreach_zero_([x]),
}

_METADATA: dict[str, Callable[[torch.Tensor, Of], Any]] = {
    "as_strided_": lambda x, of: x.as_strided_((2, 2), (3, 1), 1),
    "resize_larger": lambda x, of: x.resize_(4, 3).fill_(1),
    "resize_smaller": lambda x, of: x.resize_(2),
    "set_": lambda x, of: torch.ops.aten.set_.source_Tensor(x, of(_ones(4))),
    "squeeze_": lambda x, of: x.unsqueeze_(0).squeeze_(0),
    "swapdims_": lambda x, of: x.swapdims_(0, 1),
    "t_": lambda x, of: x.t_(),
    "transpose_": lambda x, of: x.transpose_(0, 1),
    "unsqueeze_": lambda x, of: x.unsqueeze_(1),
}

_TABLE: dict[Kind, dict[str, Callable[[torch.Tensor, Of], Any]]] = {
    "view": _VIEWS,
    "functional": _FUNCTIONAL,
    "in-place": _INPLACE,
    "out": _OUT,
    "foreach": _FOREACH,
    "metadata": _METADATA,
}

OPERATIONS: tuple[Operation, ...] = tuple(
    Operation(name, kind, run) for kind, runs in _TABLE.items() for name, run in runs.items()
)
"""The whole table."""
