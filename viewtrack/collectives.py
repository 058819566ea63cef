"""What the collectives of torch.distributed write.

The schemas of the ``c10d`` ops say ``Tensor[]`` of what they write, without an annotation. So they
are listed here. No counter is moved for them, as stock torch moves none: a sharded parameter that
is gathered anew, with the same values, must not look written to autograd.
"""

from __future__ import annotations

WRITES = {
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
}
"""The argument that each op writes, by the op's name."""
