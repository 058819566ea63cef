"""The checks of `viewtrack.testing` themselves: each sees the faults that it is there to see."""

from __future__ import annotations

import itertools
from contextlib import nullcontext

import pytest
import torch
from handlers import NoOp
from torch.utils._python_dispatch import TorchDispatchMode

import viewtrack as vt
from viewtrack import testing
from viewtrack.testing import compare, compare_below
from viewtrack.testing.call import Call
from viewtrack.testing.compare import Difference, is_steady
from viewtrack.testing.observation import observe, same

aten = torch.ops.aten

LIB = torch.library.Library("vt_compare", "DEF")
LIB.define("head(Tensor(a) x) -> Tensor(a)")
LIB.impl("head", lambda x: x[:1], "CompositeExplicitAutograd")
LIB.define("heads(Tensor(a) x) -> Tensor(a)[]")
LIB.impl("heads", lambda x: [x[:1], x[1:]], "CompositeExplicitAutograd")
LIB.define("twice(Tensor x) -> Tensor")
LIB.impl("twice", lambda x: x * 2, "CompositeExplicitAutograd")
LIB.define("secret(Tensor x) -> Tensor")
LIB.impl("secret", lambda x: x.view(-1), "CompositeExplicitAutograd")
LIB.define("inc_(Tensor(a!) x) -> ()")
LIB.impl("inc_", lambda x: (x.add_(1), None)[1], "CompositeExplicitAutograd")
LIB.define("scale(Tensor(a!)[] xs, Tensor(b!)? y) -> ()")


def _scale(xs, y):
    for t in (*xs, y):
        if t is not None:
            t.mul_(2)


LIB.impl("scale", _scale, "CompositeExplicitAutograd")
ours = torch.ops.vt_compare


def leaf(*size):
    return torch.rand(*size or (4,), requires_grad=True)


def faulty(op, replace):
    """A mode that answers `op` with `replace(func, args, kwargs)`."""

    class Faulty(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if func is op:
                return replace(func, args, kwargs or {})
            return func(*args, **(kwargs or {}))

    return Faulty


def what(differences):
    return {d.what for d in differences}


# Calls.


def test_inputs_are_fresh_and_share_memory_as_given():
    x = leaf(4)
    call = Call(lambda a, b: a, (x.detach()[:2], [x.detach()]))
    (a, (b,)) = call.inputs().args
    assert a.untyped_storage()._cdata == b.untyped_storage()._cdata
    assert a.untyped_storage()._cdata != x.untyped_storage()._cdata
    a.zero_()
    assert x.min() > 0


@pytest.mark.parametrize("variant", ["in-place", "in-place on a view"])
def test_the_argument_to_write_is_made_by_autograd(variant):
    inputs = Call(torch.Tensor.sin_, (leaf(),), variant=variant).inputs()
    assert inputs.args[0].grad_fn is not None
    assert [t.is_leaf for t in inputs.leaves] == [True]
    assert inputs.args[0]._is_view() is (variant != "in-place")
    assert len(inputs.tensors) == (1 if variant == "in-place" else 2)


def test_inputs_without_grad():
    inputs = Call(torch.sin, (leaf(),), {"other": [leaf()]}).inputs(requires_grad=False)
    assert not inputs.args[0].requires_grad
    assert not inputs.kwargs["other"][0].requires_grad


@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr])
def test_inputs_of_other_layouts(layout):
    x = torch.eye(3).to_sparse(layout=layout)
    (copied,) = Call(torch.sin, (x,)).inputs().args
    assert copied.layout is layout
    assert copied is not x


# What is seen.


def test_everything_is_the_same_on_stock_torch_twice():
    for fn in (lambda x: x.view(2, 2)[0].mul(2), lambda x: x.split(2), lambda x: x.view(5)):
        assert compare(fn, (leaf(),), under=nullcontext) == []


@pytest.mark.parametrize(
    ("a", "b", "expected"),
    [
        (torch.tensor([1.0, float("nan")]), torch.tensor([1.0, float("nan")]), True),
        (torch.tensor([1.0]), torch.tensor([1.0 + 1e-6]), False),
        (torch.tensor([1.0]), torch.tensor([1]), False),
        (torch.tensor([1.0]), torch.tensor([[1.0]]), False),
        (torch.eye(2).to_sparse(), torch.eye(2).to_sparse(), True),
        (torch.eye(2).to_sparse(), torch.eye(2), False),
        (torch.ones(1, dtype=torch.complex32), torch.ones(1, dtype=torch.complex32), True),
        (float("nan"), float("nan"), True),
        ([1, "a"], [1, "a"], True),
        ((1,), [1], False),
        (None, False, False),
    ],
)
def test_same(a, b, expected):
    assert same(a, b) is expected


