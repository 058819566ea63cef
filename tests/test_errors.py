"""Errors: they come whole out of other processes."""

from __future__ import annotations

import concurrent.futures
import copy
import functools
import multiprocessing
import pickle

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import viewtrack
from viewtrack import MutatedTensorError, MutationGuard, ViewTrackError, errors, protect
from viewtrack.checkpoint import create_selective_checkpoint_contexts


def of_a_guard():
    t = torch.ones(3)
    with MutationGuard() as watching:
        watching.save(t, "the table")
        t.mul_(2)


def of_protect():
    t = torch.ones(3)
    with protect(t):
        t.mul_(2)


def of_a_region():
    saved = [torch.ops.aten.mm.default]
    contexts = functools.partial(create_selective_checkpoint_contexts, saved)
    w = torch.ones(2, 2, requires_grad=True)
    checkpoint(lambda x: (x @ w).relu_().exp(), w, use_reentrant=False, context_fn=contexts)[
        0
    ].sum().backward()


def of_a_view():
    viewtrack.mark_as_view(torch.ones(2), torch.ones(2))


RAISES = [of_a_guard, of_protect, of_a_region, of_a_view]


def facts(error):
    return type(error), str(error), vars(error)


@pytest.mark.parametrize("raises", RAISES)
@pytest.mark.parametrize("copied", [copy.deepcopy, lambda e: pickle.loads(pickle.dumps(e))])
def test_an_error_can_be_copied(raises, copied):
    with pytest.raises(ViewTrackError) as caught:
        raises()
    assert facts(copied(caught.value)) == facts(caught.value)
    assert not isinstance(caught.value, MutatedTensorError) or caught.value.writes


def test_every_class_of_error_can_be_copied():
    for name in ("ViewTrackError", "AutogradMetadataError", "AliasingError", "MutatedTensorError"):
        error = getattr(errors, name)("what happened")
        assert facts(pickle.loads(pickle.dumps(error))) == facts(error)


def test_an_error_comes_out_of_a_worker_process():
    fork = multiprocessing.get_context("fork")
    with concurrent.futures.ProcessPoolExecutor(1, mp_context=fork) as pool:
        error = pool.submit(of_a_guard).exception()
    assert isinstance(error, MutatedTensorError)
    assert [(write.op, write.function) for write in error.writes] == [
        ("aten.mul_.Tensor", "of_a_guard")
    ]
    assert error.saved.filename == __file__
