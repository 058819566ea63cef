"""Writes of custom ops: counters, histories, raw kernels, refusals."""

import pytest
import torch
from library_ops import (
    CONTEXTS,
    RAW,
    Issue,
    PassThrough,
    axpy_,
    double_rows,
    formula_zero_,
    fresh,
    head,
    memset,
    raw_zero_,
)

import viewtrack as vt
from viewtrack import ViewTrackError, library

raw = pytest.mark.parametrize("op", RAW.values(), ids=RAW)
contexts = pytest.mark.parametrize("context", CONTEXTS.values(), ids=CONTEXTS)


@raw
@contexts
def test_a_raw_write_counts_once_above_autograd(op, context):
    with context():
        x = torch.ones(3)
        alias = x.detach()
        op(x)
        assert (x._version, alias._version) == (1, 1)
        op(alias)
        assert x._version == 2
    assert x.tolist() == [0, 0, 0]


@raw
@pytest.mark.parametrize("tracked", [False, True], ids=["stock", "track"])
def test_a_raw_write_counts_once_below_autograd(op, tracked):
    x = torch.ones(3)
    with CONTEXTS["track" if tracked else "plain"](), Issue(op):
        x.sin()
        assert x._version == 1
        x.sin()
        assert x._version == 2


@raw
def test_a_raw_write_counts_once_in_a_handler_that_stands_for_a_native_write(op):
    class ByCustomOp(PassThrough):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if func is torch.ops.aten.zero_.default:
                op(args[0])
                return args[0]
            return super().__torch_dispatch__(func, types, args, kwargs)

    x = torch.ones(3)
    with ByCustomOp():
        x.zero_()
    assert x._version == 1


@raw
def test_a_raw_write_counts_once_in_inference_mode_and_below_a_guard(op):
    x = torch.ones(3)
    with torch.inference_mode():
        op(x)
        assert x._version == 1
        op(torch.ones(3))
    with torch._C._AutoDispatchBelowAutograd():
        op(x)
    assert x._version == 2
    with torch._C._AutoDispatchBelowADInplaceOrView():
        op(x)
    assert x._version == 3


@raw
@contexts
def test_a_stale_graph_raises(op, context):
    with context():
        x = torch.ones(3, requires_grad=True)
        y = x.exp()
        op(y.detach())
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.sum().backward()


@contexts
def test_a_raw_write_without_a_formula_raises_in_backward(context):
    with context():
        leaf = torch.ones(3, requires_grad=True)
        x = leaf * 1
        raw_zero_(x)
        with pytest.raises(ViewTrackError, match=r"vtlib::raw_zero_.*register_autograd"):
            x.sum().backward()


def test_a_write_hidden_by_no_grad_raises_in_backward():
    op = library.inplace_op(fresh("(Tensor(a!) x) -> Tensor(a!)"), _under_no_grad)
    x = torch.ones(3, requires_grad=True) * 1
    op(x)
    with pytest.raises(ViewTrackError, match="register_autograd"):
        x.sum().backward()


def _under_no_grad(x):
    with torch.no_grad():
        return x.mul_(2)


@contexts
def test_a_formula_is_the_gradient(context):
    with context():
        leaf = torch.ones(4, requires_grad=True)
        x = leaf * 1
        assert formula_zero_(x) is x
        x.add_(leaf)
        x.sum().backward()
    assert leaf.grad.tolist() == [1] * 4


@contexts
def test_a_formula_on_a_view_reaches_the_base(context):
    with context():
        leaf = torch.ones(4, requires_grad=True)
        base = leaf * 1
        view = formula_zero_(head(base, 2))
        assert view._base is base
        assert base._version == 1
        (base * 3).sum().backward()
    assert leaf.grad.tolist() == [0, 0, 3, 3]


@contexts
def test_the_gradient_of_a_body_of_torch_ops(context):
    def program(axpy):
        leaf = torch.arange(4.0, requires_grad=True)
        base, weight = leaf * 1, torch.tensor([2.0, 3.0], requires_grad=True)
        view = base[:2]
        assert axpy(view, weight * weight, 3) is view
        base.mul_(leaf.detach())
        axpy(base, leaf.exp(), 1)
        (base * base).sum().backward()
        return leaf.grad, weight.grad, base._version

    expected = program(lambda x, y, alpha: x.add_(y, alpha=alpha))
    with context():
        found = program(axpy_)
    for ours, native in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, native)


