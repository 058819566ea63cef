"""The functions that user code calls an ATen op by, for handlers that pass an op on.

Calling one takes about half a microsecond less than calling the builtin in its OpOverload, which
goes by the JIT's stack. A handler of a selectively checkpointed region passes on a hundred ops for
each layer, and that is what it costs.

A binding is used only with positional arguments, plain tensors among them, and while no mode of
torch functions is active: who has a ``__torch_function__`` would be asked for another function than
the OpOverload, where C++ issued the op (backward, ``torch.func``, TorchScript). It must then issue
the very overload with the very arguments, since modes below see it;
`tests/test_torch_contract_bindings.py` checks each on every torch. Ops that warn are not among
them, since a binding puts a warning down to the line that called it, nor are those of lists.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from . import TensorBase, aten, torch_function_modes

__all__ = ["BOUND", "bindings"]

_functions: Any = torch._C._VariableFunctions
_nn: Any = torch._C._nn

_METHODS = (
    *("clone.default", "cos.default", "detach.default", "exp.default", "expand.default"),
    *("neg.default", "permute.default", "pow.Tensor_Scalar"),
    *("relu.default", "rsqrt.default", "select.int", "sigmoid.default", "sin.default"),
    *("squeeze.dim", "t.default", "tanh.default", "transpose.int", "unsqueeze.default"),
    "view.default",
)
_FUNCTIONS = (
    *("_log_softmax.default", "_softmax.default"),
    *("_scaled_dot_product_flash_attention.default",),
    *("_scaled_dot_product_flash_attention_for_cpu.default",),
    *("_scaled_dot_product_efficient_attention.default",),
    *("add.Tensor", "addmm.default", "baddbmm.default", "bmm.default"),
    *("convolution.default", "div.Tensor", "embedding.default", "mean.dim", "mm.default"),
    *("mul.Tensor", "native_dropout.default", "native_layer_norm.default", "sub.Tensor"),
    "sum.dim_IntList",
)
_NN_FUNCTIONS = ("gelu.default", "silu.default")


def _op(name: str) -> Any:
    base, _, overload = name.partition(".")
    return getattr(getattr(aten, base), overload)._op


BOUND: dict[str, Callable[..., Any]] = {
    name: getattr(owner, name.partition(".")[0])
    for owner, names in ((TensorBase, _METHODS), (_functions, _FUNCTIONS), (_nn, _NN_FUNCTIONS))
    for name in names
}
"""The bindings by name and overload of the op."""

_TENSORS = {torch.Tensor, torch.nn.Parameter}
_PLAIN = {*_TENSORS, int, float, bool, complex, list, tuple, torch.Size, type(None)}


def _by_binding(op: Any, binding: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any) -> Any:
        if (
            type(args[0]) in _TENSORS
            and _PLAIN.issuperset(map(type, args))
            and not torch_function_modes()
        ):
            return binding(*args)
        return op(*args)

    return call


bindings: dict[Any, Callable[..., Any]] = {
    _op(name): _by_binding(_op(name), binding) for name, binding in BOUND.items()
}
"""What calls an op with positional arguments, by the builtin in the OpOverload."""
