"""`TrackedTensor` around nested tensors of layout jagged, against the nested tensors themselves."""

import copy

import pytest
import torch
import torch.nn.functional as F

import viewtrack as vt
from viewtrack import TrackedTensor

WEIGHT = torch.arange(20.0).view(5, 4) / 10


def written(write):
    def op(x):
        y = x.clone()
        write(y)
        return y

    return op


OPS = {
    "mul": lambda x: x * 2,
    "sin": torch.sin,
    "add": lambda x: x + x,
    "linear": lambda x: F.linear(x, WEIGHT),
    "matmul": lambda x: x @ WEIGHT.t(),
    "mean": lambda x: x.mean(-1, keepdim=True),
    "softmax": lambda x: x.softmax(-1),
    "layer_norm": lambda x: F.layer_norm(x, (4,)),
    "transpose": lambda x: x.transpose(1, 2),
    "unsqueeze": lambda x: x.unsqueeze(-1),
    "chunk": lambda x: x.chunk(2, -1)[0],
    "first": lambda x: x[0],
    "unbind": lambda x: x.unbind()[1],
    "clone": torch.clone,
    "cat": lambda x: torch.cat([x, x], -1),
    "where": lambda x: torch.where(x > 0, x, -x),
    "double": lambda x: x.double(),
    "values": lambda x: x.values(),
    "a part of values": lambda x: x.values()[1:3],
    "padded": lambda x: torch.nested.to_padded_tensor(x, 0.0),
    "mul_": written(lambda y: y.mul_(3)),
    "add_ itself": written(lambda y: y.add_(y)),
    "copy_": written(lambda y: y.copy_(y.detach() * 2)),
    "zero_": written(lambda y: y.zero_()),
}


def ragged():
    parts = [torch.arange(8.0).view(2, 4), 1 - torch.arange(12.0).view(3, 4)]
    return torch.nested.nested_tensor(parts, layout=torch.jagged)


def seen(op, x):
    """What op makes of x: its values, its gradient, and what autograd knows of it."""
    x = x.detach().requires_grad_()
    y = op(x)
    (gradient,) = torch.autograd.grad(y, x, torch.ones_like(y))
    known = (y._version, y._is_view(), y.is_nested, y.dim(), y.layout, type(y.grad_fn).__name__)
    return flat(y), flat(gradient), known


def flat(t):
    t = t.detach()
    t = t.unwrap() if isinstance(t, TrackedTensor) else t
    return t.values() if t.is_nested else t


@pytest.mark.parametrize("name", OPS)
def test_an_op_gives_what_it_gives_on_the_nested_tensor(name):
    try:
        values, gradient, known = seen(OPS[name], ragged())
    except NotImplementedError as error:
        pytest.skip(f"nested tensors of torch {torch.__version__} do not have it: {error}")
    found_values, found_gradient, found_known = seen(OPS[name], TrackedTensor(ragged()))
    assert torch.equal(found_values, values)
    assert torch.equal(found_gradient, gradient)
    assert found_known == known


@pytest.mark.parametrize("tracked", [False, True])
def test_the_buffer_may_be_written(tracked):
    with vt.track() if tracked else torch.enable_grad():
        x = TrackedTensor(ragged()).requires_grad_()
        y = x.clone()
        buffer = y.values()
        buffer.mul_(2)
        assert buffer._base is y
        versions = [t._version for t in (y, buffer, y.unwrap(), buffer.unwrap())]
        y.values().sum().backward()
    assert versions == [1, 1, 1, 1]
    assert x.grad.unwrap().values().tolist() == [[2.0] * 4] * 5


def test_two_wrappers_deep():
    x = TrackedTensor(TrackedTensor(ragged())).requires_grad_()
    (x.values() ** 2).sum().backward()
    assert torch.equal(x.grad.unwrap().unwrap().values(), 2 * ragged().values())


def test_inference_mode_and_copies():
    x = TrackedTensor(ragged())
    with torch.inference_mode():
        assert torch.equal((x * 2).values().unwrap(), 2 * ragged().values())
    twin = copy.deepcopy(x)
    twin.values().add_(1)
    assert torch.equal(twin.unwrap().values(), ragged().values() + 1)
    assert torch.equal(x.unwrap().values(), ragged().values())


def test_a_sparse_tensor_still_has_its_values():
    t = torch.tensor([0.0, 3, 4]).to_sparse().coalesce()
    assert TrackedTensor(t).values().unwrap().tolist() == [3, 4]


def test_layout_strided_is_refused_with_a_way_out():
    parts = [torch.ones(1, 4), torch.ones(2, 4)]
    nested = torch.nested.as_nested_tensor(parts, layout=torch.strided)
    with pytest.raises(vt.ViewTrackError, match=r"layout strided.*layout=torch\.jagged"):
        TrackedTensor(nested)
    w = TrackedTensor(torch.nested.as_nested_tensor(nested.unbind(), layout=torch.jagged))
    assert w.values().shape == (3, 4)
