"""Custom ops, against ops of the same body that torch.library makes with fewer kernels."""

from __future__ import annotations

import torch

from benchmarks.registry import Side, pair
from viewtrack import library

_stock = torch.library.Library("vtbench_stock", "DEF")
_stock.define("head(Tensor(a) x, int n) -> Tensor(a)")
_stock.impl("head", lambda x, n: x[:n], "CompositeImplicitAutograd")


@torch.library.custom_op("vtbench_stock::add_", mutates_args=("x",))
def _stock_add(x: torch.Tensor, y: torch.Tensor) -> None:
    x.add_(y)


_head = library.view_op("vtbench::head(Tensor(a) x, int n) -> Tensor(a)", lambda x, n: x[:n])
_add = library.inplace_op(
    "vtbench::add_(Tensor(a!) x, Tensor y) -> Tensor(a!)", lambda x, y: x.add_(y)
)


@pair("custom view op", target=15, note="against CompositeImplicitAutograd, which modes do not see")
def _view() -> tuple[Side, Side]:
    x = torch.ones(4, 4)
    return Side(_head.op, (x, 2)), Side(torch.ops.vtbench_stock.head.default, (x, 2))


@pair("custom view op, base requires grad", target=15, note="as above")
def _recorded_view() -> tuple[Side, Side]:
    x = torch.ones(4, 4, requires_grad=True) * 1
    return Side(_head.op, (x, 2)), Side(torch.ops.vtbench_stock.head.default, (x, 2))


@pair("custom in-place op", target=3, note="against torch.library.custom_op, which looks at less")
def _inplace() -> tuple[Side, Side]:
    x, y = torch.ones(4, 4), torch.ones(4, 4)
    return Side(_add.op, (x, y)), Side(_stock_add, (x, y))
