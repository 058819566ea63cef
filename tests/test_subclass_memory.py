"""What `TrackedTensor` does where torch goes to a tensor's memory without dispatching an op."""

import pytest
import torch

import viewtrack as vt
from viewtrack import TrackedTensor


def plain(t):
    return t


def inner(t):
    return t.unwrap() if isinstance(t, TrackedTensor) else t


@pytest.mark.parametrize("make", [plain, TrackedTensor])
def test_assigning_data(make):
    a, b = make(torch.arange(6.0).view(2, 3)), make(torch.ones(4))
    a.mul_(2)
    view = a.view(6)
    a.data = b
    assert a.shape == (4,)
    a.add_(1)
    assert inner(a).tolist() == inner(b).tolist() == [2.0] * 4
    assert inner(view).tolist() == [0.0, 2, 4, 6, 8, 10]
    assert (a._version, b._version) == (2, 0)
    assert (inner(a)._version, inner(b)._version) == (2, 0)


@pytest.mark.parametrize("plain_value", [False, True])
def test_a_parameter_trained_through_data(plain_value):
    p = torch.nn.Parameter(TrackedTensor(torch.tensor([1.0, 2])))
    (p * p).sum().backward()
    p.data = inner(p.data) - inner(p.grad) if plain_value else p.data - p.grad
    assert isinstance(p, torch.nn.Parameter)
    assert p.unwrap().tolist() == [-1, -2]
    p.grad = None
    (p * 3).sum().backward()
    assert p.grad.unwrap().tolist() == [3, 3]


class Scaled(TrackedTensor):
    def __init__(self, inner, scale=1):
        super().__init__(inner)
        self.scale = scale

    def like(self, inner):
        return type(self)(inner, self.scale)


def test_assigning_data_takes_what_a_subclass_keeps():
    t = Scaled(torch.ones(2), 3)
    t.data = Scaled(torch.zeros(2), 5)
    assert (t.scale, t.unwrap().tolist()) == (5, [0, 0])
    t.data = torch.ones(2)
    assert (t.scale, t.unwrap().tolist()) == (5, [1, 1])


@pytest.mark.parametrize("wrong", [3, None, "x"])
def test_data_refuses_what_is_no_tensor(wrong):
    t = TrackedTensor(torch.ones(2))
    with pytest.raises(TypeError, match="has to be a tensor"):
        t.data = wrong
    assert t.unwrap().tolist() == [1, 1]


def test_data_under_a_compiler():
    def fn(t):
        t.data.mul_(3)
        return t * 2

    torch._dynamo.reset()
    w = TrackedTensor(torch.ones(3)).requires_grad_()
    out = torch.compile(fn, backend="aot_eager")(w)
    out.sum().backward()
    assert w.unwrap().tolist() == [3, 3, 3]
    assert out.unwrap().tolist() == [6, 6, 6]
    assert w.grad.unwrap().tolist() == [2, 2, 2]


def test_shared_memory():
    t = TrackedTensor(torch.ones(2))
    assert not t.is_shared()
    assert t.share_memory_() is t
    assert t.is_shared()
    assert t.unwrap().is_shared()


@pytest.mark.parametrize("depth", [1, 2])
def test_python_functions_applied_in_place(depth):
    def make(t):
        return make_deep(t, depth)

    def make_deep(t, n):
        return TrackedTensor(make_deep(t, n - 1)) if n else t

    t, values = make(torch.arange(3.0)), torch.arange(3.0)
    assert t.apply_(lambda a: a + 1) is t
    assert t.map_(make(torch.ones(3)), lambda a, b: a - b) is t
    t.map_(torch.full((3,), 2.0), lambda a, b: a * b)
    assert t.tolist() == (values * 2).tolist()


@pytest.mark.parametrize(
    "call",
    [
        lambda t: t.apply_(abs),
        lambda t: t.map_(t.detach(), max),
        lambda t: t.numpy(),
        lambda t: t.__dlpack__(),
    ],
    ids=["apply_", "map_", "numpy", "dlpack"],
)
def test_they_refuse_what_requires_grad_with_torch_s_own_error(call):
    errors = []
    for t in (torch.ones(2), TrackedTensor(torch.ones(2))):
        with pytest.raises((RuntimeError, BufferError)) as raised:
            call(t.requires_grad_())
        errors.append((raised.type, str(raised.value)))
    assert errors[0] == errors[1]


def test_dlpack_shares_the_inner_memory():
    t = TrackedTensor(torch.zeros(2))
    other = torch.from_dlpack(t)
    other.add_(1)
    assert t.unwrap().tolist() == [1, 1]


def test_a_number_is_formatted_as_one():
    assert f"{TrackedTensor(torch.tensor(1.25)):.1f}" == f"{torch.tensor(1.25):.1f}"
    assert f"{TrackedTensor(torch.ones(1))}" == "TrackedTensor(tensor([1.]))"
    with pytest.raises(TypeError, match="format"):
        format(TrackedTensor(torch.ones(2)), ".2f")


def test_data_of_a_view_and_of_a_nested_wrapper():
    deep = TrackedTensor(TrackedTensor(torch.arange(4.0)))
    deep.add_(1)
    deep.data = deep.data.view(2, 2)
    assert deep.shape == deep.unwrap().shape == deep.unwrap().unwrap().shape == (2, 2)
    assert vt.version(deep) == vt.version(deep.unwrap()) == vt.version(deep.unwrap().unwrap()) == 1