@pytest.mark.parametrize("op", [axpy_, raw_zero_, formula_zero_], ids=str)
@contexts
def test_what_may_not_be_written_is_refused_before_it_is(op, context):
    leaf = torch.ones(4, requires_grad=True)
    args = (torch.ones(()),) if op is axpy_ else ()
    with context():
        with pytest.raises(RuntimeError, match="a leaf Variable that requires grad"):
            op(leaf, *args)
        with pytest.raises(RuntimeError, match="a view of a leaf Variable that requires grad"):
            op(leaf[:2], *args)
        with torch.no_grad():
            view = (leaf * 1)[:2]
        first = (leaf * 1).unbind()[0]
        with pytest.raises(RuntimeError, match="returns multiple views"):
            op(first, *args)
        with torch.no_grad():
            view = (leaf * 1).requires_grad_()[:2]
        with pytest.raises(RuntimeError, match="A view was created in no_grad mode"):
            op(view, *args)
    assert leaf.tolist() == [1] * 4
    assert leaf._version == first._version == view._version == 0


@contexts
def test_a_refusal_looks_at_all_that_requires_grad(context):
    add_ = library.inplace_op(fresh("(Tensor(a!) x, Tensor y) -> Tensor(a!)"), _adds_unseen)
    add_.register_autograd(lambda ctx, grad: (grad, grad))
    weight = torch.ones(2, requires_grad=True)
    x = torch.ones(2)
    with torch.no_grad():
        view = x.view_as(x)
    for write in (torch.Tensor.add_, add_):
        with context(), pytest.raises(RuntimeError, match="created in no_grad mode"):
            write(view, weight)
        assert (x.tolist(), x._version) == ([1, 1], 0)
    assert add_(view, weight.detach()).tolist() == [2, 2]


def _adds_unseen(x, y):
    x.detach().numpy()[...] += y.detach().numpy()
    return x


@pytest.mark.parametrize("op", [axpy_, raw_zero_, formula_zero_], ids=str)
def test_an_inference_tensor_is_refused_outside_of_inference_mode(op):
    with torch.inference_mode():
        x = torch.ones(3)
    with pytest.raises(RuntimeError, match="Inplace update to inference tensor outside"):
        op(x, *((x,) if op is axpy_ else ()))


def test_a_leaf_may_be_written_under_no_grad():
    leaf = torch.ones(3, requires_grad=True)
    with torch.no_grad():
        raw_zero_(leaf)
        axpy_(leaf, torch.ones(3), 2)
    assert leaf.tolist() == [2] * 3
    assert leaf.is_leaf
    assert leaf._version == 2


@contexts
def test_optional_and_listed_arguments(context):
    @library.inplace_op(
        fresh("(Tensor(a!)[] xs, Tensor(b!)? y, *, Tensor(c!)?[] zs, Tensor w) -> ()")
    )
    def clear(xs, y, *, zs, w):
        for t in [*xs, y, *zs]:
            if t is not None:
                memset(t)

    with context():
        a, b, c, d, w = (torch.ones(2) for _ in range(5))
        clear([a, b], None, zs=[c, None], w=w)
        clear([], d, zs=[], w=w)
        assert [t._version for t in (a, b, c, d, w)] == [1, 1, 1, 1, 0]
    assert [t.sum().item() for t in (a, b, c, d, w)] == [0, 0, 0, 0, 2]


@contexts
def test_several_written_tensors_with_one_formula(context):
    @library.inplace_op(fresh("(Tensor(a!) x, Tensor(b!) y, Tensor w) -> (Tensor(a!), Tensor(b!))"))
    def scale(x, y, w):
        x.detach().numpy()[...] *= w.item()
        y.detach().numpy()[...] *= w.item() ** 2
        return x, y

    def backward(ctx, grad_x, grad_y):
        return grad_x * ctx.w, grad_y * ctx.w**2, None

    scale.register_autograd(
        backward, setup_context=lambda ctx, inputs, output: setattr(ctx, "w", inputs[2].item())
    )
    with context():
        leaf = torch.ones(4, requires_grad=True)
        x, y = leaf * 1, leaf * 2
        scale(x[:2], y[2:], torch.tensor(3.0))
        assert (x._version, y._version) == (1, 1)
        (x + y).sum().backward()
    assert leaf.grad.tolist() == [5, 5, 19, 19]


