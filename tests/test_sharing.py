"""Whether two tensors share a counter, asked without losing what other threads count."""

from __future__ import annotations

import gc

import torch

from viewtrack import _torch, share_version
from viewtrack.sharing import _shared, share_a_counter


def test_who_shares():
    x = torch.ones(4)
    x.add_(1)
    for other in (x, x.detach(), x[1:], x.view(2, 2)[0]):
        assert share_a_counter(x, other)
        assert share_a_counter(other, x)
    for other in (x.data, torch.ones(4), torch.ones(4).add_(1)):
        assert not share_a_counter(x, other)
    assert x._version == 1
    with torch.inference_mode():
        assert not share_a_counter(torch.ones(1), torch.ones(1))


def test_a_pair_is_tried_once(monkeypatch):
    x = torch.ones(4)
    kept = x.detach()
    assert share_a_counter(x[1:], kept)
    # From here on a move back would undo what another thread has counted meanwhile.
    monkeypatch.setattr(_torch, "set_version", None)
    for _ in range(3):
        x.add_(1)
        assert share_a_counter(x, kept)
        assert share_a_counter(x[2:], kept)


def test_nothing_is_kept_of_the_dead():
    x = torch.ones(4)
    before = len(_shared)
    kept = x.detach()
    assert share_a_counter(x, kept)
    assert len(_shared) == before + 1
    del kept
    gc.collect()
    assert len(_shared) == before


def test_a_counter_that_is_joined_later():
    x = torch.ones(4)
    y = x.data
    assert not share_a_counter(y, x)
    share_version(y, x)
    assert share_a_counter(y, x)
