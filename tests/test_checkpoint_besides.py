"""Ops that a policy keeps, and that write an argument besides what they return."""

from __future__ import annotations

import functools

import pytest
import torch
from torch.nn import functional as F
from torch.utils.checkpoint import CheckpointPolicy, checkpoint

from viewtrack import MutatedTensorError
from viewtrack.checkpoint import create_selective_checkpoint_contexts as ours

aten = torch.ops.aten
LIB = torch.library.Library("besides", "DEF")
LIB.define("norm(Tensor x, Tensor(a!) calls) -> Tensor")
ran = []


def norm(x, calls):
    ran.append(1)
    calls.add_(1)
    return x / x.norm()


class Norm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, calls):
        with torch._C._AutoDispatchBelowAutograd():
            return torch.ops.besides.norm(x, calls)

    @staticmethod
    def backward(ctx, g):
        return g, None


LIB.impl("norm", norm, "CPU")
LIB.impl("norm", lambda x, calls: Norm.apply(x, calls), "AutogradCPU")
KEPT = [aten.rrelu_with_noise.default, torch.ops.besides.norm.default]


def policy(ctx, op, *args, **kwargs):
    return CheckpointPolicy.MUST_SAVE if op in KEPT else CheckpointPolicy.PREFER_RECOMPUTE


each_policy = pytest.mark.parametrize("kept", [KEPT, policy], ids=["list", "policy"])
each_level = pytest.mark.parametrize("check", ["storage", "content", "off"])


def gradient(region, context_fn=None):
    torch.manual_seed(0)
    x = torch.randn(4, 6, requires_grad=True)
    if context_fn is None:
        region(x).sum().backward()
    else:
        checkpoint(region, x, use_reentrant=False, context_fn=context_fn).sum().backward()
    return x.grad


@each_policy
@each_level
def test_what_the_recompute_makes_anew_is_written_anew(kept, check):
    """Torch leaves the noise as the memory happens to be, and the gradient is that."""

    def region(x):
        return F.rrelu(x * 2, training=True).sin()

    contexts = functools.partial(ours, kept, check=check)
    assert torch.equal(gradient(region, contexts), gradient(region))


@each_policy
@each_level
def test_what_is_there_already_is_written_once(kept, check):
    def region(x):
        return torch.ops.besides.norm(x * 2, calls).sin()

    calls = torch.zeros(())
    ran.clear()
    guarded = gradient(region, functools.partial(ours, kept, check=check))
    assert calls == len(ran) == 1
    assert torch.equal(guarded, gradient(region))


@each_policy
def test_a_write_to_what_is_handed_out_is_told(kept):
    def region(x):
        h = torch.ops.besides.norm(x * 2, calls)
        return h.mul_(2).sin()

    calls = torch.zeros(())
    with pytest.raises(MutatedTensorError) as caught:
        gradient(region, functools.partial(ours, kept))
    assert caught.value.saved.op == "besides.norm.default"
    assert [write.op for write in caught.value.writes] == ["aten.mul_.Tensor"]


@each_policy
def test_a_write_to_what_is_made_anew_is_none(kept):
    def region(x):
        return F.rrelu(x * 2, training=True).mul_(2).sin()

    assert torch.equal(gradient(region, functools.partial(ours, kept)), gradient(region))