@contexts
def test_a_formula_of_an_op_without_outputs(context):
    @library.inplace_op(fresh("(Tensor(a!)[] xs, float factor) -> ()"))
    def scale(xs, factor):
        for x in xs:
            x.detach().numpy()[...] *= factor

    scale.register_autograd(
        lambda ctx, grads: ([g * ctx.factor for g in grads], None),
        setup_context=lambda ctx, inputs, output: setattr(ctx, "factor", inputs[1]),
    )
    with context():
        leaf = torch.ones(2, requires_grad=True)
        xs = [leaf * 1, leaf * 2]
        scale(xs, 3.0)
        (xs[0] + xs[1]).sum().backward()
    assert leaf.grad.tolist() == [9, 9]


@contexts
def test_a_formula_may_save_the_output(context):
    @library.inplace_op(fresh("(Tensor(a!) x) -> Tensor(a!)"))
    def exp_(x):
        array = x.detach().numpy()
        array[...] = torch.exp(x.detach()).numpy()
        return x

    exp_.register_autograd(
        lambda ctx, grad: grad * ctx.saved_tensors[0],
        setup_context=lambda ctx, inputs, output: ctx.save_for_backward(output),
    )
    with context():
        leaf = torch.tensor([0.5, 1.0], requires_grad=True)
        x = exp_(leaf * 1)
        (first,) = torch.autograd.grad(x.sum(), leaf, create_graph=True)
        torch.testing.assert_close(first, leaf.exp())
        first.sum().backward()
        torch.testing.assert_close(leaf.grad, leaf.detach().exp())
        stale = exp_(leaf * 1)
        stale.add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            stale.sum().backward()


def test_forward_mode_needs_a_jvp_only_where_the_op_writes():
    op = library.inplace_op(fresh("(Tensor(a!) x, float k) -> Tensor(a!)"), _scale)
    op.register_autograd(lambda ctx, grad: (grad * 3, None))
    with torch.autograd.forward_ad.dual_level():
        x = torch.autograd.forward_ad.make_dual(torch.ones(2), torch.ones(2)) * 1
        with pytest.raises(NotImplementedError, match="register_jvp"):
            op(x, 3.0)
        op.register_jvp(lambda ctx, tangent, _: tangent * 3)
        op(x, 3.0)
        assert torch.autograd.forward_ad.unpack_dual(x).tangent.tolist() == [3, 3]


def _scale(x, k):
    x.detach().numpy()[...] *= k
    return x


@contexts
def test_filling_a_buffer_and_returning_a_part_of_it(context):
    @library.op(fresh("(Tensor(a!) cache, Tensor new, int pos) -> Tensor(a)"))
    def append(cache, new, pos):
        cache.narrow(0, pos, new.shape[0]).copy_(new)
        return cache.narrow(0, 0, pos + new.shape[0])

    with context():
        cache = torch.zeros(8, 2)
        with torch.no_grad():
            filled = append(cache, torch.ones(3, 2), 1)
        assert filled._base is cache
        assert filled._version == cache._version == 1
        new = torch.ones(2, 2, requires_grad=True)
        filled = append(cache, new * 2, 4)
        assert filled._base is cache
        filled.mul_(3)
        cache.sum().backward()
    assert cache[:, 0].tolist() == [0, 3, 3, 3, 6, 6, 0, 0]
    assert new.grad.tolist() == [[6, 6], [6, 6]]


@contexts
def test_a_mixture_with_a_formula(context):
    @library.op(fresh("(Tensor(a!) x, Tensor y) -> (Tensor(a), Tensor)"))
    def store(x, y):
        x.detach().numpy()[:2] = y.detach().numpy()
        return x.detach()[:2], torch.from_numpy(y.detach().numpy() * 2)

    def backward(ctx, grad_view, grad_double, grad_x):
        rest = torch.cat([torch.zeros(2), grad_x[2:]])
        return rest, grad_view + 2 * grad_double + grad_x[:2]

    store.register_autograd(backward)
    with context():
        leaf, y = (torch.ones(n, requires_grad=True) for n in (4, 2))
        x = leaf * 1
        view, double = store(x, y * 5)
        assert view._base is x
        (view.sum() * 10 + double.sum() * 100 + x.sum()).backward()
    assert y.grad.tolist() == [5 * 211] * 2
    assert leaf.grad.tolist() == [0, 0, 1, 1]


@contexts
def test_an_out_op_writes_and_is_refused_where_autograd_records(context):
    @library.out_op(fresh("(Tensor x, *, Tensor(a!) out) -> Tensor(a!)"))
    def double(x, *, out):
        out.detach().numpy()[...] = x.detach().numpy() * 2
        return out

    with context():
        x, out = torch.ones(2, requires_grad=True), torch.zeros(2)
        with pytest.raises(RuntimeError, match="don't support automatic differentiation"):
            double(x, out=out)
        assert out._version == 0
        with torch.no_grad():
            assert double(x, out=out) is out
        assert out.tolist() == [2, 2]
        assert out._version == 1
        y = torch.ones(2, requires_grad=True).exp()
        double(torch.zeros(2), out=y.detach())
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.sum().backward()


