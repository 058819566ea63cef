"""Custom ops under torch.compile, torch.export, make_fx, fake tensors and opcheck."""

import pytest
import torch
from library_ops import HEADS, RAW, axpy_, formula_zero_, fresh, head, raw_clear, raw_zero_
from torch.fx.experimental.proxy_tensor import make_fx

from viewtrack import ViewTrackError, library

BACKENDS = ["aot_eager", pytest.param("inductor", marks=pytest.mark.heavy)]


@pytest.fixture(autouse=True)
def _forget_compiled_code():
    torch._dynamo.reset()


def run(fn, *inputs):
    leaves = [x.clone().requires_grad_() for x in inputs]
    out = fn(*leaves)
    out.sum().backward()
    return out.detach(), [leaf.grad for leaf in leaves]


def same_compiled(fn, backend, *inputs):
    expected = run(fn, *inputs)
    found = run(torch.compile(fn, backend=backend, fullgraph=True), *inputs)
    torch.testing.assert_close(found, expected)


TRACED = {name: head for name, head in HEADS.items() if name != "inference"}


@pytest.mark.parametrize("head", TRACED.values(), ids=TRACED)
@pytest.mark.parametrize("backend", BACKENDS)
def test_views_and_in_place_ops_on_them(head, backend):
    def fn(x):
        base = x * 1
        view = head(base, 2)
        view.mul_(3)
        base.mul_(2)
        return base**2 + view.sum()

    same_compiled(fn, backend, torch.arange(1.0, 5))


# torch 2.6 stumbles over it by itself, and names the op too.
SAYS_INFERENCE = r"inference_head.*enters inference_mode.*no_grad|While executing %inference_head"


def test_a_body_in_inference_mode_is_refused_by_name():
    fn = torch.compile(lambda x: HEADS["inference"](x * 1, 2).sum(), backend="aot_eager")
    with pytest.raises(Exception, match=SAYS_INFERENCE):
        fn(torch.ones(4, requires_grad=True))


@pytest.mark.parametrize("backend", BACKENDS)
def test_writes(backend):
    def fn(x, y):
        base = x * 2
        axpy_(head(base, 2), y.exp(), 3)
        formula_zero_(base[2:])
        return base * x

    same_compiled(fn, backend, torch.arange(1.0, 5), torch.arange(2.0))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("op", [raw_zero_, raw_clear, axpy_], ids=str)
@pytest.mark.parametrize("grad_mode", [torch.enable_grad, torch.no_grad])
def test_an_input_that_is_written(op, backend, grad_mode):
    rest = (torch.ones(3), 2) if op is axpy_ else ()

    def fn(x):
        op(x, *rest)
        return x + 1

    eager, compiled = torch.ones(3), torch.ones(3)
    with grad_mode():
        expected = fn(eager)
        found = torch.compile(fn, backend=backend, fullgraph=True)(compiled)
    assert compiled.tolist() == eager.tolist()
    assert found.tolist() == expected.tolist()
    assert compiled._version > 0


def test_a_raw_write_without_a_formula_is_refused_where_a_gradient_is_asked_for():
    def fn(x):
        return raw_zero_(x * 1)

    with pytest.raises(Exception, match="register_autograd"):
        run(torch.compile(fn, backend="aot_eager", fullgraph=True), torch.ones(3))


def test_lists_and_mixtures():
    parts = library.view_op(fresh("(Tensor(a -> *) x) -> Tensor(a)[]"), lambda x: list(x.unbind()))

    @library.op(fresh("(Tensor(a!) cache, Tensor new, SymInt pos) -> Tensor(a)"))
    def append(cache, new, pos):
        cache.narrow(0, pos, new.shape[0]).copy_(new)
        return cache.narrow(0, 0, pos + new.shape[0])

    def fn(x):
        cache = x.new_zeros(8)
        filled = append(cache, x * 2, 1)
        filled.add_(1)
        first, *_ = parts(x * 3)
        return cache * first

    same_compiled(fn, "aot_eager", torch.arange(1.0, 5))


