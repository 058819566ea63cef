"""``track(views="full")`` while native code holds the mutex of a view, to replay it.

Native makes the grad_fn, or the tangent, of a view anew by ops that handlers see, and holds the
view's mutex meanwhile. A thread that then marks a view of that same view waits for ever, so each
program here runs in a thread of its own.
"""

from __future__ import annotations

import faulthandler
import threading

import pytest
import torch
from handlers import On
from torch.autograd import forward_ad
from torch.utils._python_dispatch import TorchDispatchMode

import viewtrack as vt


class Keeps(TorchDispatchMode):
    """Keeps views of each result."""

    def __init__(self):
        super().__init__()
        self.kept = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor):
            self.kept += [out.view_as(out), out.unsqueeze(0)]
        return out


def ended(program):
    """What `program` returned, in a thread that it may leave hanging."""
    found = []
    thread = threading.Thread(target=lambda: found.append(program()), daemon=True)
    thread.start()
    faulthandler.dump_traceback_later(120, exit=True)  # where it waits with the GIL
    thread.join(60)
    faulthandler.cancel_dump_traceback_later()
    assert not thread.is_alive(), "waits for a mutex"
    assert found, "raised"
    return found[0]


def in_place(view):
    view.mul_(3)
    return view.sin()


def in_place_without_grad(view):
    with torch.no_grad():
        view.mul_(3)
    return view.sin()


def grad_fn_read(view):
    with torch.no_grad():
        view.mul_(3)
    assert view.grad_fn is not None
    return view.sin()


def chain(view):
    part = view[1:].t()
    part.mul_(3)
    with torch.no_grad():
        view.add_(1)
    part.mul_(view.sum().detach())
    return view.sin() + part.sum()


def native(y):
    return torch.view_as_real(y)[..., 0]


def marked(y):
    """A view_fn that calls more than view ops."""
    with torch.no_grad():
        part = torch.view_as_real(y)[..., 0].detach()

    def view_fn(base):
        torch.ones(1) * 2
        return torch.view_as_real(base)[..., 0]

    return vt.mark_as_view(part, y, view_fn=view_fn)


@pytest.mark.parametrize("make", [native, marked])
@pytest.mark.parametrize("use", [in_place, in_place_without_grad, grad_fn_read, chain])
def test_view_that_is_regenerated(make, use):
    def run(mode):
        x = torch.randn(3, 3, dtype=torch.complex128, generator=torch.Generator().manual_seed(0))
        x.requires_grad_()
        y = x * 1
        view = make(y)
        with mode:
            out = use(view)
        (out.sum() + y.abs().sum()).backward()
        return x.grad

    def tracked():
        keeps = Keeps()
        with vt.track(views="full"):
            grad = run(keeps)
        assert all(kept._is_view() for kept in keeps.kept)
        return grad

    torch.testing.assert_close(ended(tracked), run(torch.enable_grad()))


def test_tangent_that_is_regenerated():
    def tracked():
        ones = torch.ones(3, 3)
        base = ones.clone()
        part = base[1:]
        with (
            forward_ad.dual_level(),
            vt.track(views="full"),
            On(torch.ops.aten.ones.default, lambda _: part.unsqueeze(0)) as mode,
        ):
            base.add_(forward_ad.make_dual(ones, 2 * ones))
            torch.ones(1)
            tangent = forward_ad.unpack_dual(part.sin()).tangent
        assert mode.kept[0]._is_view()
        return tangent

    torch.testing.assert_close(ended(tracked), 2 * torch.full((2, 3), 2.0).cos())


@pytest.mark.parametrize("view", [lambda t: t[1:], lambda t: t.unsqueeze(0)])
def test_view_op_finds_what_was_kept_before_as_it_was_made(view):
    """It is not marked yet, and nothing of ours is to be seen on it."""
    mul, t_op = torch.ops.aten.mul.Tensor, torch.ops.aten.t.default
    x = torch.ones(3, 3, requires_grad=True)
    seen = []
    mode = On(mul, view)
    later = On(t_op, lambda _: seen.append(type(mode.kept[0])) or mode.kept[0][:1])
    with vt.track(views="full"), mode, later:
        y = x * 2
        y.t()
    assert seen == [torch.Tensor]
    for kept in (mode.kept[0], later.kept[0]):
        assert type(kept) is torch.Tensor
        assert kept._base is y
        assert kept.requires_grad


def test_view_kept_before_a_view_op_may_be_written_after_it():
    x = torch.ones(3, 3, requires_grad=True)
    with vt.track(views="full"), On(torch.ops.aten.mul.Tensor, lambda t: t[1:]) as mode:
        y = x * 2
        y.t()
        mode.kept[0].mul_(3)
        y.sum().backward()
    assert x.grad.tolist() == [[2, 2, 2], [6, 6, 6], [6, 6, 6]]
