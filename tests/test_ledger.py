"""The ledger knows a storage by identity, keeps nothing alive and forgets what has died."""

from __future__ import annotations

import gc
import threading
import weakref
from pathlib import Path

import pytest
import torch

import viewtrack as vt
from viewtrack.ledger import WRITES_KEPT, Region, ledger


@pytest.fixture
def tracked():
    with vt.track(record="site"):
        yield


def test_a_storage_that_was_never_written_is_unknown(tracked):
    x = torch.zeros(2)
    x.sin()
    x.view(2)
    assert vt.storage_version(x) == 0
    assert ledger.entry(x) is None
    assert ledger.writes(x) == []


ALIASES = {
    "itself": lambda x: x,
    "view": lambda x: x.view(2, 2),
    "detach": lambda x: x.detach(),
    ".data": lambda x: x.data,
    "_unsafe_view": lambda x: torch.ops.aten._unsafe_view(x, [2, 2]),
    "unsafe_split": lambda x: torch.unsafe_split(x, 2)[0],
    "set_": lambda x: torch.zeros(0).set_(x),
    "view(dtype)": lambda x: x.view(torch.int32),
}


@pytest.mark.parametrize("alias", ALIASES.values(), ids=ALIASES.keys())
def test_a_write_through_any_alias_is_known(tracked, alias):
    x = torch.zeros(4)
    other = alias(x)
    before = vt.storage_version(x)
    other.fill_(1)
    assert vt.storage_version(x) == before + 1
    last = ledger.writes(x)[-1]
    assert (last.op, last.argument) == ("aten.fill_.Scalar", "self")
    assert last.filename == __file__


def test_a_write_through_data_that_no_counter_shows_is_named_with_its_line(tracked):
    x = torch.tensor([1.0, 2.0], requires_grad=True)
    y = x.exp()
    y.data.mul_(100)
    assert y._version == 0
    (write,) = ledger.writes(y)
    assert write.op == "aten.mul_.Tensor"
    assert (
        write.function == "test_a_write_through_data_that_no_counter_shows_is_named_with_its_line"
    )
    line = Path(__file__).read_text().splitlines()[write.lineno - 1]
    assert line.strip() == "y.data.mul_(100)"


def test_the_region_is_that_of_the_written_view(tracked):
    x = torch.zeros(4, 6)
    x[1:3, ::2].zero_()
    (write,) = ledger.writes(x)
    assert write.region == Region(offset=6, size=(2, 3), stride=(6, 2), itemsize=4)


def test_every_written_argument_is_entered(tracked):
    x, y = torch.zeros(2), torch.zeros(2)
    torch._foreach_add_([x, y], 1)
    assert vt.storage_version(x) == vt.storage_version(y) == 1


def test_a_write_that_raised_is_not_entered(tracked):
    x = torch.zeros(2)
    with pytest.raises(RuntimeError):
        x.add_(torch.zeros(3))
    assert vt.storage_version(x) == 0


def test_counts_all_and_keeps_the_last(tracked):
    x = torch.zeros(1)
    times = WRITES_KEPT + 5
    for _ in range(times):
        x.add_(1)
    writes = ledger.writes(x)
    assert vt.storage_version(x) == times
    assert [w.count for w in writes] == list(range(6, times + 1))
    assert writes[-1].version_after == x._version == times


def test_an_entry_dies_with_its_storage_and_holds_nothing(tracked):
    known = len(ledger)
    x = torch.zeros(1000)
    view = x.detach()  # a view that does not keep its base
    x.add_(1)
    tensor, storage = weakref.ref(x), weakref.ref(x.untyped_storage())
    assert len(ledger) == known + 1
    del x
    assert tensor() is None
    assert len(ledger) == known + 1  # the view keeps the storage
    del view
    assert storage() is None
    assert len(ledger) == known


def test_a_new_storage_at_an_old_address_starts_from_nothing(tracked):
    addresses = set()
    met_again = 0
    for _ in range(50):
        x = torch.zeros(1000)
        address = x.untyped_storage()._cdata
        met_again += address in addresses
        addresses.add(address)
        assert vt.storage_version(x) == 0
        x.add_(1)
        assert vt.storage_version(x) == 1
        del x
    assert met_again, "the allocator never gave an address twice, so nothing was tested"


def test_resize_keeps_the_storage_and_set_exchanges_it(tracked):
    x = torch.zeros(2)
    x.add_(1)
    x.resize_(100)
    assert [w.op for w in ledger.writes(x)] == ["aten.add_.Tensor", "aten.resize_.default"]
    y = torch.zeros(2)
    x.set_(y)
    assert ledger.writes(x) == ledger.writes(y) == []
    x.data = torch.zeros(3)
    assert vt.storage_version(x) == 0


def test_a_tensor_without_storage_is_known_by_itself(tracked):
    x = torch.eye(2).to_sparse()
    x.mul_(2)
    assert vt.storage_version(x) == 1
    assert ledger.writes(x)[0].region is None
    gc.collect()
    known = len(ledger)
    del x
    assert len(ledger) == known - 1


def test_threads_write_to_one_ledger():
    x = torch.zeros(4)
    views = list(x.split(1))

    def work(view):
        with vt.track(record="site"):
            for _ in range(200):
                view.add_(1)

    threads = [threading.Thread(target=work, args=(v,), name=f"t{i}") for i, v in enumerate(views)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert vt.storage_version(x) == 800
    assert {w.thread for w in ledger.writes(x)} <= {"t0", "t1", "t2", "t3"}
    counts = [w.count for w in ledger.writes(x)]
    assert counts == list(range(counts[0], 801))


def test_inference_tensors_have_writes_without_versions(tracked):
    with torch.inference_mode():
        x = torch.zeros(2)
        x.add_(1)
    (write,) = ledger.writes(x)
    assert (write.version_before, write.version_after) == (None, None)
