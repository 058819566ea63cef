"""What handlers pass ops on by: each binding issues the very op, with the very arguments."""

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map_only

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
        "add_.Tensor": [(x, x * 2), (x, 2), (x, 2.5), (x, True), (x, b)],
        "addcdiv_.default": [(x, x * 2, x * 3 + 9)],
        "addcmul_.default": [(x, x * 2, x * 3)],
        "add.Tensor": [(x, x), (x, 2), (x, 2.5), (x, True), (2, x), (x, b), (x, 1j)],
        "addmm.default": [(b, m, w)],
        "baddbmm.default": [(x, x, w.expand(2, 4, 4))],
        "bmm.default": [(x, w.expand(2, 4, 4))],
        "cat.default": [([x, x],), ([x, x], -1), ((x,), 1)],
        "convolution.default": [
            (x, torch.randn(5, 3, 2), None, [1], [0], [1], False, [0], 1),
        ],
        "copy_.default": [(x, x * 2), (x, b), (x, x > 0, True)],
        "div_.Tensor": [(x, x + 9), (x, 2), (x, 2.5), (x, b + 9)],
        "div.Tensor": [(x, x), (x, 2), (2.0, x)],
        "embedding.default": [(w, torch.tensor([1, 2])), (w, torch.tensor([1]), 2, True, False)],
        "expand.default": [(b, [2, 3, 4]), (b, [2, -1])],
        "lerp_.Scalar": [(x, x * 2, 0.5), (x, x * 2, 1)],
        "masked_fill.Scalar": [(x, x > 0, 0.0), (x, x > 0, 1), (x, x > 0, True)],
        "mean.dim": [(x, [-1], True), (x, [0, 1]), (x, None), (x, [])],
        "mm.default": [(m, w)],
        "mul_.Tensor": [(x, x * 2), (x, 2), (x, 2.5), (x, True), (x, b)],
        "mul.Tensor": [(x, x), (x, 3), (0.5, x), (x, torch.tensor(2.0))],
        "native_dropout.default": [(x, 0.0, True), (x, 0.0, None)],
        "native_layer_norm.default": [(x, [4], b, b, 1e-5), (x, [4], None, None, 1e-5)],
        "permute.default": [(x, [2, 0, 1])],
        "pow.Tensor_Scalar": [(x, 2), (x, 0.5)],
        "select.int": [(x, 0, 1), (x, -1, -1)],
        "squeeze.dim": [(x, 0)],
        "sub_.Tensor": [(x, x * 2), (x, 2), (x, 2.5), (x, b)],
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
    assert bindings[op] is BOUND[name]
    for args in samples(name):
        by_op, by_binding = (
            in_a_handler(call, tree_map_only(torch.Tensor, torch.clone, args))  # some write
            for call in (op, bindings[op])
        )
        assert by_op[0] == by_binding[0], (HERE, args)
        assert len(by_op[0]) == 1, HERE
        assert described(by_op[1]) == described(by_binding[1]), (HERE, args)


def test_another_op_would_be_noticed():
    x = torch.ones(2)
    assert in_a_handler(aten.add.Tensor._op, (x, 2))[0] != in_a_handler(torch.mul, (x, 2))[0]


def test_torch_functions_are_off_in_a_handler():
    seen = []

    class Function(TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            seen.append(func)
            return func(*args, **(kwargs or {}))

    class Subclass(torch.Tensor):
        @classmethod
        def __torch_function__(cls, func, types, args=(), kwargs=None):
            seen.append(func)
            return super().__torch_function__(func, types, args, kwargs or {})

    s = torch.ones(2).as_subclass(Subclass)
    passed = []

    class Passing(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            passed.append(type(args[0]))
            return bindings[func._op](*args)

    with Function(), Passing():
        out = s + 1
    assert passed == [Subclass], HERE
    assert type(out) is Subclass, HERE
    assert [f.__name__ for f in seen] == ["add", "add"], HERE  # as called: by the mode, the class
