"""`tracked`: it hands back what stock torch hands back, and wrappers count as plain tensors do."""

from __future__ import annotations

import contextlib

import pytest
import torch
from handlers import NoOp, moves
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import return_and_correct_aliasing
from wrappers import make_wrapper

import viewtrack as vt


@vt.tracked
class Passing(NoOp):
    """Passes every op on."""

    __torch_dispatch__ = NoOp.__torch_dispatch__


@contextlib.contextmanager
def _both(outer, inner):
    with outer(), inner():
        yield


PLACES = {
    "alone": Passing,
    "over a no-op mode": lambda: _both(NoOp, Passing),
    "under a no-op mode": lambda: _both(Passing, NoOp),
    "twice": lambda: _both(Passing, Passing),
    "in track": lambda: _both(vt.track, Passing),
}
place = pytest.mark.parametrize("place", PLACES)


# ------------------------------------------------------------------------------ inference tensors

INFERENCE_VIEWS = {
    "slice": lambda t: t[:2],
    "view": lambda t: t.view(2, 2),
    "split": lambda t: t.split(2)[1],
    "unbind": lambda t: t.unbind()[0],
    "alias": lambda t: torch.ops.aten.alias(t),
    "unsqueeze": lambda t: t.unsqueeze(0),
    "view of a view": lambda t: t.view(2, 2)[0].t(),
    "real": lambda t: torch.view_as_complex(t.view(2, 2)).real,
}


def _facts(t):
    def of(call):
        try:
            call()
        except RuntimeError as error:
            return str(error)
        return "went through"

    return (
        t.is_inference(),
        t._is_view(),
        of(lambda: t._version),
        of(lambda: t.add_(1)),
        of(lambda: t.mul_(torch.ones((), requires_grad=True))),
        of(lambda: t * torch.ones((), requires_grad=True)),
        t.tolist(),
    )


@place
@pytest.mark.parametrize("name", INFERENCE_VIEWS)
def test_a_view_of_an_inference_tensor_is_one(name, place):
    with torch.inference_mode():
        base, same = torch.arange(4.0), torch.arange(4.0)
    want = _facts(INFERENCE_VIEWS[name](base))
    assert want[0]
    assert "Inplace update to inference tensor" in want[3]
    with PLACES[place]():
        got = _facts(INFERENCE_VIEWS[name](same))
    assert got == want


def test_a_list_without_views_is_taken():
    with Passing():
        assert list(torch.ones(0, 2).unbind()) == []


# ------------------------------------------------------------------------------ parts of wrappers


def _narrowed(base):
    starts, lengths = torch.tensor([0, 1]), torch.tensor([2, 2])
    return torch.nested.narrow(base, 1, starts, lengths, layout=torch.jagged)


def _from_jagged(base):
    offsets = torch.tensor([7, 0, 2, 5])[1:]  # a view, as the lengths of a narrowed one are
    return torch.nested.nested_tensor_from_jagged(base.view(6, 2)[:5], offsets)


@place
@pytest.mark.parametrize("make", [_narrowed, _from_jagged])
def test_nested_tensor_of_a_base_that_is_written(make, place):
    def run():
        p = torch.arange(12.0).reshape(2, 3, 2).requires_grad_()
        base = p * 1
        nested = make(base)
        base.mul_(2)
        nested.values().sin().sum().backward()
        assert nested._base is base
        return nested.values().detach().clone(), p.grad

    want = run()
    with PLACES[place]():
        got = run()
    torch.testing.assert_close(got, want)


def test_a_part_of_a_wrapper_comes_as_it_is():
    lengths = torch.tensor([2, 2])
    nested = _narrowed(torch.ones(2, 3, 2))
    nested._lengths = part = lengths.expand(2)
    with Passing():
        assert torch.ops.aten._nested_get_lengths(nested) is part


# ------------------------------------------------------------------------------ counts of wrappers

foreach = {
    "foreach": lambda w: torch._foreach_add_([w], 1.0),
    "foreach by name": lambda w: torch._foreach_mul_(self=[w], scalar=2.0),
    "foreach of a view": lambda w: torch._foreach_neg_([w[:2]]),
    "foreach twice in the list": lambda w: torch._foreach_add_([w, w], 1.0),
}