def test_an_error_is_seen_without_its_addresses():
    seen = observe(Call(lambda x: x.view(3), (leaf(),)))
    assert seen["error"].startswith("RuntimeError: shape '[3]' is invalid")
    assert "out[0]._version" not in seen


FAULTS = {
    "value": (torch.exp, aten.exp.default, lambda f, a, k: f(*a, **k) + 1, "out[0].value"),
    "gradient": (torch.exp, aten.exp.default, lambda f, a, k: f(*a, **k) + 1, "grad[0]"),
    "stride": (
        lambda x: x.view(2, 2).exp(),
        aten.exp.default,
        lambda f, a, k: f(*a, **k).t().contiguous().t(),
        "out[0].stride",
    ),
    "view made a copy": (
        lambda x: x.view(2, 2),
        aten.view.default,
        lambda f, a, k: f(*a, **k).clone(),
        "out[0].storage",
    ),
    "version": (
        lambda x: torch._foreach_add_([x], 1),
        aten._foreach_add_.Scalar,
        lambda f, a, k: f(*a, **k),
        "in[0]._version",
    ),
    "error": (torch.exp, aten.exp.default, lambda f, a, k: f(), "error"),
}


@pytest.mark.parametrize(("fn", "op", "replace", "seen"), FAULTS.values(), ids=FAULTS.keys())
def test_a_fault_is_seen(fn, op, replace, seen):
    variant = "in-place" if "foreach" in str(op) else "function"
    assert compare(fn, (leaf(),), under=nullcontext, variant=variant) == []
    found = compare(fn, (leaf(),), under=faulty(op, replace), variant=variant, name="call")
    assert seen in what(found)
    assert all(d.call == "call" for d in found)
    assert "call: " in str(found[0])


def test_who_shares_a_counter_is_seen():
    found = compare(ours.secret, (leaf(),), under=NoOp)
    assert {"counter(out[0])", "out[0]._is_view", "out[0]._base", "out[0].grad_fn"} <= what(found)


def test_creation_meta_is_seen():
    def in_no_grad(x):
        with torch.no_grad():
            return x.view(4)

    class InNoGrad(NoOp):
        """Not a mode's doing, but nothing else changes creation_meta alone."""

        def __enter__(self):
            self.guard = torch.no_grad()
            self.guard.__enter__()
            return super().__enter__()

        def __exit__(self, *exc):
            super().__exit__(*exc)
            self.guard.__exit__(*exc)

    assert compare(in_no_grad, (leaf(),), under=NoOp) == []
    assert "out[0].creation_meta" in what(compare(lambda x: x.view(4), (leaf(),), under=InNoGrad))


# Below autograd.


@pytest.mark.parametrize(
    ("fn", "seen"),
    [
        (lambda x: x.view(2, 2), "below autograd, counter(out[0])"),
        (lambda x: x.add_(1), "below autograd, moves of in[0]"),
        (lambda x: torch._foreach_expm1_([x]), "below autograd, moves of in[0]"),
        (lambda x: x.detach(), "below autograd, counter(out[0])"),
        (ours.secret, "below autograd, counter(out[0])"),
    ],
    ids=["view", "in-place", "foreach", "detach", "library"],
)
def test_faults_below_are_seen_and_track_has_none(fn, seen):
    assert seen in what(compare_below(fn, (leaf(),), under=nullcontext))
    assert compare_below(fn, (leaf(),)) == []


@pytest.mark.parametrize(
    "fn",
    [
        lambda x: torch.unsafe_split(x, 2),
        lambda x: torch.zeros(0).set_(x),
        lambda x: torch.sparse_coo_tensor(torch.arange(4)[None], x)._values(),
        lambda x: aten._unsafe_view(x, [2, 2]),
    ],
)
def test_what_is_apart_on_stock_torch_may_be_apart_below(fn):
    assert compare_below(fn, (leaf(),)) == []


def test_view_metadata_below_is_seen():
    fn = vt.with_tracking(lambda x: x.view(2, 2))
    found = compare_below(fn, (leaf(),), under=nullcontext)
    assert what(found) == {"below autograd, out[0] carries view metadata"}


# A user's own ops: what any mode breaks and the tracker mends.

LIBRARY_OPS = {
    "view": (ours.head, "function"),
    "several views": (ours.heads, "function"),
    "functional": (ours.twice, "function"),
    "undeclared view": (ours.secret, "function"),
    "write": (ours.inc_, "in-place"),
    "write to a view": (ours.inc_, "in-place on a view"),
    "write to a list": (lambda x: ours.scale([x], None), "in-place"),
    "write to an optional": (lambda x: ours.scale([], x), "in-place on a view"),
}


