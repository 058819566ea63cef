"""A raw kernel that writes in place, behind ctypes, made known to autograd.

`drop_rows_` zeroes rows of a matrix by C's `memset`. PyTorch does not see such a write: defined by
`torch.library` alone, the op overwrites a tensor that a graph has saved, and backward goes on with
what it finds there. `viewtrack.library` gives the op the kernels that native in-place ops have: the
version counter moves, so a stale graph raises, and the gradient formula applies, also where the op
writes through a view.

    python examples/custom_inplace_kernel.py
    python -m viewtrack check demo::drop_rows_ -i examples.custom_inplace_kernel
"""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor, nn

from viewtrack import library


def zero_rows(x: Tensor, rows: list[int]) -> Tensor:
    """The kernel: it works on addresses."""
    row_bytes = x.stride(0) * x.element_size()
    for row in rows:
        ctypes.memset(x.data_ptr() + row * row_bytes, 0, x.shape[1] * x.element_size())
    return x


@library.inplace_op("demo::drop_rows_(Tensor(a!) x, int[] rows) -> Tensor(a!)")
def drop_rows_(x: Tensor, rows: list[int]) -> Tensor:
    if x.dim() != 2 or x.stride(1) != 1:
        raise ValueError("drop_rows_ takes a matrix whose rows are contiguous")
    if any(not 0 <= row < x.shape[0] for row in rows):
        raise IndexError(f"drop_rows_ got rows {rows} of a matrix of {x.shape[0]}")
    return zero_rows(x, rows)


def save_rows(ctx, inputs, output) -> None:
    ctx.rows = inputs[1]


def drop_gradient(ctx, grad: Tensor):
    kept = grad.clone()
    kept[ctx.rows] = 0
    return kept, None


drop_rows_.register_autograd(drop_gradient, setup_context=save_rows)


def overwrite_what_backward_needs(drop) -> str:
    """exp saves its result; overwrite that, and ask for the gradient."""
    x = torch.ones(2, 2, requires_grad=True)
    y = x.exp()
    drop(y.detach(), [0])
    try:
        y.sum().backward()
    except RuntimeError as error:
        return "raises: " + str(error).split(":")[0]
    return f"goes on with a gradient of {x.grad[0, 0].item():.3f} where e is right"


def main() -> None:
    torch.manual_seed(0)
    stock = torch.library.Library("demo_stock", "DEF")
    stock.define("drop_rows_(Tensor(a!) x, int[] rows) -> Tensor(a!)")
    stock.impl("drop_rows_", zero_rows, "CPU")
    print("torch.library alone", overwrite_what_backward_needs(torch.ops.demo_stock.drop_rows_))
    print("viewtrack.library", overwrite_what_backward_needs(drop_rows_))

    layer = nn.Linear(3, 3)
    x = torch.randn(4, 3)
    hidden = layer(x)
    drop_rows_(hidden[1:], [0, 2])  # through a view: rows 1 and 3 of hidden
    hidden.square().sum().backward()
    ours, layer.weight.grad = layer.weight.grad, None
    kept = torch.tensor([1.0, 0.0, 1.0, 0.0])[:, None]
    (layer(x) * kept).square().sum().backward()
    print(f"gradient against a mask: {(ours - layer.weight.grad).abs().max().item():.1e}")

    def scaled(h: Tensor) -> Tensor:
        return drop_rows_(h * 2, [0]) + 1

    compiled = torch.compile(scaled, backend="aot_eager", fullgraph=True)
    print("compiled gives the same:", torch.equal(compiled(x), scaled(x)))


if __name__ == "__main__":
    main()
