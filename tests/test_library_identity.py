"""What a custom op returns is the very object that the handler returned, as of a native op.

Tracers, caches and logs know a tensor by that object.
"""

import contextlib
import operator

import pytest
import torch
from library_ops import PassThrough, fresh
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._pytree import tree_leaves

import viewtrack as vt
from viewtrack import library

ONE = "(Tensor(a) x, SymInt n) -> Tensor(a)"
PAIR = "(Tensor(a) x, SymInt n) -> (Tensor(a), Tensor(a))"
LIST = "(Tensor(a -> *) x, SymInt n) -> Tensor(a)[]"
MIXED = "(Tensor(a) x, SymInt n) -> (Tensor(a), Tensor)"
NEW = "(Tensor x, SymInt n) -> Tensor"


def _without_grad(x, n):
    with torch.no_grad():
        return x[:n]


def _writes(x, n):
    x.mul_(2)
    return x[:n]


OPS = {
    "view": library.view_op(fresh(ONE), lambda x, n: x[:n]),
    "chain": library.view_op(fresh(ONE), lambda x, n: x[1:].narrow(0, 0, n)),
    "hidden": library.view_op(fresh(ONE), lambda x, n: x.detach()[:n]),
    "under no_grad": library.view_op(fresh(ONE), _without_grad),
    "opaque": library.view_op(fresh(ONE), lambda x, n: x[:n], opaque=True),
    "tuple": library.view_op(fresh(PAIR), lambda x, n: (x[:n], x[n:])),
    "half hidden": library.view_op(fresh(PAIR), lambda x, n: (x[:n], x.detach()[n:])),
    "list": library.view_op(fresh(LIST), lambda x, n: list(x.split(n))),
    "mixed": library.op(fresh(MIXED), lambda x, n: (x[:n], x * n)),
    "new": library.op(fresh(NEW), lambda x, n: x * n),
    "writes": library.op(fresh("(Tensor(a!) x, SymInt n) -> Tensor(a)"), _writes),
}
FORMULA = library.view_op(fresh(ONE), lambda x, n: x[:n])
FORMULA.register_autograd(
    lambda ctx, grad: (torch.nn.functional.pad(grad, (0, 4 - len(grad))), None)
)
OPS["formula"] = FORMULA
OPS["opaque"].register_fake(lambda x, n: x[:n])

ops = pytest.mark.parametrize("op", OPS.values(), ids=OPS)
states = pytest.mark.parametrize(
    "state", [torch.enable_grad, torch.no_grad, torch.inference_mode], ids=lambda s: s.__name__
)


class Keeping(PassThrough):
    """Keeps what it returned for an op."""

    def __init__(self, op):
        super().__init__()
        self.op = op
        self.kept = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = super().__torch_dispatch__(func, types, args, kwargs)
        if func is self.op:
            self.kept.append(out)
        return out


class Tracked(Keeping):
    __torch_dispatch__ = vt.tracked(Keeping.__torch_dispatch__)


def creation_meta(t):
    info = vt.view_info(t)
    return info and info.creation_meta


def same_objects(out, kept):
    out, kept = tree_leaves(out), tree_leaves(kept)
    return len(out) == len(kept) and all(map(operator.is_, out, kept))


@ops
@states
@pytest.mark.parametrize("requires_grad", [False, True])
def test_the_object_is_that_of_the_handler(op, state, requires_grad):
    base = torch.ones(4, requires_grad=requires_grad) * 1
    with state(), Keeping(op.op) as mode:
        out = op(base, 2)
    assert same_objects(out, mode.kept)


@ops
@pytest.mark.parametrize("views", ["version", "full"])
@pytest.mark.parametrize("order", ["above", "below"])
def test_the_object_is_that_of_the_handler_under_track(op, views, order):
    base = torch.ones(4, requires_grad=True) * 1
    with contextlib.ExitStack() as stack:
        if order == "below":
            stack.enter_context(vt.track(views=views))
        mode = stack.enter_context(Keeping(op.op))
        if order == "above":
            stack.enter_context(vt.track(views=views))
        out = op(base, 2)
    if order == "below":
        assert same_objects(out, mode.kept)
    assert all(t._base is base for t in tree_leaves(out) if t._is_view())


@ops
def test_the_object_is_that_of_a_handler_above_a_tracked_one(op):
    base = torch.ones(4, requires_grad=True) * 1
    with Tracked(op.op), Keeping(op.op) as mode:
        out = op(base, 2)
    assert same_objects(out, mode.kept)


@ops
def test_the_object_is_what_the_op_returns_without_a_handler(op):
    """Its history, creation_meta and counter are what they are without a mode."""
    results = []
    for manager in (contextlib.nullcontext(), Keeping(op.op)):
        leaf = torch.arange(1.0, 5.0, requires_grad=True)
        base = leaf * 1
        with manager:
            out = tree_leaves(op(base, 2))
        infos = [
            (t._is_view() and t._base is base, vt.version(t), t.grad_fn.name(), creation_meta(t))
            for t in out
        ]
        sum((t * t).sum() for t in out).backward()
        results.append((infos, leaf.grad.tolist()))
    assert results[0] == results[1]


@ops
def test_writes_to_base_and_view_reach_the_gradient_under_a_mode(op):
    grads = []
    for manager in (contextlib.nullcontext(), Keeping(op.op)):
        leaf = torch.arange(1.0, 5.0, requires_grad=True)
        base = leaf * 1
        with manager:
            out = tree_leaves(op(base, 2))
            if op is not OPS["list"]:  # such views go stale, as those of `split` do
                base.mul_(3)
            if len(out) == 1:
                out[0].mul_(5)
        (sum(t.sum() for t in out) + base.sum()).backward()
        grads.append(leaf.grad.tolist())
    assert grads[0] == grads[1]


@ops
@pytest.mark.parametrize("tracing_mode", ["real", "fake", "symbolic"])
@pytest.mark.parametrize("requires_grad", [False, True])
def test_make_fx_records_the_op_and_not_what_it_gave(op, tracing_mode, requires_grad):
    def program(x):
        return [t + 1 for t in tree_leaves(op(x * 1, 2))]

    given = torch.arange(1.0, 5.0, requires_grad=requires_grad)
    graph = make_fx(program, tracing_mode=tracing_mode)(given)
    assert [n.target for n in graph.graph.nodes].count(op.op) == 1
    other = torch.arange(10.0, 14.0)
    torch.testing.assert_close(graph(other), program(other))


def test_a_tensor_that_a_handler_refers_to_elsewhere_keeps_its_history():
    """Where C++ holds the handler's tensor, it cannot become another."""

    class Viewing(Keeping):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = super().__torch_dispatch__(func, types, args, kwargs)
            if func is self.op:
                with torch.overrides.enable_reentrant_dispatch():
                    self.view = out[:1]
            return out

    op = OPS["view"]
    leaf = torch.ones(4, requires_grad=True)
    base = leaf * 1
    with Viewing(op.op) as mode:
        out = op(base, 2)
    assert out._base is base
    out.mul_(3)
    assert mode.view.tolist() == [3]
    assert mode.view._version == 1
    base.sum().backward()
    assert leaf.grad.tolist() == [3, 3, 1, 1]
