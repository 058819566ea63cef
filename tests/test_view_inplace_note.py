"""NOTE [ View + Inplace detection ] in torch/csrc/autograd/variable.h: writes that are refused.

The cases in which a view was created in a mode or by a node that forbids in-place ops, by native
views, by marked views and by views made below autograd: refused alike, in the same words.
"""

from __future__ import annotations

import re

import pytest
import torch
from view_makers import (
    CUSTOM_FUNCTION,
    INDIRECT,
    INFERENCE,
    MULTI_OUTPUT,
    NATIVE,
    NO_GRAD,
    NO_GRAD_INDIRECT,
    every_maker,
    our_makers,
)

import viewtrack as vt


def second_row(t):
    return t[1]


def rows(fill):
    """The gradient that reaches a (2, 3) base when only its second row is used."""
    return torch.tensor([[0.0] * 3, [fill] * 3])


# Interaction with GradMode


@every_maker
@pytest.mark.parametrize("requires_grad", [False, True])
def test_no_grad_view_then_write_is_forbidden(make, requires_grad):
    base = torch.zeros(2, 3, requires_grad=requires_grad)
    with torch.no_grad():
        view = make(base, second_row)
    base.requires_grad_()
    with pytest.raises(RuntimeError, match=NO_GRAD):
        view.copy_(torch.ones(3, requires_grad=True))
    assert base._version == 0


@every_maker
def test_no_grad_view_is_forbidden_after_a_write_to_base(make):
    base = torch.zeros(2, 3)
    with torch.no_grad():
        view = make(base, second_row)
    base.copy_(torch.ones(2, 3, requires_grad=True))
    with pytest.raises(RuntimeError, match=NO_GRAD_INDIRECT):
        view.grad_fn  # noqa: B018


@every_maker
def test_no_grad_view_may_be_written_under_no_grad(make):
    leaf = torch.ones(2, 3, requires_grad=True)
    base = leaf * 2
    with torch.no_grad():
        view = make(base, second_row)
        view.copy_(torch.full((3,), 4.0))
    base.sum().backward()
    assert torch.equal(leaf.grad, torch.full((2, 3), 2.0))
    assert torch.equal(base.detach()[1], torch.full((3,), 4.0))


@every_maker
def test_grad_mode_view_may_be_written_under_no_grad(make):
    leaf = torch.ones(2, 3, requires_grad=True)
    base = leaf * 2
    view = make(base, second_row)
    with torch.no_grad():
        view.zero_()
    (view * 3).sum().backward()
    assert torch.equal(leaf.grad, rows(6.0))


# MULTI_OUTPUT_NODE


def multi_output_view(make, base):
    if make is NATIVE:
        return base.unbind(0)[1]
    return make(base, second_row, vt.CreationMeta.MULTI_OUTPUT_NODE)


@every_maker
def test_multi_output_view_is_not_writable(make):
    leaf = torch.ones(2, 3, requires_grad=True)
    base = leaf * 2
    view = multi_output_view(make, base)
    with pytest.raises(RuntimeError, match=MULTI_OUTPUT):
        view.mul_(2)
    view.sum().backward()
    assert torch.equal(leaf.grad, rows(2.0))


@every_maker
def test_multi_output_view_is_forbidden_after_a_write_to_base(make):
    base = torch.ones(2, 3, requires_grad=True) * 2
    view = multi_output_view(make, base)
    base.mul_(2)
    with pytest.raises(RuntimeError, match=f"{INDIRECT}.*{MULTI_OUTPUT}"):
        view.grad_fn  # noqa: B018


@every_maker
def test_multi_output_view_of_a_base_without_grad(make):
    view = multi_output_view(make, torch.zeros(2, 3))
    view.mul_(2)
    with pytest.raises(RuntimeError, match=MULTI_OUTPUT):
        view.mul_(torch.ones(3, requires_grad=True))


# IN_CUSTOM_FUNCTION


class TripledRow(torch.autograd.Function):
    """A view with a backward of its own, which replaying the view would lose."""

    @staticmethod
    def forward(ctx, t):
        return t[1]

    @staticmethod
    def backward(ctx, grad):
        out = grad.new_zeros(2, 3)
        out[1] = grad * 3
        return out


def custom_function_view(make, base):
    if make is NATIVE:
        return TripledRow.apply(base)
    return make(base, second_row, vt.CreationMeta.IN_CUSTOM_FUNCTION)


@every_maker
def test_custom_function_view_is_not_writable(make):
    base = torch.ones(2, 3, requires_grad=True) * 2
    view = custom_function_view(make, base)
    with pytest.raises(RuntimeError, match=CUSTOM_FUNCTION):
        view.mul_(2)


@every_maker
def test_custom_function_view_is_forbidden_after_a_write_to_base(make):
    base = torch.ones(2, 3, requires_grad=True) * 2
    view = custom_function_view(make, base)
    base.mul_(2)
    with pytest.raises(RuntimeError, match=f"{INDIRECT}.*{CUSTOM_FUNCTION}"):
        view.grad_fn  # noqa: B018


# INFERENCE_MODE


@every_maker
def test_view_of_a_normal_tensor_made_in_inference_mode(make):
    base = torch.zeros(2, 3)
    with torch.inference_mode():
        view = make(base, second_row)
        view.add_(1)
    assert torch.equal(base, rows(1.0))
    assert base._version == 1
    with pytest.raises(RuntimeError, match=INFERENCE):
        view.copy_(torch.ones(3, requires_grad=True))


@every_maker
def test_view_of_an_inference_tensor_is_no_view(make):
    with torch.inference_mode():
        base = torch.zeros(2, 3)
    view = make(base, second_row)
    assert not view._is_view()
    assert view._base is None
    assert view.data_ptr() == base.data_ptr() + 3 * base.element_size()


# The words of the errors


FORBIDDEN = {
    "no_grad": vt.CreationMeta.NO_GRAD_MODE,
    "inference": vt.CreationMeta.INFERENCE_MODE,
    "multi_output": vt.CreationMeta.MULTI_OUTPUT_NODE,
    "custom_function": vt.CreationMeta.IN_CUSTOM_FUNCTION,
}


def native_view(meta, base):
    if meta is vt.CreationMeta.NO_GRAD_MODE:
        with torch.no_grad():
            return base[1]
    if meta is vt.CreationMeta.INFERENCE_MODE:
        with torch.inference_mode():
            return base[1]
    if meta is vt.CreationMeta.MULTI_OUTPUT_NODE:
        return base.unbind(0)[1]
    return TripledRow.apply(base)


def refusal(view):
    """The error of a write, less the name and output number of the node, which differ."""
    with pytest.raises(RuntimeError) as caught:
        view.mul_(torch.ones(3, requires_grad=True))
    return re.sub(r"Output \d of \w+ ", "Output of NODE ", str(caught.value))


@our_makers
@pytest.mark.parametrize("meta", FORBIDDEN.values(), ids=FORBIDDEN)
def test_refusals_read_as_native_ones_do(make, meta):
    base = torch.zeros(2, 3)
    expected = refusal(native_view(meta, base))
    assert refusal(make(base, second_row, meta)) == expected
