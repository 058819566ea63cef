"""The worked examples of NOTE [ Autograd View Variables ] in torch/csrc/autograd/variable.h.

Each is run with native views, with views that `mark_as_view` marks above or below autograd, and
with views made below autograd under `track()`: same values, same errors. The native maker keeps
the expectations honest.
"""

from __future__ import annotations

import pytest
import torch
import torch.autograd.forward_ad as fwAD
from view_makers import (
    VIEW_OF_LEAF,
    bare_alias,
    below_autograd,
    every_maker,
    share_a_counter,
)

import viewtrack as vt


def second_row(t):
    return t[1]


def rows(fill):
    """The gradient that reaches a (2, 3) base when only its second row is used."""
    return torch.tensor([[0.0] * 3, [fill] * 3])


# Backward mode


@every_maker
def test_backward_1_write_to_view(make):
    base = torch.zeros(2, 3)
    var = torch.arange(3.0).requires_grad_()
    view = make(base, second_row)
    view.copy_(var)
    assert base.requires_grad
    assert base.grad_fn.name().endswith("CopySlices")
    assert torch.equal(base.detach()[1], var.detach())
    (grad,) = torch.autograd.grad(base.sum(), var)
    assert torch.equal(grad, torch.ones(3))


@every_maker
def test_backward_1_keeps_the_other_rows_of_base(make):
    leaf = torch.ones(2, 3, requires_grad=True)
    base = leaf * 2
    var = torch.ones(3, requires_grad=True)
    make(base, second_row).copy_(var)
    grads = torch.autograd.grad((base * 5).sum(), (leaf, var))
    assert torch.equal(grads[0], torch.tensor([[10.0] * 3, [0.0] * 3]))
    assert torch.equal(grads[1], torch.full((3,), 5.0))


@every_maker
def test_backward_2_write_to_base(make):
    base = torch.zeros(2, 3)
    var = torch.arange(6.0).view(2, 3).requires_grad_()
    view = make(base, second_row)
    base.copy_(var)
    assert view.requires_grad
    assert torch.equal(view.detach(), var.detach()[1])
    (grad,) = torch.autograd.grad(view.sum(), var)
    assert torch.equal(grad, rows(1.0))


@every_maker
def test_backward_write_to_one_view_is_seen_by_another(make):
    base = torch.zeros(2, 3)
    var = torch.ones(3, requires_grad=True)
    early = make(base, lambda t: t[:, 0])
    make(base, second_row).copy_(var)
    (grad,) = torch.autograd.grad(early.sum(), var)
    assert torch.equal(grad, torch.tensor([1.0, 0.0, 0.0]))


@every_maker
def test_grad_fn_is_regenerated_only_when_the_counter_moved(make):
    leaf = torch.ones(2, 3, requires_grad=True)
    base = leaf * 1
    view = make(base, second_row)
    before = view.grad_fn
    assert view.grad_fn is before
    base.mul_(3)
    after = view.grad_fn
    assert after is not before
    assert view.grad_fn is after
    view.sum().backward()
    assert torch.equal(leaf.grad, rows(3.0))


@every_maker
def test_view_of_a_leaf_that_requires_grad_is_not_writable(make):
    leaf = torch.ones(2, 3, requires_grad=True)
    view = make(leaf, second_row)
    with pytest.raises(RuntimeError, match=VIEW_OF_LEAF):
        view.mul_(2)
    assert leaf._version == 0


# Forward mode


@every_maker
def test_forward_1_write_to_view(make):
    with fwAD.dual_level():
        base = torch.zeros(2, 3)
        view = make(base, second_row)
        view.copy_(fwAD.make_dual(torch.ones(3), torch.ones(3)))
        assert torch.equal(fwAD.unpack_dual(base).tangent, rows(1.0))
        assert torch.equal(fwAD.unpack_dual(view).tangent, torch.ones(3))


@every_maker
def test_forward_2_write_to_base(make):
    with fwAD.dual_level():
        base = torch.zeros(2, 3)
        view = make(base, second_row)
        base.copy_(fwAD.make_dual(torch.ones(2, 3), torch.ones(2, 3)))
        assert torch.equal(fwAD.unpack_dual(view).tangent, torch.ones(3))


