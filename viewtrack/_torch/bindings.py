"""The functions that user code calls an ATen op by, for handlers that pass an op on.

Calling one takes about half a microsecond less than calling the builtin in its OpOverload, which
goes by the JIT's stack. A handler of a selectively checkpointed region passes on a hundred ops for
each layer, and that is what it costs.

A binding is used only with positional arguments of plain tensors. It must then issue the very
overload with the very arguments, since modes below see it; `tests/test_torch_contract_bindings.py`
checks each on every torch. Modes of torch functions are off in handlers, and so is the
``__torch_function__`` of whatever tensor user code called the op with: nobody sees it called.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from . import TensorBase, aten

__all__ = ["BOUND", "bindings"]

_functions: Any = torch._C._VariableFunctions
_nn: Any = torch._C._nn

_METHODS = (
    *("add_.Tensor", "addcdiv_.default", "addcmul_.default", "clone.default", "copy_.default"),
    *("cos.default", "detach.default", "div_.Tensor", "exp.default", "expand.default"),
    *("lerp_.Scalar", "masked_fill.Scalar", "mul_.Tensor", "neg.default", "permute.default"),
    *("pow.Tensor_Scalar", "relu.default", "rsqrt.default", "select.int", "sigmoid.default"),
    *("sin.default", "sqrt.default", "squeeze.dim", "sub_.Tensor", "t.default", "tanh.default"),
    *("transpose.int", "unsqueeze.default", "view.default", "zero_.default"),
)
_FUNCTIONS = (
    *("_log_softmax.default", "_softmax.default"),
    *("_scaled_dot_product_flash_attention.default",),
    *("_scaled_dot_product_flash_attention_for_cpu.default",),
    *("_scaled_dot_product_efficient_attention.default",),
    *("add.Tensor", "addmm.default", "baddbmm.default", "bmm.default", "cat.default"),
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

bindings: dict[Any, Callable[..., Any]] = {_op(name): call for name, call in BOUND.items()}
"""The same by the builtin in the OpOverload."""
