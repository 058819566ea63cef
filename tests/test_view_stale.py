"""Marks on views that are out of date, and what native replays for them while we mark."""

from __future__ import annotations

import pytest
import torch

import viewtrack as vt


def alias(base: torch.Tensor, size: tuple[int, ...], stride: tuple[int, ...], offset: int = 0):
    return torch.empty(0, dtype=base.dtype).set_(
        base.detach().untyped_storage(), offset, size, stride
    )


@pytest.mark.parametrize("marked", [False, True])
def test_a_stale_complex_view_is_replayed_and_not_answered(marked: bool) -> None:
    """Native replays the stale base by as_strided too; that one must really run."""
    x = torch.ones(2, dtype=torch.cfloat, requires_grad=True)
    b = x * 1
    v = torch.view_as_real(b)[:]
    b.mul_(2)
    t = vt.mark_as_view(alias(v, (2,), (1,)), v) if marked else v[0]
    t.sum().backward()
    assert x.grad.tolist() == [2 + 2j, 0j]


@pytest.mark.parametrize("marked", [False, True])
def test_a_stale_view_of_a_view_fn_view(marked: bool) -> None:
    x = torch.ones(5, requires_grad=True)
    b = x * 1
    v = vt.mark_as_view(b.detach().view_as(b).detach(), b, view_fn=lambda b: b.view_as(b))
    w = v[1:]
    b.mul_(2)
    t = vt.mark_as_view(alias(b, (2,), (1,), 1), w) if marked else w[:2]
    t.mul_(3)
    b.sum().backward()
    assert x.grad.tolist() == [2, 6, 6, 2, 2]


def test_batched_gradients_replay_a_view_fn() -> None:
    def f(x: torch.Tensor) -> torch.Tensor:
        b = x * 1
        t = vt.mark_as_view(alias(b, (2, 2), (2, 1)), b, view_fn=lambda b: b.view(2, 2))
        t.mul_(3)
        return b * b

    x = torch.tensor([1.0, 2.0, 3.0, 4.0])
    want = torch.diag(18 * x)
    for vectorize in (False, True):
        got = torch.autograd.functional.jacobian(f, x, vectorize=vectorize)
        assert torch.equal(got, want)


@pytest.mark.parametrize("view_fn", [lambda b: b[2:], lambda b: b[::2]], ids=["offset", "strides"])
def test_a_view_fn_that_makes_another_part_of_base_is_refused(view_fn) -> None:
    base = torch.ones(4, requires_grad=True) * 1
    t = alias(base, (2,), (1,))
    with pytest.raises(vt.ViewTrackError, match="return exactly that view") as error:
        vt.mark_as_view(t, base, view_fn=view_fn)
    assert __file__ in str(error.value)
    assert not t._is_view()
    assert t.grad_fn is None


def test_a_base_that_views_t_is_refused() -> None:
    t = torch.ones(3)
    with pytest.raises(vt.ViewTrackError, match="`base` is a view of `t`"):
        vt.mark_as_view(t, t[:])
