"""Custom autograd Functions that several files of tests run."""

from __future__ import annotations

import torch


class Dirty(torch.autograd.Function):
    """Doubles its argument in place, and says so."""

    @staticmethod
    def forward(ctx, x):
        x.mul_(2)
        ctx.mark_dirty(x)
        return x

    @staticmethod
    def backward(ctx, g):
        return g * 2


def square_storing(store):
    """A square whose backward gives its result, and what it saved, to `store` to write."""

    class Square(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return x * x

        @staticmethod
        def backward(ctx, grad):
            (x,) = ctx.saved_tensors
            out = 2 * x * grad
            store(x, out)
            return out

    return Square