@pytest.mark.parametrize(("fn", "variant"), LIBRARY_OPS.values(), ids=LIBRARY_OPS.keys())
def test_library_ops_are_as_on_stock_torch(fn, variant):
    assert compare(fn, (leaf(),), under=NoOp, variant=variant), "a mode alone is to break this"
    assert compare(fn, (leaf(),), variant=variant) == []
    assert compare_below(fn, (leaf(),), variant=variant) == []


class _Inside(NoOp):
    """A mode inside of a tracker."""

    views = "version"

    def __init__(self):
        super().__init__()
        self.tracker = vt.track(views=self.views)

    def __enter__(self):
        self.tracker.__enter__()
        return super().__enter__()

    def __exit__(self, *exc):
        super().__exit__(*exc)
        self.tracker.__exit__(*exc)


class _InsideFull(_Inside):
    views = "full"


@vt.tracked
class _Tracked(NoOp):
    __torch_dispatch__ = NoOp.__torch_dispatch__


HANDLERS = {"inside": _Inside, "inside full": _InsideFull, "tracked": _Tracked}


@pytest.mark.parametrize("mode", HANDLERS.values(), ids=HANDLERS.keys())
@pytest.mark.parametrize(("fn", "variant"), LIBRARY_OPS.values(), ids=LIBRARY_OPS.keys())
def test_library_ops_in_a_mode_that_passes_them_on(fn, variant, mode):
    assert compare(fn, (leaf(),), under=mode, variant=variant) == []


@pytest.mark.parametrize("guard", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("mode", HANDLERS.values(), ids=HANDLERS.keys())
@pytest.mark.parametrize(("fn", "variant"), LIBRARY_OPS.values(), ids=LIBRARY_OPS.keys())
def test_library_ops_in_a_mode_in_other_grad_modes(fn, variant, mode, guard):
    def guarded(x):
        with guard():
            return fn(x)

    assert compare(guarded, (leaf(),), under=mode, variant=variant) == []


def lstsq_gradient(x):
    """Rounded, since on stock torch too its last bits change from call to call."""
    (gradient,) = torch.autograd.grad(torch.linalg.lstsq(x, x.flip(0)).solution.abs().sum(), x)
    return torch.view_as_real(gradient).mul(99).round()


MODES_OF_AUTOGRAD = {"no_grad": torch.no_grad, "inference_mode": torch.inference_mode}


@pytest.mark.parametrize("guard", MODES_OF_AUTOGRAD.values(), ids=MODES_OF_AUTOGRAD.keys())
@pytest.mark.parametrize(
    ("fn", "variant"),
    [
        *LIBRARY_OPS.values(),
        (lambda x: x.view(2, 2), "function"),
        (lambda x: x.chunk(2), "function"),
        (lambda x: x.unflatten(0, (2, 2)), "function"),
        (lambda x: x.narrow(0, 1, 2), "function"),
        (lambda x: x.detach(), "function"),
        (lambda x: torch.dropout_(x, 0.5, True), "in-place"),
        (lambda x: torch._foreach_add_([x], 1), "in-place on a view"),
        (lambda x: torch.zeros(4).view(2, 2).add_(1), "function"),
    ],
)
def test_without_grad_and_in_inference_mode(guard, fn, variant):
    def guarded(x):
        with guard():
            return fn(x)

    assert compare(guarded, (leaf(),), variant=variant) == []


CONJUGATED = {
    "pinv": torch.linalg.pinv,
    "pinverse": torch.pinverse,
    "lstsq": lstsq_gradient,
}


@pytest.mark.parametrize("fn", CONJUGATED.values(), ids=CONJUGATED.keys())
def test_conjugated_views_inside_an_op_are_resolved(fn):
    torch.manual_seed(0)
    x = torch.randn(4, 3, dtype=torch.complex64, requires_grad=True)
    assert compare(fn, (x,), under=NoOp), "a mode alone is to get this wrong"
    assert compare(fn, (x,)) == []


def test_public_names():
    assert set(testing.__all__) == {n for n in vars(testing) if n in testing.__all__}
    assert {"compare", "compare_below", "Difference"} <= set(testing.__all__)


def test_what_stock_torch_gives_now_and_then_is_not_steady():
    made = itertools.count(1)

    def fickle(x):
        return x + (next(made) % 12 == 0)

    call = Call(fickle, (torch.ones(2),), {}, "fickle", "function")
    expected = observe(call)
    what = "out[0].value"
    found = Difference("fickle", what, expected[what], None)
    assert is_steady(call, found, runs=2)
    assert not is_steady(call, found, runs=100)
    assert is_steady(
        Call(torch.neg, (torch.ones(2),), {}, "neg", "function"),
        Difference("neg", what, -torch.ones(2), None),
        runs=100,
    )
