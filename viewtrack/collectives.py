"""What the collectives of torch.distributed write, and who counts it.

The schemas of the ``c10d`` ops say ``Tensor[]`` of what they write, without an annotation. So they
are listed here. Stock torch moves no counter for them; where the backend ends with a `copy_` of its
own (gloo, for some) it does. So a tracker runs them with ADInplaceOrView off, which a backend's
threads inherit, and counts each once, when it is issued: from then on the bytes are not what they
were. The functional collectives hand out memory that is still being written, too, until
``wait_tensor``.
"""

from __future__ import annotations

from typing import Any

from ._torch.guard import is_on_gloo

WRITES = {
    **{
        f"c10d::{name}": argument
        for argument, names in {
            "tensors": "allreduce_ allreduce_coalesced_ broadcast_ reduce_ recv_ recv_any_source_",
            "output_tensors": "allgather_ alltoall_ gather_ reduce_scatter_ scatter_",
            "output_lists": "allgather_coalesced_",
            "outputs": "allgather_into_tensor_coalesced_ reduce_scatter_tensor_coalesced_",
            "output_tensor": "_allgather_base_ _reduce_scatter_base_",
            "output": "alltoall_base_",
        }.items()
        for name in names.split()
    },
    "_c10d_functional::irecv": "tensor",
}
"""The argument that an op writes without saying so, by the op's name."""

NAMESPACES = frozenset({"_c10d_functional", "c10d", "symm_mem"})

_COUNTED_BY_GLOO = ("c10d::_reduce_scatter_base_", "c10d::reduce_scatter_tensor_coalesced_")


def is_counted_by_backend(qualified: str, args: Any) -> bool:
    """Whether the backend ends a collective with a `copy_` in the thread that waits for it.

    That one is an op like any other, and comes from above autograd.
    """
    if not qualified.startswith(_COUNTED_BY_GLOO):
        return False
    outputs = args[0] if isinstance(args[0], (list, tuple)) else args[:1]
    return any(is_on_gloo(args[2], t) for t in outputs)
