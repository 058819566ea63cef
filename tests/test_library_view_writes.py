"""Writes of custom ops through views: what the views and their bases have as history afterwards."""

import pytest
import torch
from library_ops import CONTEXTS, double_rows, fresh, memset, raw_zero_

from viewtrack import ViewTrackError, library

contexts = pytest.mark.parametrize("context", CONTEXTS.values(), ids=CONTEXTS)


def _triple(x):
    x.detach().numpy()[...] *= 3
    return x


triple_ = library.inplace_op(fresh("(Tensor(a!) x) -> Tensor(a!)"), _triple)
triple_.register_autograd(lambda ctx, grad: grad * 3)


@library.inplace_op(fresh("(Tensor(a!)[] xs) -> ()"))
def triple_all(xs):
    for x in xs:
        _triple(x)


triple_all.register_autograd(lambda ctx, grads: ([grad * 3 for grad in grads],))


def _once(view):
    triple_(view)


def _after_a_native_write(view):
    view.mul_(5)
    triple_(view)


def _before_a_native_write(view):
    triple_(view)
    view.mul_(5)


def _after_an_unread_write_to_the_base(view):
    view._base.mul_(5)
    triple_(view)


def _twice(view):
    triple_(view)
    triple_(view)


def _with_its_grad_fn_read_in_between(view):
    triple_(view)
    assert view.grad_fn is not None
    triple_(view._base)


WRITES = {
    _once: (3, 1),
    _twice: (9, 1),
    _after_a_native_write: (15, 1),
    _before_a_native_write: (15, 1),
    _after_an_unread_write_to_the_base: (15, 5),
    _with_its_grad_fn_read_in_between: (9, 3),
}


@pytest.mark.parametrize(
    ("write", "factors"), WRITES.items(), ids=[write.__name__.strip("_") for write in WRITES]
)
@contexts
def test_a_formula_is_the_gradient_of_the_view_that_was_written(write, factors, context):
    with context():
        leaf = torch.ones(4, requires_grad=True)
        base = leaf * 1
        view, other = base[:2], base[1:]
        write(view)
        (of_view,) = torch.autograd.grad(view.sum(), leaf, retain_graph=True)
        (of_other,) = torch.autograd.grad(other.sum(), leaf, retain_graph=True)
        (of_base,) = torch.autograd.grad(base.sum(), leaf)
    inside, outside = factors
    assert base.tolist() == [inside] * 2 + [outside] * 2
    assert of_view.tolist() == [inside] * 2 + [0] * 2
    assert of_other.tolist() == [0, inside] + [outside] * 2
    assert of_base.tolist() == [inside] * 2 + [outside] * 2
    assert base._version == (1 if write is _once else 2)


@contexts
def test_a_formula_for_several_views_of_one_base(context):
    with context():
        leaf = torch.ones(5, requires_grad=True)
        base = leaf * 1
        first, second = base[:2], base[2:4]
        triple_all([first, second])
        (of_first,) = torch.autograd.grad(first.sum(), leaf, retain_graph=True)
        (of_second,) = torch.autograd.grad(second.sum(), leaf, retain_graph=True)
        (of_base,) = torch.autograd.grad(base.sum(), leaf)
    assert of_first.tolist() == [3, 3, 0, 0, 0]
    assert of_second.tolist() == [0, 0, 3, 3, 0]
    assert of_base.tolist() == [3, 3, 3, 3, 1]


def _read_base(base, view):
    return base


def _read_view(base, view):
    return view


def _read_other(base, view):
    return base[:1]


@pytest.mark.parametrize("read", [_read_base, _read_view, _read_other])
@contexts
def test_a_raw_write_through_a_view_raises_in_backward(read, context):
    with context():
        base = torch.ones(4, requires_grad=True) * 1
        view = base[:2]
        raw_zero_(view)
        assert base._version == 1
        with pytest.raises(ViewTrackError, match=r"vtlib::raw_zero_.*register_autograd"):
            read(base, view).sum().backward()


@contexts
def test_a_raw_write_through_a_view_leaves_the_rest_of_its_base(context):
    with context():
        leaf = torch.ones(4, requires_grad=True)
        base = leaf * 1
        raw_zero_(base[:2])
        base[2:].sum().backward(retain_graph=True)
        assert leaf.grad.tolist() == [0, 0, 1, 1]
        base[:2].copy_(torch.zeros(2))
        base.sum().backward()
    assert leaf.grad.tolist() == [0, 0, 2, 2]


def test_gradients_that_cancel_do_reach_a_raw_write():
    base = torch.ones(4, requires_grad=True) * 1
    raw_zero_(base[:2])
    with pytest.raises(ViewTrackError, match="register_autograd"):
        (base[0] - base[1]).backward()


@contexts
def test_a_body_of_torch_ops_keeps_its_gradient_through_a_view(context):
    with context():
        leaf = torch.ones(4, requires_grad=True)
        base = leaf * 1
        view = base[1:]
        double_rows(view, [])
        double_rows(view, [1])
        (base.sum() + view.sum()).backward()
    assert leaf.grad.tolist() == [1, 2, 4, 2]


@contexts
def test_a_raw_write_raises_for_the_view_that_the_op_returns(context):
    @library.op(fresh("(Tensor(a!) x) -> Tensor(a)"))
    def clear_head(x):
        memset(x)
        return x[:2]

    with context():
        base = torch.ones(4, requires_grad=True) * 1
        head = clear_head(base)
        assert head._base is base
        with pytest.raises(ViewTrackError, match="register_autograd"):
            head.sum().backward()


def test_a_raw_write_raises_for_the_view_that_an_opaque_op_returns():
    @library.op(fresh("(Tensor(a!) x) -> Tensor(a)"), opaque=True)
    def clear_head(x):
        memset(x)
        return x[:2]

    base = torch.ones(4, requires_grad=True) * 1
    head = clear_head(base)
    with pytest.raises(ViewTrackError, match="register_autograd"):
        head.sum().backward()


RAW = {
    "another output": ("Tensor(a!)", lambda x: (memset(x), x.clone())[1]),
    "an output too many": ("()", lambda x: (memset(x), 5)[1]),
    "an undeclared alias": ("(Tensor(a!), Tensor)", lambda x: (memset(x), (x, x[:1]))[1]),
}


@pytest.mark.parametrize("context", CONTEXTS.values(), ids=CONTEXTS)
@pytest.mark.parametrize("requires_grad", [False, True])
@pytest.mark.parametrize(("returns", "body"), RAW.values(), ids=RAW)
def test_a_raw_write_counts_though_what_came_with_it_is_refused(
    context, requires_grad, returns, body
):
    op = library.op(fresh(f"(Tensor(a!) x) -> {returns}"), body)
    saved = torch.ones(2, requires_grad=True).exp()
    with context(), pytest.raises(ViewTrackError, match=op.op.name()):
        op(saved if requires_grad else saved.detach())
    assert saved.tolist() == [0, 0]
    assert saved._version == 1
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        saved.sum().backward()


def test_a_refused_write_of_torch_ops_counts_once():
    op = library.inplace_op(fresh("(Tensor(a!) x) -> Tensor(a!)"), lambda x: x.mul_(2).clone())
    x = torch.ones(2)
    with pytest.raises(ViewTrackError, match="return x"):
        op(x)
    assert x._version == 1


def test_a_body_that_raises_before_it_writes_counts_nothing():
    def body(x):
        raise ValueError("planned")

    op = library.inplace_op(fresh("(Tensor(a!) x) -> Tensor(a!)"), body)
    x = torch.ones(2)
    with pytest.raises(ValueError, match="planned"):
        op(x)
    assert x._version == 0
