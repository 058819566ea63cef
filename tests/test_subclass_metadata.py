"""Views of wrappers whose geometry an op changes in place: gradients are those of plain tensors."""

import pytest
import torch
from wrappers import aliases, make_wrapper

import viewtrack as vt
from viewtrack import TrackedTensor

MAKERS = {
    "tracked": TrackedTensor,
    "nested": lambda t: TrackedTensor(TrackedTensor(t)),
    "declared": make_wrapper(flattens=True),
    "bare": make_wrapper(),
}


def values(t):
    while type(t) is not torch.Tensor:
        t = t.unwrap() if isinstance(t, TrackedTensor) else t.e
    return t


@pytest.fixture(params=MAKERS)
def make(request):
    return MAKERS[request.param]


def plain(t):
    return t


# A view of an intermediate result, and what is done to it in place.
CHANGES = {
    "t_": (lambda y: y.t(), lambda v: v.t_()),
    "t_ of a slice": (lambda y: y[1:], lambda v: v.t_()),
    "t_ twice": (lambda y: y.t(), lambda v: v.t_().t_()),
    "transpose_": (lambda y: y.view(y.shape), lambda v: v.transpose_(0, 1)),
    "swapdims_": (lambda y: y.t(), lambda v: v.swapdims_(0, 1)),
    "squeeze_": (lambda y: y.unsqueeze(0), lambda v: v.squeeze_()),
    "squeeze_ of a row": (lambda y: y[1:2], lambda v: v.squeeze_(0)),
    "unsqueeze_": (lambda y: y.t(), lambda v: v.unsqueeze_(0)),
    "as_strided_": (lambda y: y[1:], lambda v: v.as_strided_((2, 2), (1, 2), 1)),
    "out=": (
        lambda y: y.detach()[1:],
        lambda v: torch.add(torch.ones(2, 2), 1, out=v),
    ),
}
WRITES = {
    "none": lambda y, v: None,
    "base": lambda y, v: y.mul_(2),
    "view": lambda y, v: v.mul_(3),
    "both": lambda y, v: (v.mul_(3), y[0].mul_(2), v.add_(1)),
}


def gradient(make, shape, change, write, grad):
    view, act = CHANGES[change]
    x = make(torch.arange(float(shape[0] * shape[1])).view(shape)).requires_grad_()
    y = x * 1
    v = view(y)
    with torch.set_grad_enabled(grad):
        act(v)
    WRITES[write](y, v)
    weights = torch.arange(float(v.numel())).view(v.shape)
    name = v.grad_fn.name() if v.requires_grad else None
    ((v * weights).sum() + y.sum()).backward()
    return values(x.grad), (v.shape, v.stride(), v.storage_offset(), v._version, v._is_view()), name


@pytest.mark.filterwarnings("ignore:An output with one or more elements was resized")
@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("change", CHANGES)
def test_the_gradient_of_a_view_that_was_changed_in_place(change, write, grad, make):
    for shape in ((3, 3), (4, 3)):
        if change == "out=" and shape != (3, 3):
            continue
        expected = gradient(plain, shape, change, write, grad)
        for tracks in (False, True):
            with vt.track() if tracks else torch.enable_grad():
                found = gradient(make, shape, change, write, grad)
            assert torch.equal(found[0], expected[0])
            assert found[1:] == expected[1:]


@pytest.mark.parametrize("kept", ["hook", "grad"])
def test_hooks_on_such_a_view_run_as_before(kept, make):
    def run(make):
        seen = []
        x = make(torch.ones(2, 3)).requires_grad_()
        v = (x * 2).t()
        if kept == "hook":
            v.register_hook(lambda g: seen.append(tuple(g.shape)))
        else:
            v.retain_grad()
        v.t_()
        v.sum().backward()
        return seen, v.retains_grad, values(x.grad).tolist()

    assert run(make) == run(plain)


def test_what_may_not_be_written_may_not_be_written_afterwards_either(make):
    def run(make):
        y = make(torch.ones(2, 3)).requires_grad_() * 2
        with torch.no_grad():
            v = y.t()
            v.t_()
        with pytest.raises(RuntimeError) as raised:
            v.add_(1)
        return str(raised.value)

    assert run(make) == run(plain)
    assert "no_grad" in run(make)


def test_views_of_a_leaf_and_of_what_requires_no_grad(make):
    x = make(torch.ones(2, 3)).requires_grad_()
    v = x.t()
    with torch.no_grad():
        v.t_()
    v.sum().backward()
    assert values(x.grad).tolist() == [[1.0] * 3] * 2
    y = make(torch.ones(3, 3))
    u = y.t()
    u.t_()
    p = make(torch.arange(9.0).view(3, 3)).requires_grad_()
    y.mul_(p)
    (u * torch.arange(9.0).view(3, 3)).sum().backward()
    assert torch.equal(values(p.grad), torch.arange(9.0).view(3, 3))
    leaf = make(torch.ones(3, 3)).view(9).requires_grad_()
    with torch.no_grad():
        leaf.unsqueeze_(0)
    assert leaf.requires_grad
    assert leaf.is_leaf


def test_forward_mode_keeps_its_tangent(make):
    with torch.autograd.forward_ad.dual_level():
        tangent = make(torch.arange(6.0).view(2, 3))
        dual = torch.autograd.forward_ad.make_dual(make(torch.ones(2, 3)), tangent)
        v = dual.t()
        v.t_()
        found = torch.autograd.forward_ad.unpack_dual(v).tangent
    assert values(found).tolist() == [[0, 1, 2], [3, 4, 5]]


@pytest.mark.filterwarnings("ignore:An output with one or more elements was resized")
def test_an_out_argument_that_is_resized_keeps_its_offset(make):
    def run(make):
        x = make(torch.zeros(4, 6))
        v = x.chunk(2, -1)[1]
        torch.add(torch.ones(1, 4, 3), 1, out=v)
        assert v.stride() == (12, 3, 1)
        assert v.storage_offset() == values(v).storage_offset() == 3
        assert aliases(v, x)
        v.as_strided((2,), (1,)).mul_(5)
        return values(x)

    assert torch.equal(run(make), run(plain))