def test_sizes_stay_symbolic():
    @library.view_op(fresh("(Tensor(a) x, SymInt n) -> Tensor(a)"))
    def first(x, n):
        return x[:n]

    compiled = torch.compile(
        lambda x: first(x * 2, x.shape[0] // 2) + 1, backend="aot_eager", dynamic=True
    )
    for n in (4, 6, 10):
        x = torch.arange(float(n))
        assert compiled(x).tolist() == (x[: n // 2] * 2 + 1).tolist()


def test_a_functional_op_of_raw_memory():
    @library.op(fresh("(Tensor x) -> Tensor"))
    def double(x):
        return torch.from_numpy(x.detach().numpy() * 2)

    fn = torch.compile(lambda x: double(x) + 1, backend="aot_eager", fullgraph=True)
    with pytest.raises(Exception, match="register_fake"):
        fn(torch.ones(2))
    double.register_fake(lambda x: torch.empty_like(x))
    double.register_autograd(lambda ctx, grad: grad * 2)
    torch._dynamo.reset()
    assert run(fn, torch.ones(2))[1][0].tolist() == [2, 2]


class Edits(torch.nn.Module):
    def forward(self, x):
        base = x * 2
        head(base, 2).mul_(3)
        raw_zero_(base[3:])
        return base + axpy_(x.clone(), x, 2)


@pytest.mark.parametrize("strict", [False, pytest.param(True, marks=pytest.mark.heavy)])
def test_export(strict):
    x = torch.arange(1.0, 5)
    exported = torch.export.export(Edits(), (x,), strict=strict)
    torch.testing.assert_close(exported.module()(x), Edits()(x))
    assert head.op in [node.target for node in exported.graph.nodes]
    decomposed = exported.run_decompositions()
    torch.testing.assert_close(decomposed.module()(x), Edits()(x))
    assert head.op not in [node.target for node in decomposed.graph.nodes]


@pytest.mark.parametrize("tracing_mode", ["real", "fake"])
def test_make_fx_keeps_the_ops_whole(tracing_mode):
    graph = make_fx(Edits(), tracing_mode=tracing_mode)(torch.ones(4)).graph
    targets = [node.target for node in graph.nodes]
    assert {head.op, raw_zero_.op, axpy_.op} <= set(targets)


def test_fake_and_meta_tensors():
    for x in (torch.ones(4, device="meta"), _fake()):
        assert head(x, 2).shape == (2,)
        assert head(x, 2)._base is x
        assert raw_zero_(x) is x
        assert x._version == 1


def _fake():
    with torch._subclasses.FakeTensorMode():
        return torch.ones(4)


def test_a_fake_implementation():
    op = library.view_op(
        fresh("(Tensor(a) x) -> Tensor(a)"), lambda x: x.detach()[: int(x[0].item())]
    )
    x = _fake()
    with pytest.raises(ViewTrackError, match="register_fake"):
        op(x)
    op.register_fake(lambda x: x[:1])
    assert op(x).shape == (1,)
    op.register_fake(lambda x: x.new_empty(1))
    with pytest.raises(ViewTrackError, match="a view of `x`"):
        op(x)


ops = {
    "head": (lambda: head, lambda: (torch.ones(4, requires_grad=True), 2)),
    "hidden": (lambda: HEADS["hidden"], lambda: (torch.ones(4, requires_grad=True), 2)),
    "formula": (lambda: HEADS["formula"], lambda: (torch.ones(4, requires_grad=True), 2)),
    "axpy_": (lambda: axpy_, lambda: (torch.ones(4), torch.ones(4))),
    "list": (
        lambda: library.view_op(
            fresh("(Tensor(a -> *) x) -> Tensor(a)[]"), lambda x: list(x.unbind())
        ),
        lambda: (torch.ones(4, requires_grad=True),),
    ),
    **{f"raw, {name}": (lambda op=op: op, lambda: (torch.ones(4),)) for name, op in RAW.items()},
}


@pytest.mark.heavy
@pytest.mark.parametrize(("op", "args"), ops.values(), ids=ops)
def test_opcheck(op, args):
    torch.library.opcheck(op().op, args())


@pytest.mark.parametrize(("op", "args"), ops.values(), ids=ops)
def test_opcheck_of_schema_and_registration(op, args):
    utils = ("test_schema", "test_autograd_registration", "test_faketensor")
    torch.library.opcheck(op().op, args(), test_utils=utils)


@pytest.mark.parametrize("op", [raw_zero_, raw_clear, axpy_], ids=str)
@pytest.mark.parametrize("inside", [False, True], ids=["normal tensor", "inference tensor"])
def test_inference_mode(op, inside):
    rest = (torch.ones(3), 2) if op is axpy_ else ()

    def fn(x):
        op(x, *rest)
        return head(x, 2) + 1

    eager, compiled = torch.ones(3), torch.ones(3)
    with torch.inference_mode():
        if inside:
            eager, compiled = torch.ones(3), torch.ones(3)
        expected = fn(eager)
        found = torch.compile(fn, backend="aot_eager", fullgraph=True)(compiled)
    assert compiled.tolist() == eager.tolist()
    assert found.tolist() == expected.tolist()
