"""Make a tensor a view of another, above autograd and in a handler, and ask what it is.

    python examples/mark_as_view.py

Autograd knows nothing of an alias that was made by hand, or below autograd. `mark_as_view` tells
it, in place: from then on an in-place op on either tensor reaches the gradients of the other.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

import viewtrack as vt


class Scale(torch.autograd.Function):
    """A view whose gradient is scaled: no ATen op has this backward."""

    @staticmethod
    def forward(ctx: Any, base: torch.Tensor) -> torch.Tensor:
        return base.view_as(base)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad * 10


def alias(base: torch.Tensor) -> torch.Tensor:
    """A tensor in base's memory that autograd knows nothing of."""
    return torch.empty(0).set_(base.untyped_storage(), 0, base.shape, base.stride())


def by_hand() -> None:
    x = torch.ones(4, requires_grad=True)
    base = x * 1
    t = vt.mark_as_view(alias(base), base, view_fn=Scale.apply)
    base.mul_(2)  # t's gradient is made anew, by its view_fn
    t.sum().backward()
    print("gradient through a scaling view_fn:", x.grad.tolist())
    print(vt.explain(t))


class Keep(TorchDispatchMode):
    """Keeps the upper half of what each `mm` returns, as a view that autograd knows."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.mm.default:
            # with_tracking: one call whose result is a real view, also below autograd.
            self.half = vt.with_tracking(torch.Tensor.narrow)(out, 0, 0, 2)
            # share_version: the counter alone, for a tensor that is to carry no metadata.
            self.whole = vt.share_version(alias(out), out)
        return out


def in_a_handler() -> None:
    with Keep() as mode:
        h = torch.ones(4, 4) @ torch.ones(4, 4)
    h.add_(1)
    info = vt.view_info(mode.half)
    print("kept below autograd: base is the result:", info is not None and info.base is h)
    print("versions:", vt.version(h), vt.version(mode.half), vt.version(mode.whole))


if __name__ == "__main__":
    by_hand()
    in_a_handler()
