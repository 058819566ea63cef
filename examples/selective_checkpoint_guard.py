"""Find out who overwrites a tensor that selective checkpointing keeps.

A small feed-forward block saves its matmuls and recomputes the rest. One activation works in place
on a saved result. The projections are bias-free and the input has three dimensions, so the result
comes through `aten._unsafe_view`, and torch's own check does not see the write: gradients are
silently wrong. The guarded contexts name both lines.

    python examples/selective_checkpoint_guard.py
"""

import functools

import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

import viewtrack as vt

SAVED = [torch.ops.aten.mm.default]


class Block(torch.nn.Module):
    def __init__(self, width: int, *, inplace: bool) -> None:
        super().__init__()
        self.up = torch.nn.Linear(width, 4 * width, bias=False)
        self.down = torch.nn.Linear(4 * width, width, bias=False)
        self.inplace = inplace

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.up(x)
        active = F.elu(hidden, alpha=2.0, inplace=self.inplace)
        return self.down(active).sin()


def gradient(context_fn, *, inplace: bool) -> torch.Tensor:
    """The gradient of the input of a checkpointed block."""
    torch.manual_seed(0)
    block, x = Block(8, inplace=inplace), torch.randn(2, 5, 8, requires_grad=True)
    checkpoint(block, x, use_reentrant=False, context_fn=context_fn).pow(2).sum().backward()
    return x.grad


def main() -> None:
    stock = functools.partial(create_selective_checkpoint_contexts, SAVED)
    guarded = functools.partial(vt.checkpoint.create_selective_checkpoint_contexts, SAVED)

    right = gradient(stock, inplace=False)
    print("guarded, without the bug: equal", torch.equal(gradient(guarded, inplace=False), right))

    difference = (gradient(stock, inplace=True) - right).abs().max() / right.abs().max()
    print(f"torch's own check, with the bug: no error, gradient off by {difference:.0%}")

    try:
        gradient(guarded, inplace=True)
    except vt.MutatedTensorError as error:
        print(f"guarded, with the bug:\n{error}")

    # The same around contexts that somebody else made.
    try:
        gradient(vt.checkpoint.guard(stock), inplace=True)
    except vt.MutatedTensorError as error:
        write = error.writes[0]
        print(f"around torch's contexts: {write.op} on line {write.lineno}")


if __name__ == "__main__":
    main()
