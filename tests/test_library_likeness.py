"""Bodies that do one thing in some calls and another in others: each call is taken as it is.

What a body is like is found out once for calls that are alike. A body may branch on shape, dtype,
numbers, geometry, on whether an argument requires grad and whether autograd records.
"""

import ctypes

import pytest
import torch
from library_ops import fresh, memset

from viewtrack import ViewTrackError, library


def numpy_zero(x):
    x.numpy()[...] = 0
    return x


def ctypes_zero(x):
    memset(x)
    return x


def numpy_double(x):
    return torch.from_numpy(x.numpy() * 2)


def ctypes_copy(x):
    y = torch.empty_like(x)
    ctypes.memmove(y.data_ptr(), x.data_ptr(), x.numel() * x.element_size())
    return y


BRANCHES = {
    "shape": lambda x: x.numel() > 3,
    "dtype": lambda x: x.dtype == torch.float64,
    "stride": lambda x: x.dim() == 2,
    "offset": lambda x: x.storage_offset() > 0,
}


def floats(n, **kwargs):
    return torch.arange(1.0, n + 1, **kwargs)


RAW_INPUTS = {
    "shape": lambda: floats(5),
    "dtype": lambda: floats(3, dtype=torch.float64),
    "stride": lambda: floats(2).view(2, 1),
    "offset": lambda: floats(4)[1:],
}


def seen_through(x):
    return x.mul_(2)


def branching(raw, is_raw, seen):
    return lambda x: raw(x) if is_raw(x) else seen(x)


MAKERS = {
    "numpy write": lambda f: library.inplace_op(
        fresh("(Tensor(a!) x) -> Tensor(a!)"), branching(numpy_zero, f, seen_through)
    ),
    "ctypes write": lambda f: library.inplace_op(
        fresh("(Tensor(a!) x) -> Tensor(a!)"), branching(ctypes_zero, f, seen_through)
    ),
    "numpy result": lambda f: library.op(
        fresh("(Tensor x) -> Tensor"), branching(numpy_double, f, lambda x: x * 2)
    ),
    "ctypes result": lambda f: library.op(
        fresh("(Tensor x) -> Tensor"), branching(ctypes_copy, f, lambda x: x * 2)
    ),
}


class Alias(torch.autograd.Function):
    """A tensor of the very same geometry that is no leaf."""

    @staticmethod
    def forward(ctx, x):
        return x.detach()

    @staticmethod
    def backward(ctx, grad):
        return grad


def gradient(op, x):
    leaf = x.detach().requires_grad_()
    op(Alias.apply(leaf)).sum().backward()
    return leaf.grad.tolist()


@pytest.mark.parametrize("branch", BRANCHES)
@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
def test_a_raw_branch_leaves_the_other_its_gradient(make, branch):
    op = make(BRANCHES[branch])
    assert gradient(op, floats(3)) == [2, 2, 2]
    for _ in range(2):
        with pytest.raises(ViewTrackError, match="written unseen by autograd"):
            gradient(op, RAW_INPUTS[branch]())
        assert gradient(op, floats(3)) == [2, 2, 2]


@pytest.mark.parametrize("transform", ["grad", "vmap"])
@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
def test_a_raw_branch_is_refused_by_torch_func_and_the_other_is_not(make, transform):
    op = make(BRANCHES["shape"])

    def call(n):
        if transform == "grad":
            return torch.func.grad(lambda x: op(x * 1).sum())(floats(n))
        return torch.func.vmap(lambda x: op(x * 1))(torch.ones(1, n))[0]

    for _ in range(2):
        with pytest.raises(ViewTrackError, match="reads memory"):
            call(5)
        assert call(3).tolist() == [2, 2, 2]


def test_a_result_that_needs_no_gradient_is_none_of_a_raw_branch():
    op = library.op(
        fresh("(Tensor x) -> Tensor"), branching(ctypes_copy, BRANCHES["shape"], torch.ones_like)
    )
    assert op(floats(5).requires_grad_()).requires_grad
    assert not op(floats(3).requires_grad_()).requires_grad


def test_numpy_runs_at_every_call():
    op = library.inplace_op(fresh("(Tensor(a!) x) -> Tensor(a!)"), numpy_zero)
    for _ in range(3):
        x = floats(3).requires_grad_() * 1
        assert op(x).tolist() == [0, 0, 0]
        assert x._version == 1


def _hides_if_it_requires_grad(x):
    return x.detach()[1:] if x.requires_grad else x[1:]


def _hides_under_no_grad(x):
    return x[1:] if torch.is_grad_enabled() else x.detach()[1:]


def _hides_at_an_offset(x):
    return x.detach()[1:] if x.storage_offset() else x[1:]


def test_a_body_that_hides_its_views_from_what_requires_grad():
    op = library.view_op(fresh("(Tensor(a) x) -> Tensor(a)"), _hides_if_it_requires_grad)
    assert torch.func.vmap(op)(torch.ones(2, 3)).tolist() == [[1, 1], [1, 1]]
    for _ in range(2):
        with pytest.raises(ViewTrackError, match="hides its views"):
            torch.func.grad(lambda x: op(x * 1).sum())(floats(3))


def test_a_body_that_hides_its_views_under_no_grad():
    op = library.view_op(fresh("(Tensor(a) x) -> Tensor(a)"), _hides_under_no_grad)
    with torch.no_grad(), pytest.raises(ViewTrackError, match="hides its views"):
        torch.func.vmap(op)(torch.ones(2, 3))
    assert torch.func.grad(lambda x: op(x * 1).sum())(floats(3)).tolist() == [0, 1, 1]


def test_a_body_that_hides_its_views_at_an_offset():
    op = library.view_op(fresh("(Tensor(a) x) -> Tensor(a)"), _hides_at_an_offset)
    for x, offset in ((floats(4)[1:], True), (floats(3), False), (floats(4)[1:], True)):
        if offset:
            with pytest.raises(ViewTrackError, match="hides its views"):
                torch.func.grad(lambda x: op(x).sum())(x)
        else:
            assert torch.func.grad(lambda x: op(x).sum())(x).tolist() == [0, 1, 1]
