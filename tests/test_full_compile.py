"""``track(views="full")`` and torch.compile: what compiled code is given is marked before."""

from __future__ import annotations

import pytest
import torch
from handlers import On

import viewtrack as vt

MUL = torch.ops.aten.mul.Tensor
VIEWS = {
    "slice": lambda t: t[1:],
    "split": lambda t: t.split(1)[1],
    "chunk": lambda t: t.chunk(2)[0],
    "permute": lambda t: t.T,
}


@pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS)
def test_first_asked_by_compiled_code(view):
    torch.compiler.reset()

    def run(make, fn):
        x = torch.arange(16.0).view(4, 4).requires_grad_()
        y, v = make(x)
        out = fn(v)
        facts = v._base is y, v.grad_fn.name()
        (out + y.sum()).backward()
        return facts, out.item(), x.grad.tolist()

    def kept(x):
        with On(MUL, view) as mode:
            y = x * 2
        return y, mode.kept[0]

    def native(x):
        y = x * 2
        return y, view(y)

    def fn(v):
        return (v * v).sum()

    with vt.track(views="full"):
        got = run(kept, torch.compile(fn, backend="eager"))
    assert got == run(native, fn)
