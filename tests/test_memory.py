"""What tracking keeps: nothing of an op that writes nothing, and of a write what `Write` tells."""

from __future__ import annotations

import sys
import tracemalloc
from collections import deque
from types import CodeType

import pytest
import torch
from handlers import NoOp

import viewtrack as vt
from viewtrack.ledger import WRITES_KEPT, ledger

OPS = [
    pytest.param(lambda x: x + 1, id="add"),
    pytest.param(lambda x: x @ x, id="mm"),
    pytest.param(lambda x: torch.nn.functional.linear(x[None], x), id="linear"),
    pytest.param(lambda x: x.view(-1), id="view"),
    pytest.param(lambda x: x.split(1), id="split"),
    pytest.param(lambda x: torch._foreach_neg([x]), id="foreach"),
]
OFTEN = 300
ADDRESSES = 64
"""Bytes an op, below which no object of Python fits: lists and tables grow by leaps."""


def growth(context, op, plant=None):
    """The bytes that Python holds an op more than before, while its results live."""
    # The least of three: what is made once, at some op, counts in one of them alone.
    return min(measured(context, op, plant) for _ in range(3))


def measured(context, op, plant):
    x, kept = torch.ones(2, 2), []
    with context():
        for _ in range(50):
            kept.append(op(x))
        tracemalloc.start()
        try:
            for _ in range(OFTEN):
                kept.append(op(x))
                if plant is not None:
                    plant(kept[-1])
            return tracemalloc.get_traced_memory()[0] / OFTEN
        finally:
            tracemalloc.stop()


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("record", ["none", "site", "stack"])
def test_nothing_is_kept_of_an_op_that_writes_nothing(record, op):
    before = len(ledger)
    stock = growth(NoOp, op)
    assert growth(lambda: vt.track(record=record), op) < stock + ADDRESSES
    assert len(ledger) <= before


@pytest.mark.parametrize("op", OPS[:1])
def test_what_is_kept_is_seen(op):
    """The check above can fail."""
    stock = growth(NoOp, op)
    assert growth(lambda: vt.track("version"), op, plant=ledger.open) > stock + ADDRESSES


SIMPLE = (str, int, bool, type(None), torch.dtype, torch.Size, CodeType, type)


def kinds_held(t):
    """The kinds of all that the entry of t's storage keeps alive, apart from values."""
    entry = ledger.entry(t)
    found, todo = set(), [entry.notes, entry._raw]
    while todo:
        value = todo.pop()
        if not isinstance(value, SIMPLE):
            found.add(type(value))
            if isinstance(value, (deque, tuple, list)):
                todo += value
    return found


def write_often(record, times=3):
    t, base = torch.zeros(2, 2), torch.zeros(2, 2)
    with vt.track(record=record):
        for _ in range(times):
            t.add_(1)
            base[0].mul_(2)
            torch._foreach_add_([t, base], 1)
            torch.add(t, 1, out=t)
    return t, base


@pytest.mark.parametrize("record", ["site", "stack"])
def test_an_entry_holds_no_tensor_storage_or_frame(record):
    for t in write_often(record):
        assert kinds_held(t) == {deque, tuple}


def test_none_makes_no_entry():
    assert [ledger.entry(t) for t in write_often("none")] == [None, None]


@pytest.mark.parametrize(
    "make", [lambda: torch.ones(1), sys._getframe, lambda: torch.ones(1).untyped_storage()]
)
def test_whatever_else_an_entry_holds_is_seen(make):
    plant = make()
    (t, _) = write_often("site")
    ledger.entry(t).notes = [plant]
    assert type(plant) in kinds_held(t)


def test_one_entry_a_storage_however_often_and_through_whatever_it_is_written():
    before = len(ledger)
    t, base = write_often("site", times=WRITES_KEPT)
    assert len(ledger) == before + 2
    assert len(ledger.entry(t)._raw) == len(ledger.entry(base)._raw) == WRITES_KEPT
    assert vt.storage_version(t) == 3 * WRITES_KEPT
    del t, base
    assert len(ledger) == before


def test_a_write_is_kept_in_less_than_a_kilobyte():
    t = torch.zeros(2, 2)
    with vt.track():
        t.add_(1)
        tracemalloc.start()
        try:
            for _ in range(WRITES_KEPT - 1):
                t.add_(1)
            assert tracemalloc.get_traced_memory()[0] / WRITES_KEPT < 1024
        finally:
            tracemalloc.stop()
