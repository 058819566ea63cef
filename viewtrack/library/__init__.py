"""Custom ops with a faithful ADInplaceOrView kernel.

The schema says which outputs view and which arguments are written; from it and from the body each
op gets the kernels that torchgen writes for native ops, so that views, version counters and
gradients after in-place ops are as native ones are.
"""

from .customop import CustomOp
from .define import inplace_op, op, out_op, view_op
from .register import register

__all__ = ["CustomOp", "inplace_op", "op", "out_op", "register", "view_op"]
