"""Views of a DTensor that is unevenly sharded: a write to one does what it does on stock torch.

On torch 2.13 it arrives or is refused; on 2.6 some views are copies, and it is lost.
"""

from __future__ import annotations

import pytest
import torch
from against_stock import WAYS


@pytest.fixture(scope="module")
def mesh():
    distributed = pytest.importorskip("torch.distributed")
    if not distributed.is_available():
        pytest.skip("this torch is built without torch.distributed")
    from torch.testing._internal.distributed.fake_pg import FakeStore

    distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        yield distributed.device_mesh.init_device_mesh("cpu", (2,))
    finally:
        distributed.destroy_process_group()


def _write_to_a_view(mesh, shape):
    """What comes of it: an error, or the local tensor and how far the two counters moved."""
    from torch.distributed.tensor import DTensor, Shard

    local = torch.ones(4, 9)  # of 7 rows, this one has 4 and the other rank 3
    whole = DTensor.from_local(
        local, mesh, [Shard(0)], shape=torch.Size((7, 9)), stride=(9, 1), run_check=False
    )
    try:
        view = whole.view(*shape)
    except RuntimeError as error:
        return type(error), str(error).splitlines()[0]
    before = whole._version
    view.mul_(5)
    return (
        view._is_view(),
        view._base is whole,
        whole._version - before,
        view._version - before,
        whole.to_local().tolist(),
    )


SHAPES = [(7, 3, 3), (63,), (9, 7), (21, 3), (7, 9), (3, 3, 7)]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_write_to_a_view_does_what_it_does_on_stock_torch(mesh, shape, way):
    want = _write_to_a_view(mesh, shape)
    with WAYS[way]():
        got = _write_to_a_view(mesh, shape)
    assert got == want


@pytest.mark.parametrize("way", WAYS)
def test_a_view_that_keeps_the_rows_is_written_through(mesh, way):
    with WAYS[way]():
        is_view, is_of_whole, moved, seen, local = _write_to_a_view(mesh, (7, 3, 3))
    assert (is_view, is_of_whole, moved, seen) == (True, True, 1, 1)
    assert local == torch.full((4, 9), 5.0).tolist()
