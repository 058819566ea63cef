"""`mark_as_view` draws the very relation that native PyTorch draws, row by row of its table."""

from __future__ import annotations

import re
import threading

import pytest
import torch
import torch.autograd.forward_ad as fwAD
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from view_makers import (
    MARKED,
    NATIVE,
    OURS,
    bare_alias,
    below_autograd,
    every_maker,
    our_makers,
    share_a_counter,
)

import viewtrack as vt

# In place, on the same object


@our_makers
def test_base_keeps_its_version_and_the_view_takes_it(make):
    base = torch.zeros(4)
    base.add_(1).add_(1).add_(1)
    view = make(base, lambda t: t[1:])
    assert base._version == 3
    assert view._version == 3
    assert share_a_counter(view, base)


@pytest.mark.parametrize("where", [lambda body: body(), below_autograd], ids=["above", "below"])
@pytest.mark.parametrize("flags", [(True, True), (True, False), (False, True), (False, False)])
def test_returns_the_very_object_and_changes_no_byte_of_it(where, flags):
    base = torch.arange(6.0).requires_grad_() * 2
    t = bare_alias(base, lambda b: b.view(2, 3).t())
    t.mul_(1)  # a counter that ran on its own
    seen = id(t), t.data_ptr(), t.size(), t.stride(), t.storage_offset(), t.tolist()
    version = base._version
    marked = where(lambda: vt.mark_as_view(t, base, *flags))
    assert marked is t
    assert (id(t), t.data_ptr(), t.size(), t.stride(), t.storage_offset(), t.tolist()) == seen
    assert base._version == version == t._version
    assert share_a_counter(t, base)


def test_what_was_saved_of_base_is_still_good_after_marking():
    leaf = torch.ones(3, requires_grad=True)
    base = leaf.exp()
    vt.mark_as_view(base.detach().data, base, view_fn=lambda b: b.view(3))
    base.sum().backward()
    assert torch.equal(leaf.grad, leaf.detach().exp())


def test_marking_in_a_thread_and_using_the_view_in_another():
    leaf = torch.ones(2, 3, requires_grad=True)
    base = leaf * 2
    views = []
    thread = threading.Thread(
        target=lambda: views.append(make_view_fn(base)),
    )
    thread.start()
    thread.join()
    base.mul_(5)
    views[0].sum().backward()
    assert torch.equal(leaf.grad, torch.tensor([[0.0] * 3, [10.0] * 3]))


def make_view_fn(base):
    return vt.mark_as_view(base.detach()[1].data, base, view_fn=lambda b: b[1])


