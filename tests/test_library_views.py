"""Views that custom ops return: relation, counters, gradients after in-place ops, refusals."""

import gc
import weakref

import pytest
import torch
from library_ops import CONTEXTS, HEADS, PassThrough, fresh, head

import viewtrack as vt
from viewtrack import CreationMeta, library

heads = pytest.mark.parametrize("head", HEADS.values(), ids=HEADS)
contexts = pytest.mark.parametrize("context", CONTEXTS.values(), ids=CONTEXTS)


def leaf_and_base(n=4):
    leaf = torch.arange(1.0, n + 1, requires_grad=True)
    return leaf, leaf * 1


@heads
@contexts
def test_the_result_is_a_view_of_its_argument(head, context):
    with context():
        _, base = leaf_and_base()
        view = head(base, 2)
        assert view._is_view()
        assert view._base is base
        assert view.requires_grad
        base.add_(1)
        assert view._version == base._version == 1
    assert vt.view_info(view).creation_meta is CreationMeta.DEFAULT


@heads
@contexts
def test_in_place_on_the_view_reaches_the_base(head, context):
    with context():
        leaf, base = leaf_and_base()
        view = head(base, 2)
        view.mul_(3)
        assert base._version == view._version == 1
        (base * torch.tensor([1.0, 10, 100, 1000])).sum().backward()
    assert leaf.grad.tolist() == [3, 30, 100, 1000]


@heads
@contexts
def test_in_place_on_the_base_reaches_the_view(head, context):
    with context():
        leaf, base = leaf_and_base()
        view = head(base, 2)
        base.mul_(leaf.detach() * 5)
        (view * torch.tensor([1.0, 10])).sum().backward()
    assert leaf.grad.tolist() == [5, 100, 0, 0]


@heads
@contexts
def test_several_in_place_ops_in_turn(head, context):
    def program(head):
        leaf, base = leaf_and_base()
        view = head(base, 3)
        view.mul_(2)
        base.mul_(base.detach() + 1)
        view.cos_()
        inner = head(view, 2)
        inner.mul_(7)
        base.sin_()
        (view.sum() + 2 * base.sum() + 3 * inner.sum()).backward()
        return leaf.grad, base._version

    expected = program(lambda x, n: x.narrow(0, 0, n))
    with context():
        found = program(head)
    torch.testing.assert_close(found[0], expected[0])
    assert found[1] == expected[1]


@heads
@contexts
def test_a_view_of_a_view_has_the_root_as_its_base(head, context):
    with context():
        _, base = leaf_and_base()
        view = head(head(base.view(2, 2), 2), 1)
        assert view._base is base
        ours, native = head(base[1:], 2), base[1:]
        assert ours._base is native._base is base


@heads
@contexts
def test_views_of_leaves_are_refused_in_place_as_native_ones_are(head, context):
    leaf, _ = leaf_and_base()
    with context():
        view = head(leaf, 2)
        with pytest.raises(RuntimeError, match="a view of a leaf Variable that requires grad"):
            view.mul_(2)


@heads
@contexts
def test_no_grad_views_are_refused_in_place_as_native_ones_are(head, context):
    with context():
        _, base = leaf_and_base()
        with torch.no_grad():
            view = head(base, 2)
        assert vt.view_info(view).creation_meta is CreationMeta.NO_GRAD_MODE
        with pytest.raises(RuntimeError, match="A view was created in no_grad mode"):
            view.mul_(2)


@heads
@contexts
def test_a_view_of_a_no_grad_view_is_recorded_as_a_native_one_is(head, context):
    with context():
        _, root = leaf_and_base()
        with torch.no_grad():
            base = root[:]
        for view in (head(base, 2), base[:2]):
            assert view.grad_fn is not None
            assert vt.view_info(view).creation_meta is CreationMeta.NO_GRAD_MODE


