"""Kinds of tensors, tracked and on stock torch: meta, sparse, nested, quantized, lazy bits."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from against_stock import attempt, check, each_way, outcome, same
from handlers import NoOp

import viewtrack as vt

FakeTensorMode = pytest.importorskip("torch._subclasses.fake_tensor").FakeTensorMode


@each_way()
def test_meta(way):
    def program():
        x = torch.empty(4, 4, device="meta", requires_grad=True)
        y = (x @ x).view(-1)
        y[1:].add_(1)
        y.sum().backward()
        return y.shape, y._version, y._is_view(), x.grad.device.type, y.stride()

    check(way, program)


@each_way()
def test_fake_mode_inside(way):
    def program():
        with FakeTensorMode() as mode:
            x = torch.rand(4, 4)
            y = x.view(-1)
            y.add_(1)
            z = mode.from_tensor(torch.ones(2)) * 2
        return x._version, y._is_view(), y._base is x, list(y.shape), type(z).__name__

    check(way, program)


def test_fake_mode_outside():
    def program():
        x = torch.rand(4, 4)
        y = x.view(-1)
        y.add_(1)
        return x._version, y._is_view(), y._base is x, list(y.shape), type(y).__name__

    with FakeTensorMode():
        want = program()
    with FakeTensorMode(), vt.track():
        assert program() == want


@each_way()
def test_sparse_coo(way):
    def program():
        i = torch.tensor([[0, 1, 1], [2, 0, 2]])
        v = torch.rand(3, requires_grad=True)
        s = torch.sparse_coo_tensor(i, v, (2, 3))
        t = s.coalesce()
        before = t._version
        with torch.no_grad():
            t.values().mul_(2)
        moved = t._version - before
        torch.sparse.mm(s, torch.ones(3, 2)).sum().backward()
        u = torch.sparse_coo_tensor(i, torch.ones(3), (2, 3))
        u.add_(u)
        return moved, v.grad.clone(), u.to_dense(), u._version, t._values()._is_view()

    check(way, program)


@pytest.mark.filterwarnings("ignore:Sparse")
@each_way()
@pytest.mark.parametrize("layout", [torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr])
def test_sparse_compressed(way, layout):
    def program():
        dense = torch.eye(4) * 3
        block = (2, 2) if layout is torch.sparse_bsr else None
        s = dense.to_sparse(layout=layout, blocksize=block)
        before = s._version
        s.values().mul_(2)
        return s.to_dense(), s._version - before, (s @ torch.ones(4, 1)), s.values()._is_view()

    check(way, program)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@each_way()
@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
def test_nested(way, layout):
    def program():
        parts = [torch.rand(2, 3, requires_grad=True), torch.rand(4, 3, requires_grad=True)]
        n = torch.nested.as_nested_tensor(parts, layout=layout)
        m = (n * 2).sin()
        total = sum(t.sum() for t in m.unbind())
        total.backward()
        plain = torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)], layout=layout)
        error = outcome(lambda: plain.add_(1))
        values = plain.values() if layout is torch.jagged else plain.unbind()[0]
        before = values._version
        with torch.no_grad():
            values.add_(1)
        return [p.grad.clone() for p in parts], error, plain._version, values._version - before

    check(way, program)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
@each_way()
def test_quantized(way):
    def program():
        q = torch.quantize_per_tensor(torch.arange(6.0), 0.5, 2, torch.qint8)
        v = q.view(2, 3)
        w = v[1:]
        before = q._version
        w.copy_(q[:3].view(1, 3))
        return q.int_repr(), q._version - before, v._is_view(), v._base is q, q.dequantize()

    check(way, program)


@each_way()
def test_conj_and_neg(way):
    def program():
        z = torch.rand(3, dtype=torch.cfloat, requires_grad=True)
        y = z * 1
        c, im = y.conj(), y.conj().imag
        before = y._version
        c.mul_(2j)
        im.add_(1)
        r = torch.view_as_real(y)
        r[0].mul_(3)
        moved = [t._version - before for t in (y, c, im, r)]
        y.abs().sum().backward()
        return moved, z.grad, c.detach(), im.detach(), r.detach()

    check(way, program)


@each_way()
@pytest.mark.parametrize(
    "assign",
    [
        pytest.param(lambda a: a.__setitem__(slice(None), torch.conj(a)), id="a[:] = conj(a)"),
        pytest.param(lambda a: a.conj().__setitem__(slice(None), a), id="conj(a)[:] = a"),
        pytest.param(lambda a: a.copy_(a.conj()), id="copy_"),
    ],
)
def test_assigning_a_lazy_conjugate_to_its_own_base(way, assign):
    """pytorch#106051: values are those of stock torch, right or wrong."""

    def program():
        a = torch.tensor([1 + 2j, 3 - 1j])
        assign(a)
        return a.resolve_conj()

    check(way, program)