@every_maker
def test_forward_tangents_of_view_and_base_share_memory(make):
    tangent = torch.arange(6.0).view(2, 3)
    with fwAD.dual_level():
        base = fwAD.make_dual(torch.zeros(2, 3), tangent.clone()) * 1
        view = make(base, second_row)
        assert torch.equal(fwAD.unpack_dual(view).tangent, tangent[1])
        view.mul_(2)
        assert torch.equal(fwAD.unpack_dual(base).tangent, tangent * torch.tensor([[1.0], [2.0]]))
        base.mul_(5)
        assert torch.equal(fwAD.unpack_dual(view).tangent, tangent[1] * 10)


# Two bases


@every_maker
def test_two_bases_of_a_view_of_an_unpacked_primal(make):
    """Where native still has two bases: unpack_dual is a backward view and no forward view."""
    with fwAD.dual_level():
        dual = fwAD.make_dual(torch.zeros(2, 3), torch.ones(2, 3))
        primal = fwAD.unpack_dual(dual).primal
        view = make(primal, second_row)
        assert view._base is primal._base
        view.copy_(fwAD.make_dual(torch.zeros(3), torch.full((3,), 7.0)))
        assert torch.equal(fwAD.unpack_dual(primal).tangent, rows(7.0))
        assert torch.equal(fwAD.unpack_dual(dual).tangent, torch.ones(2, 3))


@every_maker
def test_two_bases_example_with_todays_detach(make):
    """The NOTE's dual.detach() was a forward view once; today it is a view of no kind."""
    with fwAD.dual_level():
        dual = fwAD.make_dual(torch.zeros(3), torch.ones(3)) * 1
        detached_dual = dual.detach()
        view = make(detached_dual, lambda t: t.view_as(dual))
        assert view._base is detached_dual
        assert fwAD.unpack_dual(view).tangent is None
        assert share_a_counter(view, dual)


def test_two_bases_example_with_a_forward_only_detach():
    """The example as it stands, with detach the forward, not backward, view that it was once."""
    with fwAD.dual_level():
        dual = fwAD.make_dual(torch.zeros(3), torch.ones(3)) * 1
        detached_dual = vt.mark_as_view(dual.detach().data, dual, False, True)
        view = detached_dual.view_as(dual)
        assert view._base is detached_dual
        assert torch.equal(fwAD.unpack_dual(view).tangent, torch.ones(3))
        assert share_a_counter(view, dual)


# Non-differentiable views


def test_detach_shares_the_counter():
    base = torch.ones(2, 3, requires_grad=True) * 2
    native = base.detach()
    assert share_a_counter(native, base)
    ours = vt.mark_as_view(base.detach().data, base, False, False)
    for view in (native, ours):
        assert share_a_counter(view, base)
        assert not view._is_view()
        assert not view.requires_grad


def test_write_through_a_non_differentiable_view_spoils_what_was_saved():
    leaf = torch.ones(3, requires_grad=True)
    saved = leaf.exp()
    loss = saved.exp().sum()
    vt.share_version(saved.detach().data, saved).zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def coo():
    return torch.eye(3).to_sparse().coalesce()


def csr():
    return torch.eye(3).to_sparse_csr()


SPARSE_PARTS = [
    (coo, "indices"),
    (coo, "_indices"),
    (coo, "_values"),
    (csr, "crow_indices"),
    (csr, "col_indices"),
]


@pytest.mark.parametrize(("layout", "part"), SPARSE_PARTS)
def test_sparse_parts_share_the_counter(layout, part):
    base = layout()
    native = getattr(base, part)()
    ours = vt.mark_as_view(native.data, base, False, False)
    with vt.track():
        below = below_autograd(lambda: getattr(base, part)())
    for view in (native, ours, below):
        assert share_a_counter(view, base)
        assert not view._is_view()
        written = base._version
        view.mul_(1)
        assert base._version == written + 1


def test_views_made_below_autograd_share_the_counter_at_once():
    base = torch.zeros(2, 3)
    with vt.track():
        view = below_autograd(lambda: base[1])
    assert share_a_counter(view, base)
    assert not share_a_counter(bare_alias(base, second_row), base)
