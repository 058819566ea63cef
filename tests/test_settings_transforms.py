"""Forward AD and torch.func, under trackers and with trackers inside, against stock torch."""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.autograd.forward_ad as fwad
from against_stock import attempt, check, each_way, same
from torch.func import functionalize, grad, hessian, jacfwd, jacrev, jvp, vjp, vmap

import viewtrack as vt


@each_way()
def test_tangents_through_views_and_writes(way):
    def program():
        with fwad.dual_level():
            x = fwad.make_dual(torch.rand(4), torch.rand(4))
            y = x * 2
            y[1:].mul_(3)
            y.view(2, 2)[0].copy_(x[2:])
            v = y[:2]
            base = torch.zeros(4)
            part = base[1:3]
            part.add_(x[:2])
            return [fwad.unpack_dual(t) for t in (y, v, base, part)]

    check(way, lambda: [list(dual) for dual in program()])


@each_way()
def test_forward_over_reverse(way):
    def program():
        x = torch.rand(3, requires_grad=True)
        with fwad.dual_level():
            d = fwad.make_dual(x, torch.ones(3))
            y = (d * d).view(3)
            y[1:].sin_()
            (g,) = torch.autograd.grad(y.sum(), x, create_graph=True)
            return [t.detach().clone() for t in fwad.unpack_dual(g)]

    check(way, program)


def _f(x):
    y = x * 2
    y[1:].mul_(x[:-1])
    return y.view(-1).sin().sum() * y[0]


TRANSFORMS = [
    ("grad", lambda x: grad(_f)(x)),
    ("vjp", lambda x: vjp(_f, x)[1](torch.ones(()))),
    ("jvp", lambda x: jvp(_f, (x,), (torch.ones_like(x),))),
    ("jacrev", lambda x: jacrev(_f)(x)),
    ("jacfwd", lambda x: jacfwd(_f)(x)),
    ("hessian", lambda x: hessian(_f)(x)),
    ("vmap", lambda x: vmap(_f)(torch.stack([x, x + 1]))),
    ("vmap of grad", lambda x: vmap(grad(_f))(torch.stack([x, x + 1]))),
    ("grad of vmap", lambda x: grad(lambda t: vmap(_f)(t).sum())(torch.stack([x, x + 1]))),
    ("jvp of jvp", lambda x: jvp(lambda t: jvp(_f, (t,), (t,))[1], (x,), (x,))),
    ("functionalize", lambda x: functionalize(_f)(x)),
    ("functionalize of grad", lambda x: functionalize(grad(_f))(x)),
    ("grad of functionalize", lambda x: grad(functionalize(_f))(x)),
]
transforms = pytest.mark.parametrize(
    "transform", [t for _, t in TRANSFORMS], ids=[name for name, _ in TRANSFORMS]
)


@each_way("site off")
@transforms
def test_transform_under_a_tracker(way, transform):
    check(way, lambda: transform(torch.rand(3)))


@transforms
def test_tracker_in_the_transformed_function(transform, monkeypatch):
    x = torch.rand(3)
    want = transform(x)
    inner = _f
    monkeypatch.setitem(globals(), "_f", vt.track()(inner))
    same(transform(x), want)


def _head_after_write(buf, val):
    work = torch.zeros_like(buf)
    last = work.select(-1, -1)
    work.add_(buf).mul_(val)
    return last


def test_vmap_of_a_jvp_through_a_view_of_a_written_base():
    """functorch#999: the tangent of a view, rebuilt; equal to the loop on torch 2.13."""

    def one(buf, val, tan):
        return jvp(partial(_head_after_write, buf), (val,), (tan,))[1]

    n = 3
    buf, val, tan = torch.rand(2, n, 5), torch.rand(2, 5, n), torch.rand(2, 5, n)
    loop = torch.stack([one(buf[:, i], val[..., i], tan[..., i]) for i in range(n)])

    def batched():
        return vmap(one, in_dims=(1, 2, 2))(buf, val, tan)

    want, got = attempt(batched), attempt(vt.track()(batched))
    same(got, want)
    if isinstance(want, torch.Tensor):
        torch.testing.assert_close(got, loop)


class _Double(torch.autograd.Function):
    @staticmethod
    def forward(x):
        return x.mul_(2)

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.mark_dirty(inputs[0])

    @staticmethod
    def backward(ctx, g):
        return g * 2

    @staticmethod
    def jvp(ctx, t):
        return t.mul_(2)


def test_jvp_of_a_function_that_writes_its_input():
    """pytorch#91280: no worse than stock, whatever stock makes of it."""

    def program():
        return jvp(lambda t: _Double.apply(t.clone()), (torch.ones(2),), (torch.ones(2),))

    same(attempt(vt.track()(program)), attempt(program))


@each_way()
def test_nested_levels_are_refused_as_on_stock(way):
    def program():
        with fwad.dual_level():
            x = fwad.make_dual(torch.ones(2), torch.ones(2))
            refused = attempt(lambda: fwad.dual_level().__enter__())
            x.mul_(3)  # the outer level goes on
            return refused, list(fwad.unpack_dual(x.view(2, 1)))

    (refused, (primal, tangent)) = check(way, program)
    assert "Nested forward mode AD is not supported" in str(refused)
    assert primal.tolist() == tangent.tolist() == [[3.0], [3.0]]
