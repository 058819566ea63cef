"""`detach_` leaves any tensor as `Tensor.detach_` leaves one that is no view."""

from __future__ import annotations

import gc
import warnings
import weakref

import pytest
import torch
from torch.autograd import forward_ad
from view_makers import below_autograd

import viewtrack as vt


def leaf():
    return torch.ones(2, 2, requires_grad=True)


def single():
    return (leaf() * 2).t()


def of_a_leaf():
    return leaf()[0]


def one_of_several():
    return (leaf() * 2).unbind()[1]


def stale():
    base = leaf() * 2
    view = base[0]
    base.mul_(3)
    return view


def stale_and_refused():
    base = leaf() * 2
    view, _ = base.unbind()
    base.mul_(3)
    return view


def made_under_no_grad():
    base = leaf() * 2
    with torch.no_grad():
        return base[0]


def without_grad():
    return torch.ones(2, 2)[0]


def marked():
    base = leaf() * 2
    return vt.mark_as_view(base.detach()[0].detach(), base, view_fn=lambda b: b[0])


def no_view():
    return leaf() * 2


MAKERS = [
    single,
    of_a_leaf,
    one_of_several,
    stale,
    stale_and_refused,
    made_under_no_grad,
    without_grad,
    marked,
    no_view,
]


@pytest.mark.parametrize("make", MAKERS)
@pytest.mark.parametrize("tracker", [None, "version", "full"])
def test_it_leaves_what_detach_returns(make, tracker):
    t = make()
    base, version, values = t._base, t._version, t.tolist()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        if tracker is None:
            out = vt.detach_(t)
        else:
            with vt.track(views=tracker):
                out = vt.detach_(t)
    assert out is t
    assert (t.requires_grad, t.grad_fn, t.is_leaf, t._is_view()) == (False, None, True, False)
    assert vt.view_info(t) is None
    assert (t._version, t.tolist()) == (version, values)
    if base is not None:
        with torch.no_grad():
            base.add_(1)  # memory and counter stay shared
        assert (t._version, t.tolist()) == (version + 1, (torch.tensor(values) + 1).tolist())
    # It is good for a new graph.
    t.requires_grad_()
    (t * 5).sum().backward()
    assert t.grad.unique().tolist() == [5]


def test_stock_refuses_views():
    with pytest.raises(RuntimeError, match="Can't detach views in-place"):
        single().detach_()


def test_no_gradient_flows_any_more():
    x = leaf()
    base = x * 2
    view = vt.detach_(base[0])
    view.mul_(10)
    base.sum().backward()
    assert base.tolist() == [[20, 20], [2, 2]]
    assert x.grad.tolist() == [[2, 2], [2, 2]]


def test_the_graph_and_the_base_are_freed():
    saved = torch.ones(2, 2)
    base = leaf() * saved
    died = [weakref.ref(base), weakref.ref(saved)]
    view = base.t()
    del base, saved
    gc.collect()
    assert died[1]() is not None
    vt.detach_(view)
    gc.collect()
    assert [ref() for ref in died] == [None, None]


def test_grad_and_hooks_stay_as_they_do_natively():
    def lived(detach, view):
        t = (leaf() * 2).view(2, 2) if view else leaf() * 2
        told = []
        t.register_hook(lambda grad: told.append(grad.sum().item()))
        t.retain_grad()
        t.sum().backward()
        detach(t)
        grad = t.grad.tolist()
        t.requires_grad_().sum().backward()
        return told, grad, t.grad.tolist()

    assert lived(vt.detach_, view=True) == lived(torch.Tensor.detach_, view=False)


def test_the_tangent_goes():
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(torch.ones(2, 2), torch.ones(2, 2))
        view = vt.detach_(dual[0])
        assert forward_ad.unpack_dual(view).tangent is None
        assert forward_ad.unpack_dual(dual).tangent is not None


def test_in_a_handler():
    view = single()
    below_autograd(lambda: vt.detach_(view))
    assert not view._is_view()
    assert not view.requires_grad


def test_in_a_transform_it_is_refused_as_natively():
    def program(detach):
        return torch.func.grad(lambda x: detach((x * 2)[0]).sum())(torch.ones(2, 2))

    with pytest.raises(RuntimeError) as stock:
        program(torch.Tensor.detach_)
    with pytest.raises(RuntimeError) as ours:
        program(vt.detach_)
    assert str(ours.value) == str(stock.value)


def test_an_inference_tensor():
    with torch.inference_mode():
        view = torch.ones(2, 2)[0]
        assert vt.detach_(view) is view


def test_a_wrapper():
    base = vt.TrackedTensor(torch.ones(2, 2)).requires_grad_() * 2
    view = vt.detach_(base[0])
    assert (view._is_view(), view.requires_grad, view.tolist()) == (False, False, [2, 2])
    with torch.no_grad():
        base.add_(1)
    assert view._version == base._version
    assert view.tolist() == [3, 3]


def test_dynamo_breaks_the_graph():
    def fn(x):
        y = (x * 2).t()
        vt.detach_(y)
        return y + 1

    x = leaf()
    assert not torch.compile(fn, backend="eager")(x).requires_grad
