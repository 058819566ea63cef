"""gradcheck and gradgradcheck, in both modes, through marked views and writes to either side."""

from __future__ import annotations

import pytest
import torch
from torch.autograd import gradcheck, gradgradcheck
from view_makers import bare_alias, every_maker

import viewtrack as vt


def through(make, fn, write):
    """A function of x by way of a view of an intermediate, with in-place ops in between."""

    def function(x):
        base = x.sin()
        view = make(base, fn)
        if "view" in write:
            view.mul_(x.abs().sum() * 0.3 + 2)
        if "base" in write:
            base.mul_(x.cos())
        if "again" in write:
            view.exp_()
        return view * 2, base * base

    return function


def check(function, *inputs):
    assert gradcheck(function, inputs, check_forward_ad=True, check_undefined_grad=False)
    assert gradgradcheck(
        function, inputs, check_fwd_over_rev=True, check_rev_over_rev=True, atol=1e-4
    )


def sample(dtype):
    generator = torch.Generator().manual_seed(0)
    return torch.randn(3, 2, dtype=dtype, generator=generator).requires_grad_()


WRITES = [(), ("view",), ("base",), ("view", "base", "again")]
FUNCTIONS = {
    "select": (torch.double, lambda t: t[1]),
    "transpose": (torch.double, lambda t: t.t()[1:]),
    "view_as_complex": (torch.double, torch.view_as_complex),
    "view_as_real": (torch.cdouble, torch.view_as_real),
    "conj": (torch.cdouble, lambda t: t[1:].conj()),
}


@every_maker
@pytest.mark.parametrize("write", WRITES, ids=lambda write: "+".join(write) or "none")
@pytest.mark.parametrize(("dtype", "fn"), FUNCTIONS.values(), ids=FUNCTIONS)
def test_through_a_view(make, write, dtype, fn):
    check(through(make, fn, write), sample(dtype))


class Flip(torch.autograd.Function):
    """A transpose by a custom Function, whose own formulas are what is checked."""

    @staticmethod
    def forward(t):
        return t.t()

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    @staticmethod
    def backward(ctx, grad):
        return grad.t()

    @staticmethod
    def jvp(ctx, tangent):
        return tangent.t()


def flipped(base, _fn):
    alias = bare_alias(base, lambda t: t.t())
    return vt.mark_as_view(alias, base, view_fn=Flip.apply)


@pytest.mark.parametrize("write", WRITES, ids=lambda write: "+".join(write) or "none")
def test_through_a_view_by_a_custom_function(write):
    check(through(flipped, None, write), sample(torch.double))


class Doubled(torch.autograd.Function):
    """The right view, with a backward that is wrong by a factor."""

    @staticmethod
    def forward(ctx, base):
        ctx.shape = base.shape
        return base[1]

    @staticmethod
    def backward(ctx, grad):
        full = torch.zeros(ctx.shape, dtype=grad.dtype)
        full[1] = 2 * grad
        return full


def test_a_wrong_view_fn_is_caught_by_gradcheck():
    """The check itself can fail."""

    def wrong(base, _fn):
        alias = bare_alias(base, lambda t: t[1])
        return vt.mark_as_view(alias, base, view_fn=Doubled.apply)

    with pytest.raises(RuntimeError, match="Jacobian mismatch"):
        gradcheck(through(wrong, None, ("base",)), sample(torch.double))
