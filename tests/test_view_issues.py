"""Reported troubles with views that marking them, or asking of them, settles."""

from __future__ import annotations

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from view_makers import MARKED, NATIVE, below_autograd

import viewtrack as vt

Meta = vt.CreationMeta

# Native says "modified by an inplace operation" of saved tensors, "modified inplace" of views.
MODIFIED = r"modified (by an )?inplace"


def test_saved_view_of_an_intermediate_of_a_custom_function():
    """A Function saves and returns a view of its own tensor: pytorch issue 24413."""

    class ExpRow(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            work = torch.stack([x, x.exp()])
            out = vt.mark_as_view(work[1].data, work)
            ctx.save_for_backward(out)
            return out

        @staticmethod
        def backward(ctx, grad):
            (out,) = ctx.saved_tensors
            return grad * out

    x = torch.tensor([1.0, 2.0], requires_grad=True)
    y = ExpRow.apply(x)
    y.sum().backward()
    assert torch.equal(x.grad, x.detach().exp())
    y = ExpRow.apply(x)
    with torch.no_grad():
        y.clamp_(min=5)
    with pytest.raises(RuntimeError, match=MODIFIED):
        y.sum().backward()


def test_an_unpacked_tensor_in_other_memory_has_a_counter_of_its_own():
    """A pack hook that compresses: what backward gets is not what was saved."""
    leaf = torch.tensor([1.0, 2.0], requires_grad=True)
    hooks = torch.autograd.graph.saved_tensors_hooks(
        lambda t: t.to(torch.float16), lambda t: t.to(torch.float32)
    )
    with vt.track(), hooks:
        square = leaf.pow(2)
        unpacked = square.grad_fn._saved_self
        with pytest.raises(vt.AliasingError):
            vt.share_version(unpacked.detach(), leaf)
        with torch.no_grad():
            unpacked.zero_()
    assert unpacked.data_ptr() != leaf.data_ptr()
    assert vt.version(leaf) == 0


class Flip(torch.autograd.Function):
    @staticmethod
    def forward(ctx, m):
        return m.t()

    @staticmethod
    def backward(ctx, grad):
        return grad.t()


def test_view_of_a_custom_function_after_its_base_was_written():
    """Native forbids it; with a view_fn the view is derived anew: pytorch issue 73604."""
    leaf = torch.ones(2, 3, requires_grad=True)
    m = leaf + 0
    native = Flip.apply(m)
    view = vt.mark_as_view(m.detach().t().data, m, view_fn=Flip.apply)
    m.mul_(-1)
    with pytest.raises(RuntimeError, match="inside a custom Function"):
        native.sum()
    view.sum().backward()
    assert torch.equal(leaf.grad, torch.full((2, 3), -1.0))


class PassThrough(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


def under_a_mode(base, fn):
    with PassThrough():
        return fn(base)


MIDDLES = {
    "native": NATIVE,
    "mode": under_a_mode,
    "marked": MARKED,
    "below": lambda base, fn: below_autograd(lambda: vt.mark_as_view(fn(base), base)),
}


@pytest.mark.parametrize("end", MIDDLES.values(), ids=MIDDLES)
@pytest.mark.parametrize("middle", MIDDLES.values(), ids=MIDDLES)
def test_creation_meta_is_inherited_through_any_chain(middle, end):
    """A view of a multi-output view that lost the mark gave wrong gradients: pytorch 49824."""
    root = torch.rand(4, 2, requires_grad=True).sqrt()
    view = end(middle(root.split(2)[1], torch.diagonal), lambda t: t[:1])
    assert vt.view_info(view).creation_meta is Meta.MULTI_OUTPUT_NODE
    with pytest.raises(RuntimeError, match="returns multiple views"):
        view.mul_(2)
    with torch.no_grad():
        row = torch.rand(4, requires_grad=True).clone().requires_grad_().view(2, 2)
    view = end(middle(row, lambda t: t.view(4)), lambda t: t[:1])
    assert vt.view_info(view).creation_meta is Meta.NO_GRAD_MODE
    with pytest.raises(RuntimeError, match="no_grad mode"):
        view.mul_(2)
