"""Nothing grows: tensors, storages, ledger entries and memory are afterwards where they were."""

from __future__ import annotations

import gc

import pytest
import torch
from handlers import NoOp
from view_makers import below_autograd

import viewtrack as vt
from viewtrack.ledger import ledger

PAGE_KIB = 4


def resident_kib():
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * PAGE_KIB


def living():
    """How many tensors, storages and ledger entries there are."""
    gc.collect()
    kinds = [type(obj) for obj in gc.get_objects()]
    tensors = sum(issubclass(kind, torch.Tensor) for kind in kinds)
    storages = sum(issubclass(kind, torch.UntypedStorage) for kind in kinds)
    return tensors, storages, len(ledger)


LIB = torch.library.Library("vt_growth", "DEF")
LIB.define("head(Tensor(a) x) -> Tensor(a)")
LIB.impl("head", lambda x: x[:1], "CompositeExplicitAutograd")
LIB.define("inc_(Tensor(a!) x) -> ()")
LIB.impl("inc_", lambda x: (x.add_(1), None)[1], "CompositeExplicitAutograd")


def ten_ops(x):
    """Ops of each kind, ten in all."""
    y = x.mul(2)
    y.view(2, 2).add_(1)
    y.split(2)
    torch._foreach_add_([y], 1)
    torch.ops.aten._unsafe_view(y, [2, 2])
    torch.ops.vt_growth.head(y)
    torch.ops.vt_growth.inc_(y)
    torch.add(y, 1, out=y)
    y.detach()


def grow(record, rounds):
    x = torch.ones(4)
    with vt.track(record=record), NoOp():
        for _ in range(rounds):
            ten_ops(x)
            if rounds < 1000:
                below_autograd(lambda: ten_ops(x))


def enter_and_leave(times):
    for index in range(times):
        with vt.track(record=("none", "site", "stack")[index % 3]):
            if index % 7 == 0:
                torch.zeros(1).add_(1)


def assert_steady(body, warm, often):
    """`body(often)` leaves behind what `body(warm)` did."""
    body(warm)
    before, memory = living(), resident_kib()
    body(often)
    # Fewer is no growth: what earlier tests left may die in the meantime.
    assert all(now <= was for now, was in zip(living(), before, strict=True)), (before, living())
    assert resident_kib() - memory < 8 * 1024


@pytest.mark.parametrize("record", ["none", "site", "stack"])
def test_ops_leave_nothing_behind(record):
    assert_steady(lambda n: grow(record, n), 20, 200)


def test_trackers_leave_nothing_behind():
    assert_steady(enter_and_leave, 30, 600)


@pytest.mark.heavy
@pytest.mark.parametrize("record", ["none", "site"])
def test_two_hundred_thousand_ops_leave_nothing_behind(record):
    assert_steady(lambda n: grow(record, n), 1000, 20_000)


@pytest.mark.heavy
def test_ten_thousand_trackers_leave_nothing_behind():
    assert_steady(enter_and_leave, 500, 10_000)


def test_one_storage_written_often_keeps_its_last_writes_only():
    x = torch.zeros(1)
    with vt.track(record="stack"):
        for _ in range(500):
            x.add_(1)
    assert len(ledger.writes(x)) < 100


@pytest.mark.parametrize("kept", ["tensor", "entry"])
def test_growth_is_seen(kept):
    """The checks can fail."""
    hoard = []

    def body(times):
        with vt.track():
            for _ in range(times):
                t = torch.zeros(1).add_(1)
                hoard.append(t if kept == "tensor" else t.untyped_storage())

    with pytest.raises(AssertionError):
        assert_steady(body, 5, 50)
