"""A Python view_fn is replayed by the native engine wherever the native engine replays a view."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
import torch.autograd.forward_ad as fwAD
from torch.utils._python_dispatch import TorchDispatchMode
from view_makers import bare_alias, below_autograd

import viewtrack as vt

WHERE = {"above": lambda body: body(), "below": below_autograd}
anywhere = pytest.mark.parametrize("where", WHERE.values(), ids=WHERE)


def second_row(t):
    return t[1]


def rows(fill):
    return torch.tensor([[0.0] * 3, [fill] * 3])


class Calls:
    """A view_fn that counts its replays."""

    def __init__(self, fn=second_row):
        self.fn = fn
        self.bases = []

    def __call__(self, base):
        self.bases.append((base._version, base.requires_grad))
        return self.fn(base)


class TripledRow(torch.autograd.Function):
    """A view whose backward is not that of the view: pytorch issue 73604."""

    @staticmethod
    def forward(ctx, t):
        return t[1]

    @staticmethod
    def backward(ctx, grad):
        out = grad.new_zeros(2, 3)
        out[1] = grad * 3
        return out


def mark(base, view_fn, where=WHERE["above"], **kwargs):
    alias = bare_alias(base, second_row)
    return where(lambda: vt.mark_as_view(alias, base, view_fn=view_fn, **kwargs))


def new_base():
    leaf = torch.ones(2, 3, requires_grad=True)
    return leaf, leaf * 1


# Where it is replayed


@anywhere
def test_replayed_after_a_write_to_base(where):
    leaf, base = new_base()
    fn = Calls()
    view = mark(base, fn, where)
    before = len(fn.bases)
    base.mul_(5)
    view.sum().backward()
    assert len(fn.bases) > before
    assert fn.bases[-1] == (1, True)
    assert torch.equal(leaf.grad, rows(5.0))


@anywhere
def test_replayed_in_copy_slices_after_a_write_to_view(where):
    leaf, base = new_base()
    fn = Calls()
    view = mark(base, fn, where)
    view.mul_(5)
    assert base.grad_fn.name().endswith("CopySlices")
    before = len(fn.bases)
    base.sum().backward()
    assert len(fn.bases) > before
    assert torch.equal(leaf.grad, torch.tensor([[1.0] * 3, [5.0] * 3]))


@anywhere
@pytest.mark.parametrize("requires_grad", [False, True])
def test_replayed_on_another_base_by_view_func(where, requires_grad):
    base = torch.zeros(2, 3, requires_grad=requires_grad) * 1
    fn = Calls()
    view = mark(base, fn, where)
    other = torch.arange(6.0).view(2, 3).detach().requires_grad_()
    replayed = view._view_func(other)
    assert replayed._base is other
    assert torch.equal(replayed, other[1])
    replayed.sum().backward()
    assert torch.equal(other.grad, rows(1.0))


def test_without_view_fn_view_func_replays_the_geometry():
    base = torch.zeros(2, 3)
    view = vt.mark_as_view(bare_alias(base, second_row), base)
    native = base[1]
    other = torch.arange(6.0).view(2, 3).detach()
    assert torch.equal(view._view_func(other), native._view_func(other))
    assert torch.equal(view._view_func(other), other[1])


def test_replayed_for_tangents():
    with fwAD.dual_level():
        base = torch.zeros(2, 3)
        view = mark(base, Calls(lambda t: t[1]))
        base.copy_(fwAD.make_dual(torch.ones(2, 3), torch.arange(6.0).view(2, 3)))
        assert torch.equal(fwAD.unpack_dual(view).tangent, torch.tensor([3.0, 4.0, 5.0]))


def test_not_replayed_for_a_base_that_has_no_gradient():
    base = torch.zeros(2, 3)
    fn = Calls()
    view = mark(base, fn)
    base.add_(1)
    view.add_(1)
    assert view.grad_fn is None
    assert fn.bases == []


def test_sees_the_version_that_base_has():
    _leaf, base = new_base()
    base.mul_(2)
    base.mul_(2)
    fn = Calls()
    view = mark(base, fn)
    view.grad_fn  # noqa: B018
    assert base._version == 2
    assert {version for version, _ in fn.bases} == {2}


def test_replayed_alone_while_a_mode_looks_on():
    """Other modes see the ops of view_fn, and none of the machinery that carries it."""
    seen = []

    class Log(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.append(str(func))
            return func(*args, **(kwargs or {}))

    leaf, base = new_base()
    view = mark(base, second_row)
    with Log():
        base.mul_(5)
        grad_fn = view.grad_fn
        out = view.sum()
    assert grad_fn.name() == "SelectBackward0"
    assert seen == ["aten.mul_.Tensor", "aten.select.int", "aten.sum.default"]
    out.backward()
    assert torch.equal(leaf.grad, rows(5.0))


def test_replayed_while_tracked():
    leaf, base = new_base()
    with vt.track():
        view = mark(base, TripledRow.apply)
        base.mul_(5)
        view.sum().backward()
    assert torch.equal(leaf.grad, rows(15.0))


# Its own autograd counts


@anywhere
def test_scaling_is_kept_when_base_is_written(where):
    leaf, base = new_base()
    view = mark(base, TripledRow.apply, where)
    base.mul_(5)
    view.sum().backward()
    assert torch.equal(leaf.grad, rows(15.0))


@anywhere
def test_scaling_is_kept_when_nothing_is_written(where):
    leaf, base = new_base()
    view = mark(base, TripledRow.apply, where)
    view.sum().backward()
    assert torch.equal(leaf.grad, rows(3.0))


@anywhere
def test_scaling_is_kept_when_view_is_written(where):
    leaf, base = new_base()
    view = mark(base, TripledRow.apply, where)
    view.mul_(5)
    (from_view,) = torch.autograd.grad(view.sum(), leaf, retain_graph=True)
    (from_base,) = torch.autograd.grad(base.sum(), leaf)
    assert torch.equal(from_view, rows(15.0))
    assert torch.equal(from_base, torch.tensor([[1.0] * 3, [5.0] * 3]))


def test_scaling_is_kept_for_a_base_that_gets_its_gradient_later():
    base = torch.zeros(2, 3)
    view = mark(base, TripledRow.apply)
    var = torch.ones(2, 3, requires_grad=True)
    base.copy_(var)
    view.sum().backward()
    assert torch.equal(var.grad, rows(3.0))


def test_without_view_fn_a_custom_function_has_its_scaling_lost():
    """What the mark is for: as_strided of the geometry knows nothing of the Function."""
    leaf, base = new_base()
    view = vt.mark_as_view(bare_alias(base, second_row), base)
    base.mul_(5)
    view.sum().backward()
    assert torch.equal(leaf.grad, rows(5.0))


def test_scaling_survives_double_backward():
    leaf = torch.full((2, 3), 2.0, requires_grad=True)
    base = leaf**3
    view = mark(base, TripledRow.apply)
    base.mul_(1)
    (first,) = torch.autograd.grad(view.sum(), leaf, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), leaf)
    assert torch.equal(first.detach(), rows(36.0))
    assert torch.equal(second, rows(36.0))


# Chains


@pytest.mark.parametrize("written", ["root", "middle", "end"])
@pytest.mark.parametrize("middle_fn", [None, second_row, TripledRow.apply])
@pytest.mark.parametrize("end", ["native", "marked", "view_fn"])
def test_chain_through_a_marked_view(middle_fn, end, written):
    """End views middle views root; middle scales by three where its view_fn does."""
    leaf, root = new_base()
    middle = mark(root, middle_fn)
    if end == "native":
        view = middle[1:]
    else:
        fn = (lambda t: t[1:]) if end == "view_fn" else None
        view = vt.mark_as_view(bare_alias(middle, lambda t: t[1:]), middle, view_fn=fn)
    assert view._base is root
    {"root": root, "middle": middle, "end": view}[written].mul_(5)
    (grad,) = torch.autograd.grad(view.sum(), leaf)
    scale = 15.0 if middle_fn == TripledRow.apply else 5.0
    assert torch.equal(grad, torch.tensor([[0.0] * 3, [0.0, scale, scale]]))


def test_view_fn_on_top_of_a_native_view():
    leaf, root = new_base()
    middle = root.t()
    view = vt.mark_as_view(bare_alias(middle, lambda t: t[1:]), middle, view_fn=lambda t: t[1:])
    assert view._base is root
    root.mul_(5)
    view.mul_(2)
    (grad,) = torch.autograd.grad(view.sum(), leaf)
    assert torch.equal(grad, torch.tensor([[0.0, 10.0, 10.0]] * 2))


# Its lifetime


def test_view_fn_lives_as_long_as_the_view():
    base = torch.zeros(2, 3)
    fn = Calls()
    ref = weakref.ref(fn)
    view = mark(base, fn)
    del fn
    gc.collect()
    assert ref() is not None
    view.mul_(torch.ones(3, requires_grad=True))
    assert view.grad_fn is not None
    del view
    base.detach_()  # lets go of CopySlices, which replays it too
    gc.collect()
    assert ref() is None


def test_a_refused_mark_keeps_nothing():
    _leaf, base = new_base()
    fn = Calls(lambda t: t[0, 0])
    ref = weakref.ref(fn)
    alias = bare_alias(base, second_row)
    try:
        view = vt.mark_as_view(alias, base, view_fn=fn)
        view.grad_fn  # noqa: B018
    except vt.ViewTrackError:
        pass
    del fn, alias
    view = None
    gc.collect()
    assert ref() is None
    assert base._version == 0


# What it may not do


WRONG = {
    "shape": (lambda t: t[1, 1:], "torch.float32[2]"),
    "dtype": (lambda t: t[1].view(torch.int32), "torch.int32[3]"),
    "no_tensor": (lambda t: None, "NoneType"),
    "copy": (lambda t: t[1].clone(), "copy"),
    "itself": (lambda t: t, ""),
}


@pytest.mark.parametrize(("fn", "says"), WRONG.values(), ids=WRONG)
def test_wrong_result_is_named_at_the_first_replay(fn, says):
    var = torch.ones(2, 3, requires_grad=True)
    base = torch.zeros(2, 3)
    view = mark(base, fn)  # nothing is replayed here
    base.copy_(var)
    with pytest.raises(vt.ViewTrackError) as caught:
        view.sum().backward()
    assert "view_fn" in str(caught.value)
    assert "<lambda>" in str(caught.value)
    assert __file__ in str(caught.value)
    assert says in str(caught.value)


def test_wrong_result_is_named_below_autograd_and_leaves_all_untouched():
    _leaf, base = new_base()
    alias = bare_alias(base, second_row)
    with pytest.raises(vt.ViewTrackError, match="view_fn"):
        below_autograd(lambda: vt.mark_as_view(alias, base, view_fn=lambda t: t[1, 1:]))
    assert not alias._is_view()
    assert base._version == 0
    torch.autograd.graph.increment_version(base)
    assert alias._version == 0


def test_exception_of_view_fn_comes_through():
    class Refusal(Exception):
        pass

    def refuse(base):
        raise Refusal

    base = torch.zeros(2, 3)
    view = mark(base, refuse)
    base.copy_(torch.ones(2, 3, requires_grad=True))
    with pytest.raises(Refusal):
        view.sum()
    assert base._version == 1


@anywhere
def test_exception_of_view_fn_while_marking_leaves_all_untouched(where):
    def refuse(base):
        raise KeyError("no such view")

    _leaf, base = new_base()
    alias, grad_fn = bare_alias(base, second_row), base.grad_fn
    with pytest.raises(KeyError, match="no such view"):
        where(lambda: vt.mark_as_view(alias, base, view_fn=refuse))
    assert vt.view_info(alias) is None
    assert not alias.requires_grad
    assert (base._version, base.grad_fn, alias._version) == (0, grad_fn, 0)
    torch.autograd.graph.increment_version(base)
    assert alias._version == 0
    assert vt.mark_as_view(alias, base, view_fn=second_row)._base is base


def test_view_fn_must_be_callable():
    base = torch.zeros(2, 3)
    with pytest.raises(TypeError, match="view_fn"):
        mark(base, 3)