def test_writes_are_recorded_by_track():
    with vt.track() as tracker:
        x = torch.ones(3)
        raw_zero_(x)
    assert tracker.undeclared_aliases == {}
    assert vt.storage_version(x) == 1


@contexts
def test_a_body_that_has_nothing_to_do_leaves_the_gradient(context):
    with context():
        leaf = torch.ones(3, requires_grad=True)
        x = leaf * 1
        double_rows(x, [])
        double_rows(x, [1])
        assert x._version == 2
        x.sum().backward()
    assert leaf.grad.tolist() == [1, 2, 1]


def test_a_write_through_data_raises_in_backward():
    op = library.inplace_op(fresh("(Tensor(a!) x) -> Tensor(a!)"), _through_data)
    x = torch.ones(3, requires_grad=True) * 1
    op(x)
    assert x._version == 1
    with pytest.raises(ViewTrackError, match="register_autograd"):
        x.sum().backward()


def _through_data(x):
    x.data.mul_(2)
    return x


def test_a_new_tensor_that_the_body_detaches_needs_no_gradient():
    op = library.op(fresh("(Tensor x) -> (Tensor, Tensor)"), lambda x: (x * 2, x.detach().amax()))
    leaf = torch.ones(3, requires_grad=True)
    doubled, largest = op(leaf)
    assert not largest.requires_grad
    (doubled / largest).sum().backward()
    assert leaf.grad.tolist() == [2] * 3


def test_a_raw_new_tensor_raises_in_backward():
    op = library.op(
        fresh("(Tensor x) -> Tensor"), lambda x: torch.from_numpy(x.detach().numpy() * 2)
    )
    out = op(torch.ones(3, requires_grad=True))
    with pytest.raises(ViewTrackError, match=r"output 0.*register_autograd"):
        out.sum().backward()


def test_conjugated_arguments():
    leaf = torch.tensor([1 + 2j, 3 - 1j], requires_grad=True)
    native = torch.tensor([1 + 2j, 3 - 1j], requires_grad=True)
    for op, x in ((axpy_, leaf), (lambda x, y: x.add_(y), native)):
        base = x * 1
        op(base.conj(), (x * 2j).conj())
        (base * base.conj()).real.sum().backward()
    torch.testing.assert_close(leaf.grad, native.grad)


@pytest.mark.parametrize("given", [None, []])
def test_an_optional_list_that_is_left_out(given):
    @library.inplace_op(fresh("(Tensor x, Tensor(a!)[]? outs) -> ()"))
    def store(x, outs):
        for out in outs or ():
            out.copy_(x)

    store(torch.ones(2), given)
    outs = [torch.zeros(2), torch.zeros(2)]
    store(torch.ones(2), outs)
    assert [(t._version, t.sum().item()) for t in outs] == [(1, 2), (1, 2)]


def test_a_formula_with_a_tensor_that_is_passed_by_name_only():
    @library.inplace_op(fresh("(Tensor(a!) x, *, Tensor w, float k=1.0) -> Tensor(a!)"))
    def scale(x, *, w, k):
        x.detach().numpy()[...] *= w.item() * k
        return x

    def setup_context(ctx, inputs, keyword_only_inputs, output):
        ctx.k = keyword_only_inputs["k"]
        ctx.save_for_backward(keyword_only_inputs["w"], output)

    def backward(ctx, grad):
        w, output = ctx.saved_tensors
        return grad * w * ctx.k, (grad * output / w).sum(), None

    scale.register_autograd(backward, setup_context=setup_context)
    leaf, w = torch.ones(2, requires_grad=True), torch.tensor(3.0, requires_grad=True)
    scale(leaf * 1, w=w, k=2.0).sum().backward()
    assert leaf.grad.tolist() == [6, 6]
    assert w.grad == 4


def test_a_formula_that_returns_too_few_gradients():
    op = library.inplace_op(fresh("(Tensor(a!) x, float k) -> Tensor(a!)"), _scale)
    op.register_autograd(lambda ctx, grad: grad * 3)
    with pytest.raises(ViewTrackError, match=r"returned 1 values.*2 arguments"):
        op(torch.ones(2, requires_grad=True) * 1, 3.0).sum().backward()
