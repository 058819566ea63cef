"""`correct_aliasing` in the handlers of wrappers and modes."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only
from wrappers import aliases, make_wrapper

import viewtrack as vt

aten = torch.ops.aten

SHAPES = [
    pytest.param(
        {"flattens": f, "quiet": q},
        id=f"{'flattens' if f else 'bare'}-{'quiet' if q else 'function'}",
    )
    for f in (False, True)
    for q in (False, True)
]


@pytest.fixture(params=SHAPES)
def wrapper(request):
    return make_wrapper(**request.param)


def six(wrapper):
    return wrapper(torch.arange(6.0).view(2, 3))


# View ops.

VIEWS = {
    "view": lambda w: w.view(6),
    "t": lambda w: w.t(),
    "slice": lambda w: w[:, 1:],
    "select": lambda w: w[1],
    "as_strided": lambda w: w.as_strided((2,), (1,), 1),
    "expand": lambda w: w.unsqueeze(0).expand(4, 2, 3),
    "detach": lambda w: w.detach(),
    "view_dtype": lambda w: w.view(torch.int32),
    "alias": lambda w: aten.alias.default(w),
    "reshape": lambda w: w.reshape(3, 2),
}
MULTI_VIEWS = {
    "split": lambda w: w.split(2, 1),
    "split_sizes": lambda w: w.split([1, 2], 1),
    "unbind": lambda w: w.unbind(0),
    "chunk": lambda w: w.chunk(3, 1),
    "tensor_split": lambda w: w.tensor_split(2, 1),
}


@pytest.mark.parametrize("name", VIEWS)
def test_a_view_has_its_base_s_storage_sizes_and_counter(name, wrapper):
    w = six(wrapper)
    v = VIEWS[name](w)
    plain = VIEWS[name](torch.arange(6.0).view(2, 3))
    assert aliases(v, w)
    assert (v.shape, v.stride(), v.storage_offset(), v.dtype) == (
        plain.shape,
        plain.stride(),
        plain.storage_offset(),
        plain.dtype,
    )
    assert v._is_view() == plain._is_view()
    w.add_(1)
    assert w._version == v._version == 1


@pytest.mark.parametrize("name", MULTI_VIEWS)
def test_each_output_of_a_multi_view_op_aliases_the_base(name, wrapper):
    w = six(wrapper)
    pieces = MULTI_VIEWS[name](w)
    for count, piece in enumerate(pieces, start=1):
        assert aliases(piece, w)
        piece.add_(1)
        assert w._version == piece._version == count
    assert torch.equal(w.e, torch.arange(6.0).view(2, 3) + 1)


@pytest.mark.parametrize("name", [*VIEWS, *MULTI_VIEWS])
def test_inner_views_share_their_base_s_counter_where_they_are_declared(name):
    w = six(make_wrapper(flattens=True))
    views = (VIEWS | MULTI_VIEWS)[name](w)
    for v in views if isinstance(views, (list, tuple)) else [views]:
        before = w.e._version
        v.e.zero_()
        assert w.e._version == before + 1
        assert v.e._version == w.e._version


def test_without_the_correction_inner_counters_differ():
    w = six(make_wrapper(flattens=True, correct=lambda func, args, kwargs, out: out))
    v = w.view(6)
    assert not aliases(v, w)
    v.e.zero_()
    assert w.e._version == 0


def test_a_write_joins_inner_counters_that_are_not_declared(wrapper):
    w = six(wrapper)
    v = w.view(6)
    v.mul_(2)
    assert w.e._version == v.e._version == w._version == 1
    w.mul_(2)
    assert w.e._version == v.e._version == v._version == 2


def test_gradients_of_writes_to_views_are_those_of_plain_tensors(wrapper):
    def run(make):
        x = make(torch.arange(6.0).view(2, 3))
        x.requires_grad_()
        y = x * 2
        y[0].mul_(3)
        left, right = y.split([1, 2], 1)
        (left.sum() + right.sin().sum()).backward()
        return x.grad

    assert torch.equal(run(wrapper).e, run(lambda t: t.clone()))


# Write ops.


@pytest.mark.parametrize(
    "call",
    [
        lambda w: w.add_(1),
        lambda w: w.mul_(w),
        lambda w: w.copy_(torch.ones(2, 3)),
        lambda w: w.zero_(),
        lambda w: w.t_(),
        lambda w: aten.add_.Tensor(w, other=2.0),
        lambda w: torch.relu_(w),
    ],
)
def test_an_in_place_op_returns_its_argument(call, wrapper):
    w = six(wrapper)
    assert call(w) is w
    assert w._version == w.e._version == 1


def test_out_ops_return_the_given_tensors(wrapper):
    w = six(wrapper)
    values, indices = wrapper(torch.zeros(2)), wrapper(torch.zeros(2, dtype=torch.long))
    out = torch.max(w, 1, out=(values, indices))
    assert out[0] is values
    assert out[1] is indices
    assert values.e.tolist() == [2.0, 5.0]
    assert (values._version, values.e._version) == (1, 1)


def test_an_out_argument_follows_its_resize(wrapper):
    w, out = six(wrapper), wrapper(torch.zeros(0))
    torch.add(w.t(), w.t(), out=out)
    assert out.shape == out.e.shape == (3, 2)
    assert out.stride() == out.e.stride()
    assert out.untyped_storage().nbytes() == out.e.untyped_storage().nbytes()


def test_foreach_ops_move_both_counters_once(wrapper):
    tensors = [six(wrapper), six(wrapper)]
    assert torch._foreach_add_(tensors, 1.0) in (None, tensors)
    torch._foreach_mul_(tensors, tensors)
    assert [(t._version, t.e._version) for t in tensors] == [(2, 2), (2, 2)]


def test_a_custom_op_moves_both_counters_once(wrapper):
    with torch.library._scoped_library("viewtracktest", "FRAGMENT") as lib:
        lib.define("twice_(Tensor(a!) x) -> Tensor(a!)")
        lib.impl("twice_", lambda x: x.mul_(2), "CompositeExplicitAutograd")
        w = six(wrapper)
        assert torch.ops.viewtracktest.twice_.default(w) is w
        assert (w._version, w.e._version) == (1, 1)


METADATA = {
    "t_": lambda t, of: t.t_(),
    "transpose_": lambda t, of: t.transpose_(0, 1),
    "unsqueeze_": lambda t, of: t.unsqueeze_(1),
    "squeeze_": lambda t, of: t.unsqueeze_(0).squeeze_(),
    "squeeze_dim": lambda t, of: t.unsqueeze_(0).squeeze_(0),
    "swapdims_": lambda t, of: t.swapdims_(0, 1),
    "as_strided_": lambda t, of: t.as_strided_((2,), (1,), 1),
    "resize_smaller": lambda t, of: t.resize_(2),
    "resize_larger": lambda t, of: t.resize_(5, 5),
    "resize_as_": lambda t, of: t.resize_as_(of(torch.zeros(4, 4))),
    "set_nothing": lambda t, of: t.set_(),
    "set_tensor": lambda t, of: t.set_(of(torch.ones(4))),
    "set_geometry": lambda t, of: t.set_(of(torch.ones(4)), 1, (2,), (1,)),
    "set_storage": lambda t, of: t.set_(torch.ones(8).untyped_storage()),
}


@pytest.mark.parametrize("name", METADATA)
def test_an_in_place_metadata_op_changes_the_wrapper_too(name, wrapper):
    plain = torch.arange(6.0).view(2, 3)
    w = wrapper(plain.clone())
    METADATA[name](plain, lambda t: t)
    METADATA[name](w, wrapper)
    for t in (w, w.e):
        assert (t.shape, t.stride(), t.storage_offset()) == (
            plain.shape,
            plain.stride(),
            plain.storage_offset(),
        )
        assert t.untyped_storage().nbytes() == plain.untyped_storage().nbytes()
    assert w._version == w.e._version == plain._version
    assert aliases(w.detach(), w)


def test_an_in_place_op_that_grows_a_view_grows_its_base_s_storage(wrapper):
    w = wrapper(torch.zeros(2))
    v = w.view(2)
    v.resize_(8)
    assert aliases(v, w)
    assert w.untyped_storage().nbytes() == w.e.untyped_storage().nbytes() == 32
    assert aliases(v.view(2, 4), w)


# Functional ops, and ops that are no ops on tensors.


def test_functional_results_go_through_untouched():
    seen = []

    def correct(func, args, kwargs, out):
        seen.append((out, vt.correct_aliasing(func, args, kwargs, out)))
        return seen[-1][1]

    w = six(make_wrapper(correct=correct))
    (w + w).sum()
    assert seen
    assert all(before is after for before, after in seen)


def test_what_is_no_tensor_goes_through(wrapper):
    assert six(wrapper).sum().item() == 15.0
    assert torch.equal(six(wrapper), six(wrapper))


def test_a_higher_order_op_goes_through():
    out = object()
    assert vt.correct_aliasing(object(), (), {}, out) is out


# Outputs that native kernels refuse, or overwrite.


def copies_requires_grad(cls, func, args, inner):
    """Wrap as users do who want the result to require grad where an argument does."""
    grad = any(isinstance(t, torch.Tensor) and t.requires_grad for t in args)
    return tree_map_only(torch.Tensor, lambda t: cls(t, grad), inner)


@pytest.mark.parametrize("flattens", [False, True])
def test_a_result_that_requires_grad_is_mended(flattens):
    wrapper = make_wrapper(flattens=flattens, wrap=copies_requires_grad)
    x = wrapper(torch.arange(6.0), True)
    x.view(2, 3)  # a class and an op are treated otherwise when they are met for the first time
    v = x.view(2, 3)
    assert v._base is x
    assert aliases(v, x)
    left, right = (v * 3).unbind()
    (left * right).sum().backward()
    assert torch.equal(x.grad.e, 9 * torch.tensor([3.0, 4, 5, 0, 1, 2]))


def test_a_functional_result_that_requires_grad_is_a_plain_result():
    def wrap(cls, func, args, inner):
        return tree_map_only(torch.Tensor, lambda t: cls(t, True), inner)

    w = make_wrapper(wrap=wrap)(torch.ones(2))
    assert not (w * 2).requires_grad


class Mode(TorchDispatchMode):
    """Hands what `change` makes of a result to correct_aliasing."""

    def __init__(self, change):
        super().__init__()
        self.change = change

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = self.change(func, args, func(*args, **(kwargs or {})))
        return vt.correct_aliasing(func, args, kwargs, out)


def memoising(op):
    cache = {}

    def change(func, args, out):
        return cache.setdefault(args[0].data_ptr(), out) if func is op else out

    return change


def test_a_memoised_view_comes_back_as_a_fresh_one():
    x = torch.rand(2, 3, requires_grad=True)
    y = x * 2
    with Mode(memoising(aten.t.default)):
        views = [y.t(), y.t(), y.t()]
    assert len({id(v) for v in views}) == 3
    for v in views:
        assert v._base is y
        assert v._version == y._version
    views[2].mul_(5)
    assert [v._version for v in views] == [1, 1, 1]
    y.sum().backward()
    assert torch.equal(x.grad, torch.full((2, 3), 10.0))


@pytest.mark.parametrize("requires_grad", [False, True])
@pytest.mark.parametrize("flattens", [False, True])
def test_a_memoised_view_of_a_wrapper_comes_back_as_a_fresh_one(flattens, requires_grad):
    cache = {}

    def wrap(cls, func, args, inner):
        out = tree_map_only(torch.Tensor, cls, inner)
        return cache.setdefault(id(args[0]), out) if func is aten.t.default else out

    x = six(make_wrapper(flattens=flattens, wrap=wrap)).requires_grad_(requires_grad)
    views = [x.t(), x.t(), x.t()]
    assert len({id(v) for v in views}) == 3
    assert all(v._base is x for v in views)
    if requires_grad:
        views[2].sum().backward()
        assert torch.equal(x.grad.e, torch.ones(2, 3))
    with torch.no_grad():
        views[2].mul_(5)
    assert [v._version for v in views] == [1, 1, 1]
    assert x.e.tolist() == [[0, 5, 10], [15, 20, 25]]


@pytest.mark.parametrize(
    ("op", "call"),
    [
        (aten.view.default, lambda x: x.view(2, 3)),
        (aten.clone.default, lambda x: x.clone()),
        (aten.mul.Tensor, lambda x: x * 1),
    ],
)
def test_a_handler_s_own_input_comes_back_as_an_alias(op, call):
    x = torch.rand(2, 3, requires_grad=True)
    with Mode(lambda func, args, out: args[0] if func is op else out):
        y = call(x)
    assert y is not x
    assert y.grad_fn is not None
    assert x.is_leaf
    y.sum().backward()
    assert torch.equal(x.grad, torch.ones(2, 3))


@pytest.mark.parametrize("requires_grad", [False, True])
@pytest.mark.parametrize("flattens", [False, True])
def test_a_wrapper_s_own_input_comes_back_as_an_alias(flattens, requires_grad):
    def wrap(cls, func, args, inner):
        return args[0] if func is aten.view.default else tree_map_only(torch.Tensor, cls, inner)

    x = six(make_wrapper(flattens=flattens, wrap=wrap)).requires_grad_(requires_grad)
    for _ in range(3):
        v = x.view(2, 3)
        assert v is not x
        assert v._base is x
    if requires_grad:
        v.sum().backward()
        assert torch.equal(x.grad.e, torch.ones(2, 3))


# Mistakes that cannot be mended.


def test_a_view_op_that_copies_real_memory_is_named():
    x = torch.rand(2, 3)
    with (
        Mode(lambda func, args, out: out.clone() if func is aten.t.default else out),
        pytest.raises(vt.AliasingError, match=r"(?s)aten\.t\.default.*output 0.*`self`") as raised,
    ):
        x.t()
    assert f"{__file__}:" in str(raised.value)


def test_one_piece_that_was_copied_is_enough():
    def change(func, args, out):
        return [out[0], out[1].clone()] if func is aten.unbind.int else out

    with Mode(change), pytest.raises(vt.AliasingError, match=r"aten\.unbind\.int"):
        torch.rand(2, 3).unbind()


@pytest.mark.parametrize("wrong", [None, 3, torch.ones(2)])
def test_a_list_that_is_none_is_named(wrong):
    x = torch.rand(2, 3)
    with (
        Mode(lambda func, args, out: wrong),
        pytest.raises(
            vt.ViewTrackError, match=r"`aten\.unbind\.int`, whose schema promises a list"
        ),
    ):
        x.unbind()


def test_a_missing_output_is_named():
    x, out = torch.rand(2, 3), (torch.empty(0), torch.empty(0, dtype=torch.long))
    with (
        Mode(lambda func, args, out: out[0] if func is aten.max.dim_max else out),
        pytest.raises(vt.ViewTrackError, match=r"`aten\.max\.dim_max`.* promises 2 outputs"),
    ):
        torch.max(x, 1, out=out)


def test_a_detach_that_cannot_help_is_named():
    class Stubborn(torch.Tensor):
        __torch_function__ = torch._C._disabled_torch_function_impl

        @classmethod
        def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
            return vt.correct_aliasing(func, args, kwargs, args[0])

    w = torch.Tensor._make_wrapper_subclass(Stubborn, (2, 3))
    with pytest.raises(
        vt.AutogradMetadataError, match=r"returned its own argument for `aten\.view\.default`"
    ):
        w.view(6)


# Where no autograd is.


def test_in_inference_mode_a_may_be_view_is_aliased_only_where_it_is_one():
    wrapper = make_wrapper(flattens=True)
    with torch.inference_mode():
        w = six(wrapper)
        assert aliases(w.reshape(6), w)
        assert not aliases(w.t().reshape(6), w)
        assert w.contiguous() is w or aliases(w.contiguous(), w)
        assert aliases(w[0], w)
        assert w.add_(1) is w


def test_a_normal_tensor_in_inference_mode_keeps_its_counters():
    w = six(make_wrapper(flattens=True))
    with torch.inference_mode():
        w.view(6).add_(1)
    assert (w._version, w.e._version) == (1, 1)


@pytest.mark.parametrize("record", ["none", "site"])
def test_under_track_counters_are_those_without_it(record, wrapper):
    def run():
        w = six(wrapper)
        v = w.view(6)
        v.add_(1)
        torch._foreach_add_([w], 1.0)
        a, _ = w.unbind()
        a.mul_(2)
        w.t_()
        return w._version, v._version, a._version, w.e._version

    expected = run()
    assert expected == (4, 4, 4, 4)
    with vt.track(record=record):
        assert run() == expected


def test_a_wrapper_around_a_wrapper():
    outer, inner = make_wrapper(flattens=True), make_wrapper(flattens=True)
    w = outer(six(inner))
    v = w.view(6)
    v.add_(1)
    assert aliases(v, w)
    assert aliases(v.e, w.e)
    assert [t._version for t in (w, v, w.e, v.e, w.e.e, v.e.e)] == [1] * 6
    assert w.e.e.flatten().tolist() == [1.0, 2, 3, 4, 5, 6]


def test_plain_arguments_among_wrappers(wrapper):
    w, plain = six(wrapper), torch.zeros(2, 3)
    assert plain.copy_(w) is plain
    assert plain._version == 1
    assert w._version == 0


@pytest.mark.heavy
@pytest.mark.parametrize("quiet", [True, False])
def test_torch_compile(quiet):
    wrapper = make_wrapper(flattens=True, quiet=quiet)

    def f(w):
        v = w.view(-1)
        v.add_(1)
        return (v * 2).sin() + v, w.t(), w.unbind()[0]

    eager, compiled = six(wrapper), six(wrapper)
    expected = f(eager)
    found = torch.compile(f, backend="aot_eager", fullgraph=True)(compiled)
    assert torch.equal(compiled.e, eager.e)
    for a, b in zip(found, expected, strict=True):
        assert torch.equal(a.e, b.e)
        assert (a._is_view(), type(a)) == (b._is_view(), wrapper)
    assert found[1]._base is compiled
