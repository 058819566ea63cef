"""Bodies that use a tensor that they were not given: a global, or one of a closure."""

import pytest
import torch
from library_ops import PassThrough, fresh
from torch._subclasses.fake_tensor import FakeTensorMode

from viewtrack import library

SCALE = torch.full((1,), 3.0)


def scaled():
    return library.op(fresh("(Tensor x) -> Tensor"), lambda x: x * SCALE)


def compiled(f, *args):
    torch._dynamo.reset()
    return torch.compile(f, backend="aot_eager", fullgraph=True)(*args)


@pytest.mark.parametrize("called_before", [False, True])
def test_it_is_compiled_and_reads_the_tensor_when_it_runs(called_before):
    scale = torch.full((1,), 3.0)
    op = library.op(fresh("(Tensor x) -> Tensor"), lambda x: x * scale)
    if called_before:
        op(torch.ones(2))
    torch._dynamo.reset()
    f = torch.compile(lambda x: op(x) + 1, backend="aot_eager", fullgraph=True)
    assert f(torch.ones(2)).tolist() == [4, 4]
    scale.fill_(5)
    assert f(torch.ones(2)).tolist() == [6, 6]


def test_an_in_place_body_is_compiled():
    op = library.inplace_op(fresh("(Tensor(a!) x) -> Tensor(a!)"), lambda x: x.mul_(SCALE))
    assert compiled(lambda x: op(x * 2) + 1, torch.ones(2)).tolist() == [7, 7]


def test_a_fake_implementation_serves_too():
    op = scaled()
    op.register_fake(torch.empty_like)
    assert compiled(lambda x: op(x) + 1, torch.ones(2)).tolist() == [4, 4]


def test_it_is_exported():
    class Module(torch.nn.Module):
        def forward(self, x):
            return op(x) + 1

    op = scaled()
    program = torch.export.export(Module(), (torch.ones(2),))
    assert program.module()(torch.full((2,), 2.0)).tolist() == [7, 7]


def test_fake_tensors_go_through_it():
    op = scaled()
    mode = FakeTensorMode()
    with mode:
        out = op(torch.ones(2, 3))
    assert (out.shape, out.dtype) == ((2, 3), torch.float32)
    with mode, pytest.raises(AssertionError, match="FakeTensor"):
        torch.ones(2) * SCALE  # the mode is as strict as before


def test_a_formula_gives_the_gradient_where_it_is_compiled():
    op = scaled()
    op.register_autograd(lambda ctx, grad: grad * 3)
    leaf = torch.ones(2, requires_grad=True)
    compiled(lambda x: op(x) * 2, leaf).sum().backward()
    assert leaf.grad.tolist() == [6, 6]


def test_without_a_formula_the_gradient_is_refused_where_it_is_compiled():
    op = scaled()
    leaf = torch.ones(2, requires_grad=True)
    with pytest.raises(Exception, match=f"{op.op.name()}.*register_autograd"):
        compiled(lambda x: op(x) * 2, leaf).sum().backward()


def test_a_captured_tensor_that_requires_grad_is_refused_where_it_is_compiled():
    """Its gradient would be lost in silence."""
    weight = torch.full((1,), 3.0, requires_grad=True)
    op = library.op(fresh("(Tensor x) -> Tensor"), lambda x: x * weight)
    op(torch.ones(2)).sum().backward()
    assert weight.grad.tolist() == [2]
    with pytest.raises(Exception, match=f"{op.op.name()}.*requires grad.*an argument of the op"):
        compiled(lambda x: op(x) * 2, torch.ones(2))
    with torch.no_grad():
        assert compiled(lambda x: op(x) * 2, torch.ones(2)).tolist() == [6, 6]


def test_a_view_is_refused_where_it_is_compiled():
    def body(x):
        SCALE.sin()
        return x[:1]

    op = library.view_op(fresh("(Tensor(a) x) -> Tensor(a)"), body)
    assert op(torch.ones(2)).shape == (1,)
    with pytest.raises(Exception, match=f"{op.op.name()}.*was not given.*an argument of the op"):
        compiled(lambda x: op(x) * 2, torch.ones(2))


def test_a_view_of_an_opaque_body_is_refused_with_what_helps():
    ends = torch.tensor(1)
    op = library.view_op(fresh("(Tensor(a) x) -> Tensor(a)"), lambda x: x[: int(ends.item())])
    with pytest.raises(Exception, match=f"{op.op.name()}.*returns a view.*op of its own"):
        compiled(lambda x: op(x) * 2, torch.ones(2))


def test_a_body_that_asks_for_its_numbers():
    ends = torch.tensor(2.0)
    op = library.op(fresh("(Tensor x) -> Tensor"), lambda x: x * ends.item())
    assert torch.func.vmap(op)(torch.ones(2, 3)).tolist() == [[2] * 3] * 2
    with pytest.raises(Exception, match=f"{op.op.name()}.*register_fake"):
        compiled(lambda x: op(x) + 1, torch.ones(2))
    op.register_fake(torch.empty_like)
    assert compiled(lambda x: op(x) + 1, torch.ones(2)).tolist() == [3, 3]


def test_in_eager_mode_nothing_changes():
    op = scaled()
    leaf = torch.ones(2, requires_grad=True)
    with PassThrough():
        op(leaf).sum().backward()
    assert leaf.grad.tolist() == [3, 3]
    assert torch.func.grad(lambda x: op(x).sum())(torch.ones(2)).tolist() == [3, 3]
    assert torch.func.vmap(op)(torch.ones(2, 3)).tolist() == [[3] * 3] * 2
    mask = library.op(fresh("(Tensor x) -> Tensor"), lambda x: (x > 0) * SCALE)
    (mask(leaf) * leaf).sum().backward()  # no gradient flows through the comparison
    assert leaf.grad.tolist() == [6, 6]


def test_a_tensor_that_the_body_makes_is_no_captured_one():
    def body(x):
        return x * torch.tensor(3.0) + torch.arange(2) + torch.zeros(2)

    op = library.op(fresh("(Tensor x) -> Tensor"), body)
    leaf = torch.ones(2, requires_grad=True)
    assert compiled(lambda x: op(x) * 2, leaf).tolist() == [6, 8]


def test_a_raw_body_without_a_formula_says_so_where_it_is_compiled():
    op = library.op(fresh("(Tensor x) -> Tensor"), lambda x: torch.tensor(x.detach().tolist()) * 2)
    op.register_fake(torch.empty_like)
    leaf = torch.ones(2, requires_grad=True)
    with pytest.raises(Exception, match=f"{op.op.name()}.*register_autograd"):
        compiled(lambda x: op(x) * 2, leaf).sum().backward()
