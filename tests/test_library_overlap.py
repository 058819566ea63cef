"""In-place ops on tensors whose elements lie in one place, which native ops refuse."""

import pytest
import torch
from library_ops import CONTEXTS, RAW, Issue, axpy_, fresh

from viewtrack import ViewTrackError, library

contexts = pytest.mark.parametrize("context", CONTEXTS.values(), ids=CONTEXTS)
raw = pytest.mark.parametrize("op", RAW.values(), ids=RAW)
REFUSED = "unsupported operation: more than one element of the written-to tensor"


def fails_as(fn):
    """The beginning of the error that a native op raises too."""
    with pytest.raises(RuntimeError, match=REFUSED) as info:
        fn()
    return info.value


@raw
@contexts
@pytest.mark.parametrize("needs", [False, True])
def test_a_raw_write_is_refused_before_it_is_made(op, context, needs):
    root = torch.ones(2, 1, requires_grad=needs) * 1
    wide = root.expand(2, 3)
    fails_as(lambda: wide.add_(1))  # the native op
    with context():
        error = fails_as(lambda: op(wide))
    assert isinstance(error, ViewTrackError)
    assert f"`{op.op._schema.name}`" in str(error)
    assert "`x`" in str(error)
    assert "clone()" in str(error)
    assert root.tolist() == [[1], [1]]
    assert root._version == 0


@raw
def test_a_raw_write_is_refused_in_a_handler(op):
    wide = torch.ones(1).expand(3)
    with Issue(lambda _: op(wide)):
        fails_as(lambda: torch.ones(1).sin())
    assert wide._version == 0


def test_torch_ops_in_a_body_refuse_by_themselves():
    x = torch.ones(1).expand(3)
    assert not isinstance(fails_as(lambda: axpy_(x, torch.ones(3))), ViewTrackError)


def test_torch_ops_in_a_body_that_do_not_mind_are_let_through():
    fill_ = library.inplace_op(
        fresh("(Tensor(a!) x, float value) -> Tensor(a!)"), lambda x, value: x.fill_(value)
    )
    x = torch.ones(1).expand(3)
    assert fill_(x, 2.0).tolist() == torch.ones(1).expand(3).fill_(2.0).tolist() == [2, 2, 2]
    assert x._version == 1


@pytest.mark.parametrize(
    "x",
    [
        torch.ones(3, 0).expand(2, 3, 0),
        torch.ones(1).expand(1),
        torch.ones(4, 4).t()[1:, ::2],
        torch.ones(1, 3).as_strided((1, 3), (0, 1)),
    ],
    ids=["empty", "one element", "transposed", "one row of stride 0"],
)
def test_no_tensor_is_refused_whose_elements_lie_apart(x):
    x.detach().mul_(1)  # the native op
    zero_ = library.inplace_op(fresh("(Tensor(a!) x) -> Tensor(a!)"), _numpy_zero, opaque=True)
    assert zero_(x) is x
    assert not x.any()


def _numpy_zero(x):
    x.detach().numpy()[...] = 0
    return x


def test_lists_and_kernels_for_a_device():
    zero = library.inplace_op(fresh("(Tensor(a!)[] xs) -> ()"), lambda xs: _each(_numpy_zero, xs))
    xs = [torch.ones(2), torch.ones(1).expand(2)]
    assert "`xs`" in str(fails_as(lambda: zero(xs)))
    assert xs[0].tolist() == [1, 1]
    own = library.inplace_op(fresh("(Tensor(a!) x) -> Tensor(a!)"), lambda x: x.zero_())
    own.register_kernel("cpu", _numpy_zero)
    fails_as(lambda: own(xs[1]))


def _each(fn, xs):
    for x in xs:
        fn(x)