class Log(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen.append(str(func))
        return func(*args, **(kwargs or {}))


class LogFunctions(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


def test_other_modes_on_the_stack_see_no_op_and_change_nothing():
    base = torch.ones(2, 3, requires_grad=True) * 2
    alias = bare_alias(base, lambda t: t[1])
    with LogFunctions(), Log() as log:
        vt.mark_as_view(alias, base)
    assert log.seen == []
    assert alias._base is base
    assert alias.grad_fn.name() == "AsStridedBackward0"


# Every geometry, by the outcome of the same story


def outcome(story, *args):
    """What a story returns, or the kind of its error without the names of nodes."""
    try:
        return story(*args)
    except RuntimeError as error:
        return type(error), re.sub(r"Output \d of \w+ ", "Output of NODE ", str(error))


def assert_same(ours, native):
    if isinstance(native, torch.Tensor):
        torch.testing.assert_close(ours, native, rtol=0, atol=0)
    elif isinstance(native, (list, tuple)):
        assert len(ours) == len(native)
        for one, other in zip(ours, native, strict=True):
            assert_same(one, other)
    else:
        assert ours == native


def read(make, fn, x):
    """Gradient through the view as it was marked."""
    leaf = x.clone().requires_grad_()
    base = leaf * 2
    view = make(base, fn)
    weight = torch.arange(1.0, view.numel() + 1, dtype=view.dtype).view(view.shape)
    (grad,) = torch.autograd.grad((view * weight).sum().abs(), leaf)
    return view.detach().clone(), grad


def write_view(make, fn, x):
    """Gradient and values after an in-place op on the view."""
    leaf = x.clone().requires_grad_()
    base = leaf * 2
    view = make(base, fn)
    view.mul_(view.detach() + 3)
    weight = torch.arange(1.0, base.numel() + 1, dtype=base.dtype).view(base.shape)
    (from_base,) = torch.autograd.grad((base * weight).sum().abs(), leaf, retain_graph=True)
    (from_view,) = torch.autograd.grad((view * view).sum().abs(), leaf)
    return base.detach(), view.detach().clone(), from_base, from_view, base._version


def write_base(make, fn, x):
    """Gradient and values after an in-place op on the base."""
    leaf = x.clone().requires_grad_()
    base = leaf * 2
    view = make(base, fn)
    base.mul_(base.detach() + 3)
    (grad,) = torch.autograd.grad((view * view).sum().abs(), leaf)
    return base.detach(), view.detach().clone(), grad, view._version


def write_both_twice(make, fn, x):
    """Views and base written in turns, a second view of the view besides."""
    leaf = x.clone().requires_grad_()
    base = leaf * 2
    view = make(base, fn)
    other = view.view_as(view)
    view.mul_(2)
    base.mul_(3)
    other.mul_(5)
    grads = [torch.autograd.grad(t.sum().abs(), leaf, retain_graph=True)[0] for t in (view, base)]
    return *grads, view._base is base, other._base is base


STORIES = (read, write_view, write_base, write_both_twice)

real = torch.arange(12.0, dtype=torch.double).view(3, 4) / 7 + 1
conjugated = torch.complex(real, real * 2 - 3)

GEOMETRIES = {
    "select": (real, lambda t: t[1]),
    "scalar": (real, lambda t: t[1, 2]),
    "narrow": (real, lambda t: t.narrow(1, 1, 2)),
    "steps": (real, lambda t: t[:, ::2]),
    "transpose": (real, lambda t: t.t()),
    "permute": (real.view(3, 2, 2), lambda t: t.permute(2, 0, 1)),
    "diagonal": (real, lambda t: t.diagonal(1)),
    "view": (real, lambda t: t.view(2, 6)),
    "alias": (real, lambda t: t.view_as(t)),
    "unsqueeze": (real, lambda t: t.unsqueeze(1)),
    "empty": (real, lambda t: t[1:1]),
    "expand": (real[:1], lambda t: t.expand(3, 4)),
    "unfold": (real, lambda t: t.unfold(1, 2, 1)),
    "as_strided": (real, lambda t: t.as_strided((2, 2), (5, 1), 3)),
    "chain": (real, lambda t: t.t()[1:].diagonal()),
}


@our_makers
@pytest.mark.parametrize("story", STORIES)
@pytest.mark.parametrize(("x", "fn"), GEOMETRIES.values(), ids=GEOMETRIES)
def test_strided_views(make, story, x, fn):
    assert_same(outcome(story, make, fn, x), outcome(story, NATIVE, fn, x))


REINTERPRETED = {
    "view_as_real": (conjugated, torch.view_as_real),
    "view_as_complex": (real.view(6, 2), torch.view_as_complex),
    "complex_of_flat": (real.flatten(), lambda t: torch.view_as_complex(t[2:10].view(2, 2, 2))[1]),
    "real": (conjugated, lambda t: t.real),
    "imag": (conjugated, lambda t: t.imag),
    "conj": (conjugated, lambda t: t.conj()),
    "conj_of_slice": (conjugated, lambda t: t[1].conj()),
    "neg": (real, lambda t: torch.view_as_complex(t.view(6, 2)).conj().imag),
    "real_of_complex_of_real": (
        real.view(6, 2),
        lambda t: torch.view_as_real(torch.view_as_complex(t)[1:]),
    ),
}


@our_makers
@pytest.mark.parametrize("story", STORIES)
@pytest.mark.parametrize(("x", "fn"), REINTERPRETED.values(), ids=REINTERPRETED)
def test_complex_real_conj_and_neg_views(make, story, x, fn):
    assert_same(outcome(story, make, fn, x), outcome(story, NATIVE, fn, x))


@our_makers
def test_base_with_an_offset_and_strides_of_its_own(make):
    def story(make):
        leaf = torch.arange(12.0).requires_grad_()
        slab = torch.zeros(20)
        base = slab[3:15].view(3, 4).t().detach()  # no view any more, and not at offset 0
        base.copy_(leaf.view(3, 4).t())
        view = make(base, lambda t: t[1:, 2])
        view.mul_(3)
        base.mul_(2)
        return torch.autograd.grad(view.sum() + base.sum(), leaf)

    assert_same(story(make), story(NATIVE))


# grad_fn


@pytest.mark.parametrize("make", [MARKED, *OURS[2:3], OURS[4]], ids=lambda maker: maker.name)
def test_grad_fn_is_as_strided_of_the_geometry_at_once(make):
    base = torch.ones(2, 3, requires_grad=True) * 2
    view = make(base, lambda t: t[1])
    assert view.requires_grad
    assert view.grad_fn.name() == "AsStridedBackward0"
    assert view.grad_fn.next_functions == ((base.grad_fn, 0),)


@pytest.mark.parametrize("make", [OURS[1], OURS[3]], ids=lambda maker: maker.name)
def test_grad_fn_is_that_of_view_fn_at_once(make):
    base = torch.ones(2, 3, requires_grad=True) * 2
    view = make(base, lambda t: t[1])
    assert view.grad_fn.name() == "SelectBackward0"
    assert view.grad_fn.next_functions == ((base.grad_fn, 0),)
    base.mul_(2)
    assert view.grad_fn.name() == "SelectBackward0"
    assert view.grad_fn.next_functions == ((base.grad_fn, 0),)


@pytest.mark.parametrize("make", [OURS[1], OURS[3]], ids=lambda maker: maker.name)
def test_grad_fn_goes_through_a_base_that_is_a_view(make):
    """Behind an alias until a write, so that the base's own grad_fn stays in the path."""
    base = (torch.ones(2, 3, requires_grad=True) * 2).view(3, 2)
    view = make(base, lambda t: t[1])
    ((replayed, _),) = view.grad_fn.next_functions
    assert replayed.name() == "SelectBackward0"
    assert replayed.next_functions == ((base.grad_fn, 0),)


@our_makers
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_creation_meta_is_the_callers_choice_whatever_the_mode(make, mode):
    """As in C++, where as_view is told and does not look: a view that may be written, and flows."""
    leaf = torch.ones(2, 3, requires_grad=True)
    base = leaf * 2
    with mode():
        view = make(base, lambda t: t[1], vt.CreationMeta.DEFAULT)
    assert view.grad_fn is not None
    view.mul_(3)
    view.sum().backward()
    assert torch.equal(leaf.grad, torch.tensor([[0.0] * 3, [6.0] * 3]))


@every_maker
def test_base_that_requires_no_grad_gives_no_grad_fn(make):
    base = torch.zeros(2, 3)
    view = make(base, lambda t: t[1])
    assert view._is_view()
    assert view._base is base
    assert not view.requires_grad
    assert view.grad_fn is None
    base.requires_grad_()
    assert view.requires_grad


@every_maker
def test_hooks_and_retained_grad_follow_the_view_over_writes(make):
    leaf = torch.ones(2, 3, requires_grad=True)
    base = leaf * 2
    view = make(base, lambda t: t[1])
    seen = []
    view.register_hook(lambda grad: seen.append(grad.clone()))
    view.retain_grad()
    base.mul_(3)
    (view * 7).sum().backward()
    assert torch.equal(view.grad, torch.full((3,), 7.0))
    assert seen == []  # registered to the grad_fn that the write made stale
    assert torch.equal(leaf.grad, torch.tensor([[0.0] * 3, [42.0] * 3]))


@every_maker
def test_double_backward(make):
    x = torch.tensor([[1.0, 2.0], [3.0, 4.0]], requires_grad=True)
    base = x**3
    view = make(base, lambda t: t[1])
    view.mul_(2)
    base.mul_(3)
    (first,) = torch.autograd.grad((view * view).sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), x)
    # view = 6 x^3, so the derivatives of its square 36 x^6 are 216 x^5 and 1080 x^4.
    assert torch.equal(first.detach(), torch.tensor([[0.0, 0.0], [216.0 * 3**5, 216.0 * 4**5]]))
    assert torch.equal(second, torch.tensor([[0.0, 0.0], [1080.0 * 3**4, 1080.0 * 4**4]]))


# Flags


def test_backward_only_view_carries_no_tangent():
    with fwAD.dual_level():
        base = fwAD.make_dual(torch.zeros(3), torch.ones(3)) * 1
        native = fwAD.unpack_dual(base).primal
        ours = vt.mark_as_view(base.detach().data, base, True, False)
        for view in (native, ours):
            assert view._is_view()
            assert view._base is (base if base._base is None else base._base)
            assert fwAD.unpack_dual(view).tangent is None
            view.copy_(fwAD.make_dual(torch.zeros(3), torch.full((3,), 5.0)))
            assert torch.equal(fwAD.unpack_dual(base).tangent, torch.ones(3))


@pytest.mark.parametrize("view_fn", [None, lambda b: b[1]], ids=["strided", "view_fn"])
def test_backward_only_view_is_a_full_backward_view(view_fn):
    leaf = torch.ones(2, 3, requires_grad=True)
    base = leaf * 2
    view = vt.mark_as_view(bare_alias(base, lambda t: t[1]), base, True, False, view_fn)
    view.mul_(3)
    base.mul_(5)
    view.sum().backward()
    assert torch.equal(leaf.grad, torch.tensor([[0.0] * 3, [30.0] * 3]))


def test_forward_only_view_has_no_backward_relation():
    base = torch.ones(2, 3, requires_grad=True) * 2
    view = vt.mark_as_view(bare_alias(base, lambda t: t[1]), base, False, True)
    assert not view._is_view()
    assert view._base is None
    assert not view.requires_grad
    assert view.grad_fn is None
    assert share_a_counter(view, base)


def test_forward_only_view_has_the_tangent_of_its_base():
    tangent = torch.arange(6.0).view(2, 3)
    with fwAD.dual_level():
        base = fwAD.make_dual(torch.zeros(2, 3), tangent.clone()) * 1
        view = vt.mark_as_view(bare_alias(base, lambda t: t[1]), base, False, True)
        assert torch.equal(fwAD.unpack_dual(view).tangent, tangent[1])
        view.mul_(2)
        assert torch.equal(fwAD.unpack_dual(base).tangent[1], tangent[1] * 2)
        base.mul_(5)
        assert torch.equal(fwAD.unpack_dual(view).tangent, tangent[1] * 10)


def test_neither_flag_shares_the_counter_and_nothing_else():
    base = torch.ones(2, 3, requires_grad=True) * 2
    view = vt.mark_as_view(bare_alias(base, lambda t: t[1]), base, False, False)
    assert not view._is_view()
    assert not view.requires_grad
    assert share_a_counter(view, base)
    view.requires_grad_()  # a leaf of its own, as after detach()
    (view * 2).sum().backward()
    assert torch.equal(view.grad, torch.full((3,), 2.0))
