"""Ops whose kernels must run with ADInplaceOrView off, in a handler in which it is on.

Above autograd the Autograd kernel of an op that is functional keeps it off for all below. Most
kernels do not mind. Those of sparse tensors resize what ``_values()`` gave them: with the key on
that is a view of the values, and what they return is zeros, or an internal assert fails. Others
write aliases of their arguments (`to_dense` of a compressed tensor), or update buffers beside their
results, and would move counters that stock torch does not move.
"""

from __future__ import annotations

from typing import Any

import torch

from .operands import is_sparse
from .plan import Plan

_ALWAYS = frozenset(
    {
        "aten::_fused_moving_avg_obs_fq_helper",
        "aten::_sparse_log_softmax",
        "aten::_sparse_log_softmax_backward_data",
        "aten::_sparse_softmax",
        "aten::_sparse_softmax_backward_data",
        "aten::_sparse_sparse_matmul",
        "aten::fused_moving_avg_obs_fake_quant",
    }
)
_OF_SPARSE = frozenset(
    {
        "aten::_to_dense",
        "aten::_to_sparse",
        "aten::_to_sparse_bsc",
        "aten::_to_sparse_bsr",
        "aten::_to_sparse_csc",
        "aten::_to_sparse_csr",
        "aten::div.Tensor",
        "aten::mm",
        "aten::pow.Tensor_Scalar",
    }
)


def wants_key_off(plan: Plan) -> bool | None:
    """Whether the op is one of those; None if it is so for sparse tensors only."""
    if plan.qualified in _ALWAYS:
        return True
    of_sparse = plan.is_composite and not plan.views and not plan.writes
    return None if of_sparse or plan.qualified in _OF_SPARSE else False


def begins_sparse(args: Any) -> bool:
    """Whether the first argument is a sparse tensor."""
    return bool(args) and isinstance(args[0], torch.Tensor) and is_sparse(args[0])