@pytest.mark.parametrize("name", foreach)
@pytest.mark.parametrize("place", ["alone", "no-op mode", "tracked mode", "track"])
@pytest.mark.parametrize("correct", [return_and_correct_aliasing, vt.correct_aliasing])
def test_wrapper_counts_what_no_kernel_above_counts(name, place, correct):
    places = {
        "alone": contextlib.nullcontext,
        "no-op mode": NoOp,
        "tracked mode": Passing,
        "track": vt.track,
    }
    w = vt.tracked(make_wrapper(flattens=True, correct=correct))(torch.ones(3))
    plain = torch.ones(3)
    foreach[name](plain)
    with places[place]():
        outer, inner = moves([w, w.e], lambda: foreach[name](w))
    assert outer >= 1
    assert inner == plain._version
    if name != "foreach twice in the list":
        assert outer == 1
    assert w.e.tolist() == plain.tolist()


def test_an_op_of_a_library_counts_on_a_wrapper():
    with torch.library._scoped_library("vt_handler_outputs", "FRAGMENT") as lib:
        lib.define("grow_(Tensor(a!) x) -> ()")

        def grow(x):
            x.add_(1)

        lib.impl("grow_", grow, "CPU")
        grow_ = torch.ops.vt_handler_outputs.grow_
        w = vt.tracked(make_wrapper(flattens=True, correct=return_and_correct_aliasing))(
            torch.ones(3)
        )
        assert moves([w], lambda: grow_(w)) == [1]
        assert w.e.tolist() == [2, 2, 2]


def test_what_a_handler_does_by_foreach_for_an_op_that_counts_is_counted_once():
    class ByForeach(NoOp):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if func is torch.ops.aten.add_.Tensor:
                torch._foreach_add_([args[0]], args[1])
                return args[0]
            return func(*args, **(kwargs or {}))

    w = vt.tracked(make_wrapper(flattens=True, correct=return_and_correct_aliasing))(torch.ones(3))
    with ByForeach():
        assert moves([w], lambda: w.add_(1)) == [1]


def test_a_fused_step_counts_nothing_as_on_plain_tensors():
    cls = vt.tracked(make_wrapper(flattens=True, correct=return_and_correct_aliasing))
    w, g, p = cls(torch.ones(3)), cls(torch.ones(3)), torch.ones(3)

    def step(t, grad):
        flags = {"nesterov": False, "maximize": False, "is_first_step": False}
        rates = {"lr": 0.5, "weight_decay": 0.0, "momentum": 0.0, "dampening": 0.0}
        torch._fused_sgd_([t], [grad], [], **rates, **flags)

    assert moves([p], lambda: step(p, torch.ones(3))) == [0]
    for context in (contextlib.nullcontext, vt.track):
        with context():
            assert moves([w, w.e], lambda: step(w, g)) == [0, 0]
    assert w.e.tolist() == [0, 0, 0]


# ------------------------------------------------------------------------------ traced graphs


def _write_to_a_view(x):
    y = x.sin()
    y.view(-1)[1:].mul_(2)
    return y.t()


@place
@pytest.mark.parametrize("mode", ["real", "fake", "symbolic"])
@pytest.mark.parametrize(
    "program",
    [
        lambda x: x.view(-1) + 1,
        lambda x: x.unbind()[0] + x.split(1)[1],
        _write_to_a_view,
        lambda x: torch.func.functionalize(_write_to_a_view)(x),
        lambda x: torch.autograd.grad((x.t() * x.t()).sum(), x)[0],
    ],
)
def test_a_traced_graph_has_the_views(program, mode, place):
    def trace():
        return make_fx(program, tracing_mode=mode)(torch.ones(2, 3, requires_grad=True))

    want = [str(node.target) for node in trace().graph.nodes]
    with PLACES[place]():
        traced = trace()
    got = [str(node.target) for node in traced.graph.nodes]
    x = torch.arange(6.0).reshape(2, 3).requires_grad_()
    torch.testing.assert_close(traced(x), program(x))
    assert not any("constant" in target for target in got)
    assert got == want
