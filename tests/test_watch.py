"""The account that a watch keeps of its counter, and what it costs to keep many."""

import gc
import sys
import threading
import weakref

import pytest
import torch

from viewtrack import track
from viewtrack.site import place_of
from viewtrack.watch import RAW, UNSEEN, WRITES_KEPT, Watch, watched
from viewtrack.weak_watch import WeakWatch

HERE = place_of(sys._getframe())


def watch(t, **kwargs):
    return Watch(t.detach(), "a tensor", HERE, **kwargs)


def ops(kept):
    return [write.op for write in kept.writes()[0]]


def test_a_write_that_a_mode_sees_is_named():
    t = torch.ones(4)
    kept = watch(t)
    with track(record="none"):
        t.view(2, 2)[0].mul_(2)
    (write,), more = kept.writes()
    assert (write.op, write.argument, more) == ("aten.mul_.Tensor", "self", 0)
    assert (write.version_before, write.version_after) == (0, 1)
    assert (write.filename, write.thread) == (__file__, threading.current_thread().name)


def test_seen_and_unseen_writes_are_told_apart_in_their_order():
    t = torch.ones(4)
    kept = watch(t)
    t.add_(1)
    with track(record="none"):
        t.mul_(2)
        t.data.sub_(1)
    t.add_(1)
    assert ops(kept) == [UNSEEN, "aten.mul_.Tensor", "aten.sub_.Tensor", UNSEEN]


def test_a_write_to_a_counter_of_its_own_hides_no_unseen_write():
    # Both counters go from 0 to 1, by one write each; only the first reaches the kept half.
    buffer = torch.ones(8)
    kept = watch(buffer)
    with track(record="none"):
        buffer.data[4:4].add_(1)
    buffer.add_(1)
    assert ops(kept) == [UNSEEN]


def test_a_write_elsewhere_in_the_storage_does_not_count():
    buffer = torch.ones(8)
    kept = watch(buffer[:4])
    with track(record="none"):
        buffer[4:].mul_(2)
        torch._foreach_add_([buffer[4:6], buffer[6:]], 1.0)
    buffer[5].add_(1)
    assert ops(kept) == []
    buffer[3].add_(1)
    assert ops(kept) == [UNSEEN]


def test_an_op_that_writes_two_views_of_one_storage():
    buffer = torch.ones(8)
    first, second, both = watch(buffer[:4]), watch(buffer[4:]), watch(buffer)
    with track(record="none"):
        torch._foreach_add_([buffer[:2], buffer[2:4]], 1.0)
    assert ops(first) == ["aten._foreach_add_.Scalar"] * 2
    assert ops(both) == ["aten._foreach_add_.Scalar"] * 2
    assert ops(second) == []


@pytest.mark.parametrize("tracked", [True, False])
def test_writes_that_were_taken_back_do_not_count(tracked):
    t = torch.ones(4)
    kept = watch(t)

    def fill():
        with torch.autograd._unsafe_preserve_version_counter(t):
            t.mul_(2)
            t.add_(1)

    if tracked:
        with track(record="none"):
            fill()
    else:
        fill()
    assert ops(kept) == []
    with track(record="none"):
        t.sub_(1)
    assert ops(kept) == ["aten.sub_.Tensor"]


def test_changes_of_geometry_write_nothing():
    t = torch.ones(4, 4)
    kept = watch(t)
    with track(record="none"):
        t.t_()
        t.resize_(2, 2)
        t.set_(torch.zeros(3))
    assert ops(kept) == []


def test_a_storage_that_is_emptied_and_refilled_is_still_the_same():
    t = torch.ones(4)
    kept = watch(t)
    with track(record="none"):
        t.untyped_storage().resize_(0)
        t.untyped_storage().resize_(16)
        t.fill_(3)
    assert ops(kept) == ["aten.fill_.Scalar"]


def test_content_decides_over_writes():
    t = torch.ones(4)
    kept = watch(t, content=True)
    with track(record="none"):
        t.mul_(1)
    assert ops(kept) == []
    t.numpy()[0] = 5
    assert ops(kept) == ["aten.mul_.Tensor"]
    other = watch(t, content=True)
    t.numpy()[0] = 6
    assert ops(other) == [RAW]


def test_many_writes_are_counted_and_the_first_kept():
    t = torch.ones(4)
    kept = watch(t)
    with track(record="none"):
        for _ in range(WRITES_KEPT + 5):
            t.add_(1)
    writes, more = kept.writes()
    assert (len(writes), more) == (WRITES_KEPT, 5)
    assert writes[0].version_before == 0


def test_a_watch_that_is_released_or_dies_is_forgotten():
    gc.collect()
    before = len(watched)
    t = torch.ones(4)
    first, second = watch(t), watch(t)
    assert len(watched) == before + 1
    first.release()
    assert len(watched) == before + 1
    del second
    gc.collect()
    assert len(watched) == before


def test_a_weak_watch_keeps_nothing_alive_and_ends_with_its_storage():
    gc.collect()
    before = len(watched)
    ended = []
    t = torch.ones(4)
    storage = weakref.ref(t.untyped_storage())
    weak = WeakWatch(t, "a tensor", HERE, died=ended.append)
    assert weak.is_on(t)
    del t
    gc.collect()
    assert storage() is None
    assert ended == [weak]
    assert len(watched) == before


def test_a_new_storage_at_an_old_address_is_not_taken_for_the_old_one():
    for _ in range(100):
        t = torch.ones(4)
        weak = WeakWatch(t, "a tensor", HERE)
        key = weak.watch.key
        del t
        other = torch.ones(4)
        assert not weak.is_on(other)
        if other.untyped_storage()._cdata == key:
            with track(record="none"):
                other.add_(1)
            assert ops(weak.watch) == []
            return
    pytest.skip("the allocator reused no address")


def test_a_deep_copy_is_another_tensor():
    import copy

    t = torch.ones(4)
    kept = watch(t)
    with track(record="none"):
        copy.deepcopy(t).add_(1)
    assert ops(kept) == []


def test_threads_write_and_none_is_lost():
    t = torch.ones(8)
    kept = watch(t)

    def work(i):
        with track(record="none"):
            for _ in range(8):
                t[2 * i : 2 * i + 2].data.add_(1)

    threads = [threading.Thread(target=work, args=(i,), name=f"worker-{i}") for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    writes, more = kept.writes()
    assert len(writes) + more == 32
    assert {write.thread for write in writes} == {f"worker-{i}" for i in range(4)}