@heads
def test_inference_mode_views_are_refused_in_place_as_native_ones_are(head):
    _, base = leaf_and_base()
    with torch.inference_mode():
        view = head(base, 2)
    assert not view.is_inference()
    assert view._is_view()
    with pytest.raises(RuntimeError, match="A view was created in inference mode"):
        view.mul_(2)


@heads
def test_inference_tensors_stay_as_they_are(head):
    with torch.inference_mode():
        base = torch.ones(3)
        assert head(base, 2).is_inference()
    assert not head(base, 2)._is_view()


@heads
@contexts
def test_a_base_that_needs_no_gradient_yet(head, context):
    with context():
        base, weight = torch.ones(4), torch.tensor(3.0, requires_grad=True)
        view = head(base, 2)
        assert view._base is base
        assert view.grad_fn is None
        base.mul_(weight)
        view.sum().backward()
    assert weight.grad == 2


@heads
def test_forward_mode(head):
    primal, tangent = torch.arange(4.0), torch.tensor([1.0, 10, 100, 1000])
    with torch.autograd.forward_ad.dual_level():
        base = torch.autograd.forward_ad.make_dual(primal, tangent) * 1
        view = head(base, 2)
        assert torch.autograd.forward_ad.unpack_dual(view).tangent.tolist() == [1, 10]
        view.mul_(2)
        assert torch.autograd.forward_ad.unpack_dual(base).tangent.tolist() == [2, 20, 100, 1000]


