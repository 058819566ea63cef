"""Kernels that must not see ADInplaceOrView on: under a `tracked` mode, against stock torch."""

from __future__ import annotations

import pytest
import torch
from handlers import NoOp

import viewtrack as vt


@vt.tracked
class Tracked(NoOp):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


class Outer(NoOp):
    """A handler that issues an op of its own, which reaches the tracked one below it."""

    def __init__(self, fn):
        super().__init__()
        self.fn = fn

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.exp.default:
            self.result = self.fn()
        return func(*args, **(kwargs or {}))


def coo():
    where = torch.tensor([[0, 1, 1, 0], [0, 0, 1, 0]])
    return torch.sparse_coo_tensor(where, torch.tensor([1.0, 2.0, 3.0, 4.0]), (2, 2))


def compressed(layout):
    block = (2, 2) if layout in (torch.sparse_bsr, torch.sparse_bsc) else None
    return torch.eye(4).mul(3).to_sparse(layout=layout, blocksize=block)


LAYOUTS = [torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc]
CALLS = {
    "softmax": (coo, lambda s: torch.sparse.softmax(s, 0)),
    "log_softmax": (coo, lambda s: torch.sparse.log_softmax(s, 1)),
    "mm": (coo, lambda s: torch.sparse.mm(s, s)),
    "pow": (coo, lambda s: s.coalesce().pow(2)),
    "div": (coo, lambda s: s / 2),
    **{
        f"{name} {layout}": (lambda layout=layout: compressed(layout), fn)
        for layout in LAYOUTS
        for name, fn in {
            "to_dense": lambda s: s.to_dense(),
            "to_csr": lambda s: s.to_sparse_csr() if "sparse_cs" in str(s.layout) else s * 2,
            "matmul": lambda s: s @ torch.ones(4, 2),
        }.items()
        if not (name == "matmul" and layout is torch.sparse_bsc)  # which torch does not have
    },
}


@pytest.mark.filterwarnings("ignore:Sparse")
@pytest.mark.parametrize("inside", [False, True], ids=["passed on", "issued in a handler"])
@pytest.mark.parametrize("name", CALLS)
def test_sparse_kernels(name, inside):
    make, fn = CALLS[name]
    want, s = fn(make()), make()
    with Tracked():
        if inside:
            outer = Outer(lambda: fn(s))
            with outer:
                torch.zeros(1).exp()
            got = outer.result
        else:
            got = fn(s)
    assert got.layout is want.layout
    assert torch.equal(got.to_dense(), want.to_dense())
    assert want.to_dense().any()
    assert s._version == 0


@pytest.mark.filterwarnings("ignore:Sparse")
def test_gradients_of_sparse_kernels():
    def gradients():
        w = torch.tensor([1.0, 2.0, 3.0, 4.0], requires_grad=True)
        s = torch.sparse_coo_tensor(torch.tensor([[0, 1, 1, 0], [0, 0, 1, 0]]), w, (2, 2))
        z = torch.sparse.mm(torch.sparse.softmax(s, 0), s.to_dense())
        c = torch.outer(w, w).to_sparse_csr()
        dense = c.to_dense()  # and then `c`, which it reads, is saved
        return torch.autograd.grad(z.pow(2).sum() + (c @ dense).sum() + dense.sum(), w)[0]

    want = gradients()
    with Tracked():
        assert torch.equal(gradients(), want)


def test_updates_beside_results():
    scale, zero = torch.ones(1), torch.zeros(1, dtype=torch.int32)
    on, low, high = torch.tensor([1]), torch.zeros(1), torch.ones(1)
    with Tracked():
        torch.fused_moving_avg_obs_fake_quant(
            torch.rand(4), on, on, low, high, scale, zero, 0.1, 0, 255, 0
        )
    assert scale.item() != 1
    assert [t._version for t in (low, high, scale, zero)] == [0, 0, 0, 0]


def test_write_to_an_inference_tensor():
    with torch.inference_mode(), Tracked():
        x = torch.ones(3)
        assert x.mul_(2) is x
        x.view(-1)[0].add_(1)
    assert x.tolist() == [3, 2, 2]


def test_composite_op_that_returns_its_argument_in_inference_mode():
    x = (torch.ones(4, requires_grad=True) * 1)[1:]
    with torch.inference_mode(), Tracked():
        assert x.flatten() is x
        assert x.to(torch.float32) is x
    assert x.requires_grad
    assert x._is_view()
