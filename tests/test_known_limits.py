"""The rows of LIMITATIONS.md, executable: each test states what one would wish for.

A test that passes here fails the run (`strict`): then the row goes, and the test moves.
"""

import threading

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import viewtrack as vt

limit = pytest.mark.xfail(strict=True, raises=AssertionError)


@limit
def test_a_write_through_data_moves_the_counter():
    x = torch.zeros(2)
    with vt.track():
        x.data.add_(1)
    assert x._version == 1


def test_a_write_through_data_is_recorded_all_the_same():
    x = torch.zeros(2)
    with vt.track():
        x.data.add_(1)
    assert vt.storage_version(x) == 1


@limit
def test_a_write_by_numpy_moves_the_counter():
    x = torch.zeros(2)
    with vt.track():
        x.numpy()[0] = 1
    assert x._version == 1


@limit
def test_a_write_by_numpy_is_recorded():
    x = torch.zeros(2)
    with vt.track():
        x.numpy()[0] = 1
    assert vt.storage_version(x) == 1


@limit
def test_another_thread_is_tracked():
    x = torch.zeros(2)
    with vt.track():
        thread = threading.Thread(target=lambda: x.add_(1))
        thread.start()
        thread.join()
    assert vt.storage_version(x) == 1


@limit
def test_a_fused_optimizer_moves_the_counters_of_its_parameters():
    p = torch.ones(2, requires_grad=True)
    p.grad = torch.ones(2)
    with vt.track():
        torch.optim.SGD([p], lr=0.1, fused=True).step()
    assert p._version == 1


@limit
@pytest.mark.parametrize("split", [torch.unsafe_split, torch.unsafe_chunk])
def test_unsafe_pieces_share_the_counter(split):
    x = torch.zeros(4)
    with vt.track():
        piece = split(x, 2)[0]
        x.add_(1)
    assert piece._version == x._version


@limit
@pytest.mark.parametrize("views", ["version", "full"])
def test_a_view_is_differentiable_inside_the_handler_that_made_it(views):
    class Mode(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            self.was_view = out._is_view()
            return out

    with vt.track(views=views), Mode() as mode:
        torch.zeros(4).view(2, 2)
    assert mode.was_view


@limit
def test_an_inference_tensor_has_a_version():
    with torch.inference_mode():
        x = torch.zeros(2)
    assert vt.version(x) is not None


@limit
def test_an_inference_tensor_can_be_viewed():
    with torch.inference_mode():
        base = torch.zeros(4)
        t = base.detach()
    assert vt.mark_as_view(t, base)._is_view()