@heads
def test_double_backward(head):
    def through(x):
        base = x * 1
        view = head(base, 2)
        view.mul_(x[2:])
        return base * base

    x = torch.tensor([0.5, -1.0, 2.0, 0.3], dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(through, x)
    assert torch.autograd.gradgradcheck(through, x)


def test_a_mode_sees_the_op_and_not_what_it_is_made_of():
    with PassThrough() as mode:
        head(torch.ones(4, requires_grad=True) * 1, 2)
    assert mode.seen[-1] is head.op
    assert torch.ops.aten.slice.Tensor not in mode.seen


@heads
def test_a_mode_that_answers_by_a_copy_of_the_view_keeps_the_relation(head):
    class Detaching(PassThrough):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = super().__torch_dispatch__(func, types, args, kwargs)
            return out.detach() if func is head.op else out

    with Detaching():
        leaf, base = leaf_and_base()
        view = head(base, 2)
        assert view._base is base
        view.mul_(3)
        base.sum().backward()
    assert leaf.grad.tolist() == [3, 3, 1, 1]


@heads
def test_nothing_outlives_the_call(head):
    def alive():
        _, base = leaf_and_base()
        view = head(base, 2)
        view.mul_(2)
        return weakref.ref(base), weakref.ref(view)

    gc.disable()
    try:
        refs = alive()
        assert [ref() for ref in refs] == [None, None]
    finally:
        gc.enable()


def test_a_body_that_returns_its_argument_gives_a_view_of_all_of_it():
    whole = library.view_op(fresh("(Tensor(a) x) -> Tensor(a)"), lambda x: x.contiguous())
    base = torch.ones(3)
    view = whole(base)
    assert view is not base
    assert view._base is base


def _listed(body, formula=None):
    op = library.view_op(fresh("(Tensor(a) x) -> Tensor(a)[]"), body)
    if formula is not None:
        op.register_autograd(formula)
    return op


LISTS = {
    "derived": _listed(lambda x: list(x.unbind())),
    "hidden": _listed(lambda x: list(x.detach().unbind())),
    "formula": _listed(lambda x: list(x.detach().unbind()), lambda ctx, g: torch.stack(g)),
}


@pytest.mark.parametrize("parts", LISTS.values(), ids=LISTS)
@contexts
def test_lists_of_views_may_not_be_written_in_place(parts, context):
    with context():
        leaf, base = leaf_and_base()
        views = parts(base)
        assert [v._base is base for v in views] == [True] * 4
        assert {vt.view_info(v).creation_meta for v in views} == {CreationMeta.MULTI_OUTPUT_NODE}
        (views[1] * 3 + views[2] * 5).backward()
        assert leaf.grad.tolist() == [0, 3, 5, 0]
        with pytest.raises(RuntimeError, match="returns multiple views"):
            views[0].mul_(2)


@contexts
def test_views_of_two_bases(context):
    both = library.view_op(
        fresh("(Tensor(a) x, Tensor(b) y) -> (Tensor(a), Tensor(b))"), lambda x, y: (x[1:], y[:1])
    )
    with context():
        leaf, x = leaf_and_base()
        y = leaf * 2
        of_x, of_y = both(x, y)
        assert of_x._base is x
        assert of_y._base is y
        of_x.mul_(3)
        of_y.mul_(5)
        (x + y).sum().backward()
    assert leaf.grad.tolist() == [11, 5, 5, 5]


@contexts
def test_a_view_and_a_new_tensor(context):
    op = library.op(
        fresh("(Tensor(a) x, Tensor w) -> (Tensor(a), Tensor)"), lambda x, w: (x[:2], x + w)
    )
    with context():
        leaf, x = leaf_and_base()
        weight = torch.tensor(2.0, requires_grad=True)
        view, product = op(x, weight)
        assert view._base is x
        assert not product._is_view()
        view.mul_(3)
        (x.sum() + product.sum()).backward()
    assert leaf.grad.tolist() == [4, 4, 2, 2]
    assert weight.grad == 4


@contexts
def test_a_view_of_one_of_a_list(context):
    pick = library.view_op(
        fresh("(Tensor(a)[] xs, int i) -> Tensor(a)"), lambda xs, i: xs[i].view(-1)
    )
    with context():
        leaf, x = leaf_and_base()
        view = pick([torch.ones(2), x], 1)
        assert view._base is x
        view.mul_(2)
        x.sum().backward()
    assert leaf.grad.tolist() == [2] * 4


def test_integers_have_views_too():
    base = torch.arange(4)
    view = head(base, 2)
    assert view._base is base
    view.add_(1)
    assert base._version == 1


@contexts
@pytest.mark.parametrize("opaque", [None, True])
def test_a_view_of_another_dtype_shares_the_counter_alone_as_natively(context, opaque):
    bits = library.view_op(
        fresh("(Tensor(a) x) -> Tensor(a)"), lambda x: x.view(torch.int32), opaque=opaque
    )
    with context():
        _, base = leaf_and_base()
        view = bits(base)
        base.mul_(2)
        assert (view._is_view(), view._version) == (False, 1)
        assert view.tolist() == base.detach().view(torch.int32).tolist()


@contexts
def test_the_real_view_of_a_complex_tensor(context):
    real = library.view_op(fresh("(Tensor(a) x) -> Tensor(a)"), torch.view_as_real)
    hidden = library.view_op(
        fresh("(Tensor(a) x) -> Tensor(a)"), lambda x: torch.view_as_real(x.detach())
    )
    for op in (real, hidden):
        with context():
            leaf = torch.tensor([1 + 2j], requires_grad=True)
            base = leaf * 1
            view = op(base)
            assert view._base is base
            view[:, 0].mul_(3)
            base.real.sum().backward()
        assert leaf.grad.tolist() == [3]


@pytest.mark.parametrize("hides", [False, True])
def test_one_of_several_views_of_a_view_made_under_no_grad(hides):
    """It has the creation_meta of one of several, and does not inherit that of its base."""

    def body(x):
        with torch.set_grad_enabled(torch.is_grad_enabled() and not hides):
            return list(x.split(1))

    op = library.view_op(fresh("(Tensor(a -> *) x) -> Tensor(a)[]"), body)
    found = []
    for split in (lambda x: x.split(1), op):
        with torch.no_grad():
            base = torch.ones(4, 2).t()
        found.append(vt.view_info(split(base)[0]).creation_meta)
    assert found[0] is found[1] is vt.CreationMeta.MULTI_OUTPUT_NODE