def test_unsafe_view_of_a_lazy_conjugate():
    """pytorch#60478: a copy there, which the tracker does not take for an alias."""
    a = torch.tensor([1 + 1j]).conj()
    with vt.track() as tracker:
        b = torch.ops.aten._unsafe_view(a, [1])
        c = torch.ops.aten._unsafe_view(torch.ones(2, 2), [4])
        aliased = b.data_ptr() == a.data_ptr()
        b.add_(1)
        assert a._version == (1 if aliased else 0)
        assert c._version == 0
        v = torch.ones(2, dtype=torch.cfloat).conj()
        v.view(2).add_(1)
        im = torch.ones(2, dtype=torch.cfloat)
        im.conj().imag.add_(1)
    assert (v._version, im._version) == (1, 1)
    assert "aten._unsafe_view.default" in tracker.undeclared_aliases


@each_way("tracked")  # a handler that passes composite ops on is wrong here, under any mode
def test_complex_linear_algebra(way):
    def program():
        z = torch.randn(3, 3, dtype=torch.cdouble, requires_grad=True)
        y = torch.linalg.pinv(z).mH @ z.mT
        (g,) = torch.autograd.grad(y.abs().sum(), z)
        return y.detach().clone(), g.clone()

    check(way, program)


@each_way()
def test_numpy_shares_memory(way):
    def program():
        a = np.zeros(3, dtype=np.float32)
        t = torch.from_numpy(a)
        t[1:].add_(2)
        t.numpy()[0] = 5
        return a.tolist(), t._version

    check(way, program)


@each_way()
def test_storage_surgery(way):
    def program():
        x = torch.arange(6.0)
        y, z = torch.zeros(2), torch.zeros(3)
        before = y._version, z._version
        y.set_(x.untyped_storage(), 2, (2,), (1,))
        y.add_(10)
        z.resize_(5)
        w = torch.ones(3)
        w.untyped_storage().resize_(0)
        w.untyped_storage().resize_(12)
        w.fill_(2)
        moved = y._version - before[0], z._version - before[1]
        return x, moved, list(z.shape), w

    check(way, program)


@each_way()
def test_numbers_and_prints(way):
    def program():
        x = torch.arange(4.0, requires_grad=True)
        y = (x * 2).view(2, 2)
        return repr(y), f"{y[0, 0]:.2f}", y.tolist(), float(y.sum()), bool(y[0, 0] == 0), len(y)

    check(way, program)


@each_way()
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_autocast(way):
    def program():
        net = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU(inplace=True))
        x = torch.rand(2, 4, requires_grad=True)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            h = net(x)
            w = (h @ h.t()).view(-1)
            w[1:].mul_(2)
        w.float().sum().backward()
        return (
            str(h.dtype),
            w.detach().clone(),
            x.grad.clone(),
            w._version,
            outcome(lambda: w[0].add_(1)),
        )

    check(way, program)


@each_way()
def test_functional_results_are_the_same_objects(way):
    def program():
        x = torch.ones(3)
        out = torch.empty(3)
        return (
            x.add_(1) is x,
            torch.add(x, 1, out=out) is out,
            x.contiguous() is x,
            x.to(x.dtype) is x,
        )

    assert check(way, program) == (True, True, True, True)


def test_same():
    """The comparison itself sees a difference."""
    with pytest.raises(AssertionError):
        same(torch.ones(2).add_(1), torch.ones(2) * 2)
    with pytest.raises(AssertionError):
        same([torch.ones(2)], [torch.zeros(2)])
    with pytest.raises(AssertionError):
        same({"a": 1}, {"a": 2})


def test_lazy_device():
    """A lazy tensor has no storage; asking for one kills the process. What it does is stock's."""
    backend = pytest.importorskip("torch._lazy.ts_backend")
    try:
        backend.init()
    except RuntimeError:
        pytest.skip("no lazy backend here")

    def program():
        t = torch.ones(3, 3, device="lazy")
        attempt(lambda: torch.add(t, 1, out=torch.ones(3, 3, device="lazy")))
        return attempt(lambda: t.__setitem__(torch.tensor([0, 2], device="lazy"), 0))

    with NoOp():
        want = program()
    with vt.track():
        got = program()
    assert str(got).split(":")[0] == str(want).split(":")[0]


class Plain(torch.Tensor):
    """A subclass without a handler: only its ``__torch_function__`` knows of it."""


GRADIENTS = {
    "view": lambda x: x.view(-1),
    "t": lambda x: x.t(),
    "expand": lambda x: x.expand(2, 4, 6),
    "unsafe_view": lambda x: torch.ops.aten._unsafe_view(x, [3, 8]),
    "matmul": lambda x: x.view(2, 2, 6) @ torch.ones(6, 3),
    "stack": lambda x: torch.stack([x, x * 2]),  # a list of views in backward
    "cat": lambda x: torch.cat([x, x * 2]),
    "split": lambda x: torch.cat([*x.split(2)][::-1]),
}


@each_way()
@pytest.mark.parametrize("op", GRADIENTS)
def test_a_gradient_of_a_plain_subclass(op, way):
    """In backward its ``__torch_function__`` is on, and wraps what the ops below return."""

    def program():
        x = torch.ones(4, 6, requires_grad=True)
        y = GRADIENTS[op](x)
        y.backward(torch.ones_like(y).as_subclass(Plain))
        return x.grad.tolist()

    check(way, program)
