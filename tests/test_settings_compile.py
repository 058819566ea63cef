"""Compilers, tracers and higher-order ops, under trackers and on stock torch."""

from __future__ import annotations

import contextlib
import warnings

import pytest
import torch
import torch._dynamo.testing
from against_stock import alone, attempt, check, each_way, same
from handlers import NoOp
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode

import viewtrack as vt
from viewtrack.observing import ObservingTracker


@pytest.fixture(autouse=True)
def fresh():
    torch._dynamo.reset()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
    torch._dynamo.reset()


def _f(x):
    y = x * 2
    v = y.view(-1)
    v[1:].add_(1)
    return y.sin(), v


OLD = tuple(map(int, torch.__version__.split(".")[:2])) < (2, 9)
BACKENDS = ["eager", "aot_eager", pytest.param("inductor", marks=pytest.mark.heavy)]


def _gradients(fn):
    x = torch.rand(2, 2, requires_grad=True)
    y, v = fn(x)
    (y.sum() + v.sum()).backward()
    return y.detach().clone(), v.detach().clone(), x.grad.clone()


@pytest.mark.parametrize("backend", BACKENDS)
@each_way("site off", "tracked")
def test_called_inside(way, backend):
    """A handler of the user's makes torch.compile run eagerly; a tracker alone does not."""
    counter = torch._dynamo.testing.CompileCounterWithBackend(backend)
    check(way, lambda: _gradients(torch.compile(_f, backend=counter)))
    assert counter.frame_count >= 1


@pytest.mark.parametrize("backend", BACKENDS)
@alone
def test_compiled_before(way, backend):
    counter = torch._dynamo.testing.CompileCounterWithBackend(backend)
    compiled = torch.compile(_f, backend=counter)
    _gradients(compiled)
    check(way, lambda: _gradients(compiled))
    assert counter.frame_count <= 2  # once more at most, for the mode that is on the stack then


@pytest.mark.parametrize("backend", BACKENDS)
def test_tracker_inside_of_the_compiled_function(backend):
    def inside(x):
        with vt.track():
            return _f(x)

    torch.manual_seed(0)
    want = _gradients(_f)
    torch.manual_seed(0)
    same(_gradients(torch.compile(inside, backend=backend)), want)


@alone
def test_graphs_are_those_of_stock(way):
    def program():
        seen = []

        def backend(graph, inputs):
            seen.append([str(node.target) for node in graph.graph.nodes])
            return graph

        _gradients(torch.compile(_f, backend=backend, fullgraph=True))
        return seen

    check(way, program)


@pytest.mark.skipif(OLD, reason="torch 2.6 compiles it otherwise as soon as a mode is active")
@alone
def test_view_without_grad_of_an_intermediate(way):
    """Returns what eager returns: requires_grad, no grad_fn, a view."""

    def f(x):
        y = x * 2
        with torch.no_grad():
            v = y[0]
        return y, v

    def program():
        return attempt(
            lambda: list(torch.compile(f, backend="aot_eager")(torch.ones(3, requires_grad=True)))
        )

    check(way, program)
    with vt.track():
        _, v = f(torch.ones(3, requires_grad=True))
    info = vt.view_info(v)
    assert info is not None
    assert (info.requires_grad, info.has_grad_fn, info.base is not None) == (True, False, True)
    assert info.creation_meta is vt.CreationMeta.NO_GRAD_MODE


class _Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(2, 2)
        self.register_buffer("count", torch.zeros(1))

    def forward(self, x):
        self.count.add_(1)
        return self.linear(x).view(-1).add_(1)


@alone
def test_export(way):
    def program():
        program = torch.export.export(_Net(), (torch.ones(2, 2),))
        return str(program.graph), program.module()(torch.ones(2, 2)).detach()

    check(way, program)


@pytest.mark.parametrize("tracing_mode", ["real", "fake", "symbolic"])
@each_way("tracked", "handler", "full")
def test_make_fx_records_no_more_nodes(way, tracing_mode):
    def program():
        graph = make_fx(_f, tracing_mode=tracing_mode)(torch.ones(2, 2))
        return [str(node.target) for node in graph.graph.nodes]

    check(way, program)


def test_make_fx_of_a_tracked_function_records_no_more_nodes():
    def targets(fn):
        return [str(node.target) for node in make_fx(fn)(torch.ones(2, 2)).graph.nodes]

    assert targets(vt.track()(_f)) == targets(_f)


@alone
def test_aot_function(way):
    def program():
        from functorch.compile import aot_function, nop

        seen = []

        def keep(graph, inputs):
            seen.append([str(node.target) for node in graph.graph.nodes])
            return nop(graph, inputs)

        result = _gradients(aot_function(_f, fw_compiler=keep, bw_compiler=keep))
        return result, seen

    check(way, program)


@alone
def test_jit_script(way):
    def program():
        return torch.jit.script(torch.nn.Linear(2, 2))(torch.ones(1, 2)).detach()

    check(way, program)


def _uses_sizes(x):
    return x.view(x.size(0), -1) * x.size(1) + x // x.shape[0]


