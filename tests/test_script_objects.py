"""Ops that Python hands to a dispatch mode itself, as it does where an argument is a ScriptObject.

The dispatcher excludes ADInplaceOrView before it calls a handler; Python excludes nothing. What a
handler leaves excluded there stays so for the thread, and then nothing is counted any more.
"""

from __future__ import annotations

import pytest
import torch
from against_stock import WAYS

import viewtrack as vt
from viewtrack._torch import ADINPLACEORVIEW, is_excluded


def counts():
    x = torch.ones(2)
    before = x._version  # in a tracked handler it need not be 0
    x.add_(1)
    return x._version - before, is_excluded(ADINPLACEORVIEW)


@pytest.mark.parametrize("way", WAYS)
def test_a_recorded_function_leaves_counting_on(way):
    with WAYS[way]():
        with torch.profiler.record_function("region"):
            assert counts() == (1, False)
        assert counts() == (1, False)
    assert counts() == (1, False)


@pytest.mark.parametrize("way", WAYS)
def test_a_recorded_function_that_raises_leaves_counting_on(way):
    with WAYS[way]():
        with pytest.raises(KeyError), torch.profiler.record_function("region"):
            raise KeyError
        assert counts() == (1, False)
    assert counts() == (1, False)


def test_compiling_leaves_counting_on():
    """It times itself by recorded functions."""

    @torch.compile(backend="aot_eager")
    def fn(x):
        y = x * 2
        y.view(-1)[1:].mul_(3)
        return y.sin()

    with vt.track():
        fn(torch.rand(2, 2, requires_grad=True)).sum().backward()
        assert counts() == (1, False)
    assert counts() == (1, False)
