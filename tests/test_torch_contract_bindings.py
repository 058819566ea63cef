"""What handlers pass ops on by: each binding issues the very op, with the very arguments."""

import pytest
import torch
from handlers import NoOp
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

from viewtrack._torch.bindings import BOUND, bindings

HERE = f"torch {torch.__version__}"
aten = torch.ops.aten
WITHOUT_A_CPU_KERNEL = (
    "_scaled_dot_product_flash_attention.default",
    "_scaled_dot_product_efficient_attention.default",
)


def samples(name):
    x, w, b = torch.randn(2, 3, 4), torch.randn(4, 4), torch.randn(4)
    heads, m = torch.randn(2, 2, 3, 8), torch.randn(3, 4)
    return {
        "_log_softmax.default": [(x, -1, False)],
        "_softmax.default": [(x, -1, False)],
        "_scaled_dot_product_flash_attention_for_cpu.default": [(heads, heads, heads)],
        "add.Tensor": [(x, x), (x, 2), (x, 2.5), (x, True), (2, x), (x, b), (x, 1j)],
        "addmm.default": [(b, m, w)],
        "baddbmm.default": [(x, x, w.expand(2, 4, 4))],
        "bmm.default": [(x, w.expand(2, 4, 4))],
        "convolution.default": [
            (x, torch.randn(5, 3, 2), None, [1], [0], [1], False, [0], 1),
        ],
        "div.Tensor": [(x, x), (x, 2), (2.0, x)],
        "embedding.default": [(w, torch.tensor([1, 2])), (w, torch.tensor([1]), 2, True, False)],
        "expand.default": [(b, [2, 3, 4]), (b, [2, -1])],
        "mean.dim": [(x, [-1], True), (x, [0, 1]), (x, None), (x, [])],
        "mm.default": [(m, w)],
        "mul.Tensor": [(x, x), (x, 3), (0.5, x), (x, torch.tensor(2.0))],
        "native_dropout.default": [(x, 0.0, True), (x, 0.0, None)],
        "native_layer_norm.default": [(x, [4], b, b, 1e-5), (x, [4], None, None, 1e-5)],
        "permute.default": [(x, [2, 0, 1])],
        "pow.Tensor_Scalar": [(x, 2), (x, 0.5)],
        "select.int": [(x, 0, 1), (x, -1, -1)],
        "squeeze.dim": [(x, 0)],
        "sub.Tensor": [(x, x), (x, 2), (1.5, x)],
        "sum.dim_IntList": [(x, [-1], True), (x, [0, 1]), (x, None)],
        "t.default": [(w,)],
        "transpose.int": [(x, 0, -1)],
        "unsqueeze.default": [(x, 0), (x, -1)],
        "view.default": [(x, [6, 4]), (x, [-1]), (x, (2, 12))],
    }.get(name, [(x,)])


def described(value):
    if isinstance(value, tuple):  # or a named one
        value = tuple(value)
    flat, spec = tree_flatten(value)
    return str(spec), [
        (v.shape, v.dtype, str(v.tolist())) if isinstance(v, torch.Tensor) else (type(v), v)
        for v in flat
    ]


class Below(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen.append((func, *described((list(args), kwargs))))
        return func(*args, **(kwargs or {}))


class Above(TorchDispatchMode):
    def __init__(self, body):
        super().__init__()
        self.body = body

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        with torch.no_grad():
            self.body()
        return func(*args, **(kwargs or {}))


def in_a_handler(call, args):
    """What modes below a handler see of a call in it, and what it returns."""
    found = []
    t = torch.ones(1)
    with Below() as below, Above(lambda: found.append(call(*args))):
        t.lgamma()
    return below.seen[:-1], found[0]


@pytest.mark.parametrize("name", BOUND)
def test_a_binding_issues_the_very_op(name):
    if name in WITHOUT_A_CPU_KERNEL:
        pytest.skip("this op has no CPU kernel")
    base, overload = name.split(".")
    op = getattr(getattr(aten, base), overload)._op
    for args in samples(name):
        by_op = in_a_handler(op, args)
        assert len(by_op[0]) == 1, HERE
        for by_binding in (in_a_handler(BOUND[name], args), in_a_handler(bindings[op], args)):
            assert by_op[0] == by_binding[0], (HERE, args)
            assert described(by_op[1]) == described(by_binding[1]), (HERE, args)


def test_another_op_would_be_noticed():
    x = torch.ones(2)
    assert in_a_handler(aten.add.Tensor._op, (x, 2))[0] != in_a_handler(torch.mul, (x, 2))[0]


class Function(TorchFunctionMode):
    def __init__(self, seen):
        super().__init__()
        self.seen = seen

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.seen.append(func)
        return func(*args, **(kwargs or {}))


class Subclass(torch.Tensor):
    seen: list[object]

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        cls.seen.append(func)
        return super().__torch_function__(func, types, args, kwargs or {})


class ByBinding(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **kwargs) if kwargs else bindings.get(func._op, func)(*args)


@torch.jit.script
def scripted(x: torch.Tensor, y: torch.Tensor):
    return (x * y).neg()


def backward_of_a_product(s):
    x = torch.ones(2, requires_grad=True)
    (x * s).sum().backward()


def transformed(s):
    torch.func.vmap(lambda row: (row * 2.0).as_subclass(torch.Tensor))(s)


def by_a_function_mode(s):
    with Function(Subclass.seen):
        scripted(torch.ones(2), torch.ones(2))


@pytest.mark.parametrize(
    "program",
    [
        lambda s: s + 1,
        lambda s: scripted(s, s),
        backward_of_a_product,
        transformed,
        by_a_function_mode,
    ],
)
def test_who_has_a_torch_function_is_asked_for_what_a_mode_that_passes_on_asks_for(program):
    seen = []
    for mode in (NoOp, ByBinding):
        Subclass.seen = []
        s = torch.full((2,), 4.0).as_subclass(Subclass)
        with mode():
            program(s)
        seen.append([str(func) for func in Subclass.seen])
    assert seen[0] == seen[1], HERE


def test_numbers_go_to_the_op():
    """As tensors that TorchScript made of numbers come to handlers."""
    for op, args in ((aten.sum.dim_IntList, (2, [0])), (aten.view.default, (2, [1]))):
        with pytest.raises(RuntimeError, match="found type 'int'"):
            bindings[op._op](*args)