@pytest.mark.parametrize("fn", [_f, _uses_sizes])
@pytest.mark.parametrize("dtype", [torch.float32, torch.int32])
@each_way("handler", "full", "tracked")
def test_jit_trace(way, fn, dtype):
    """Torch checks a trace by running it; its interpreter hands sizes to handlers as numbers."""

    def program():
        traced = torch.jit.trace(fn, (torch.ones(2, 3, dtype=dtype),))
        nodes = [node.kind() for node in traced.graph.nodes()]
        return nodes, traced(torch.full((4, 3), 3, dtype=dtype))

    check(way, program)


def test_jit_trace_under_a_handler_of_the_users_fails_as_on_stock():
    def program():
        return attempt(lambda: torch.jit.trace(_f, (torch.ones(2, 2),)))

    with NoOp():
        want = program()
    with vt.track(), NoOp():
        got = program()
    assert got == want
    assert "instead found type 'int'" in got


@pytest.mark.parametrize(
    "tracker", [vt.track(), vt.track(views="full"), ObservingTracker("site", lambda *_: None)]
)
def test_a_traced_function_that_was_made_before(tracker):
    traced = torch.jit.trace(_uses_sizes, (torch.ones(2, 3),))
    x = torch.rand(4, 3, requires_grad=True)
    want = traced(x)
    with tracker:
        same(traced(x), want)


@pytest.mark.parametrize(
    "fn",
    [
        lambda number, x: number.view(1),  # as torch does to print a graph
        lambda number, x: torch.embedding(x, number),
        lambda number, x: x.copy_(number),
        lambda number, x: torch.gather(x, 1, number.expand(2, 1)),
    ],
)
@pytest.mark.parametrize("record", ["none", "site"])
def test_the_constants_of_a_trace_come_to_handlers_as_numbers(fn, record):
    graph = torch.jit.trace(lambda x: x * 1, (torch.ones(2, 3),)).graph
    (number,) = [
        node.t("value")
        for node in graph.findAllNodes("prim::Constant")
        if node.hasAttribute("value") and node.kindOf("value") == "t"
    ]
    x = torch.rand(2, 3)
    want = fn(number, x.clone())
    with vt.track(record=record):
        same(fn(number, x.clone()), want)


@pytest.mark.skipif(
    torch.__version__ < (2, 7), reason="torch 2.6 gives no mode of a user's a higher-order op"
)
@pytest.mark.parametrize("known", [True, False])
def test_what_the_handler_of_a_higher_order_op_writes_counts_once(known):
    """Python calls it, and the kernels that count are still there."""
    moved = []

    class Counting(TorchDispatchMode):
        supports_higher_order_operators = True

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if func is torch.ops.higher_order.cond:
                t = torch.zeros(4)
                view = t.view(2, 2)
                t.add_(1)
                t.mul_(2)
                moved.append((t._version, view._version))
            return func(*args, **(kwargs or {}))

    if not known:  # its frame then does not tell what it was called for
        handler = Counting.__torch_dispatch__
        Counting.__torch_dispatch__ = lambda *given: handler(*given)
    for tracker in (contextlib.nullcontext(), vt.track(record="none"), vt.track()):
        with tracker, Counting():
            torch.ops.higher_order.cond(torch.tensor(True), torch.sin, torch.cos, (torch.ones(2),))
    assert moved == [(2, 2)] * 3


def test_errors_about_numbers_stay_those_of_stock():
    def program():
        return [
            attempt(lambda: torch.ops.aten.view.default(2, [2])),
            attempt(lambda: torch.ops.aten.sin.default(None)),
            attempt(lambda: torch.ones(2).view(3)),
        ]

    check("track", program)


def test_symbolic_trace():
    graph = torch.fx.symbolic_trace(_Net())
    with vt.track():
        out = graph(torch.ones(2, 2))
    assert out.shape == (4,)
    assert out._version == 1


# ------------------------------------------------------------------------------ higher-order ops


def _cond():
    x = torch.rand(3, requires_grad=True)
    y = torch.cond(x.sum() > 0, lambda t: t.sin(), lambda t: t.cos(), (x,))
    y.sum().backward()
    return y.detach().clone(), x.grad.clone()


def _while_loop():
    from torch._higher_order_ops import while_loop

    return while_loop(
        lambda n, x: n < 3, lambda n, x: (n + 1, x * 2), (torch.tensor(0), torch.ones(2))
    )


def _map():
    from torch._higher_order_ops import map as torch_map

    return torch_map(lambda row: row.sin() + 1, torch.rand(3, 2))


def _scan():
    from torch._higher_order_ops import scan

    return scan(lambda carry, x: (carry + x, carry * x), torch.zeros(2), torch.rand(3, 2))


def _flex_attention():
    from torch.nn.attention.flex_attention import flex_attention

    q, k, v = (torch.rand(1, 1, 4, 8) for _ in range(3))
    return flex_attention(q, k, v, score_mod=lambda score, b, h, m, n: score + (m - n))


@pytest.mark.parametrize("program", [_cond, _while_loop, _map, _scan, _flex_attention])
@alone
@pytest.mark.skipif(OLD, reason="torch 2.6 has no rule for these under any dispatch mode")
def test_higher_order_op(way, program):
    check(way, lambda: attempt(program))
