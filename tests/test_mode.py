"""Who switches tracking on, and when; and that it is off again afterwards, whatever happens."""

from __future__ import annotations

import logging
import threading

import pytest
import torch
from handlers import NoOp, moves
from torch.utils._python_dispatch import TorchDispatchMode
from view_makers import below_autograd, share_a_counter

import viewtrack as vt
from viewtrack import mode as mode_module

aten = torch.ops.aten


def stack_depth():
    return torch._C._len_torch_dispatch_stack()


def excluded():
    return str(torch._C._dispatch_tls_local_exclude_set())


def tracks():
    """Whether a write that a handler issues is counted here."""
    x = torch.zeros(1)
    return moves([x], lambda: below_autograd(lambda: x.add_(1))) == [1]


@pytest.fixture(autouse=True)
def as_it_was():
    before = excluded()
    assert not tracks()
    yield
    assert stack_depth() == 0
    assert excluded() == before
    assert not tracks()


# The program of pytorch issue 96319: a mode smuggles an alias of sin's result out.


class SavesAlias(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.saved = None

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if func is aten.sin.default:
            self.saved = out.view_as(out)
        return out


def four_answers(b, saved):
    """Does a write to either move the counter of both?"""
    answers = []
    for written in (b, saved):
        old_b, old_saved = b._version, saved._version
        written.mul_(2)
        answers += [b._version > old_b, saved._version > old_saved]
    return answers


def test_issue_96319_with_its_writes_inside():
    with vt.track():
        mode = SavesAlias()
        with mode:
            b = torch.sin(torch.tensor(1.0))
        assert b.data_ptr() == mode.saved.data_ptr()
        assert four_answers(b, mode.saved) == [True, True, True, True]


def test_issue_96319_with_its_writes_inside_both_modes():
    mode = SavesAlias()
    with vt.track(), mode:
        b = torch.sin(torch.tensor(1.0))
        assert four_answers(b, mode.saved) == [True, True, True, True]


def test_issue_96319_with_its_writes_afterwards():
    mode = SavesAlias()
    with vt.track(), mode:
        b = torch.sin(torch.tensor(1.0))
    assert four_answers(b, mode.saved) == [True, True, True, True]


def test_issue_96319_on_stock_torch():
    mode = SavesAlias()
    with mode:
        b = torch.sin(torch.tensor(1.0))
    assert four_answers(b, mode.saved) == [True, False, False, True]


# Entering and leaving.


def test_off_outside_on_inside():
    with vt.track() as tracker:
        assert isinstance(tracker, vt.Tracker)
        assert stack_depth() == 1
        assert tracks()


@pytest.mark.parametrize("records", [("none", "none"), ("site", "none"), ("none", "site")])
def test_nested_trackers_count_once(records):
    x = torch.zeros(2)
    with vt.track(record=records[0]), vt.track(record=records[1]):
        assert stack_depth() == 1
        assert moves([x], lambda: x.add_(1)) == [1]
        assert moves([x], lambda: below_autograd(lambda: x.add_(1))) == [1]
        assert moves([x], lambda: torch._foreach_add_([x], 1)) == [1]
        assert vt.storage_version(x) == (0 if records == ("none", "none") else 3)


def test_a_tracker_may_be_entered_again_inside_itself_and_afterwards():
    tracker = vt.track()
    for _ in range(2):
        with tracker:
            with tracker:
                assert tracks()
            assert tracks()
        assert not tracks()


def test_a_mode_between_two_trackers_counts_once():
    x = torch.zeros(2)
    with vt.track(), NoOp(), vt.track():
        assert moves([x], lambda: x.add_(1)) == [1]
        assert moves([x], lambda: below_autograd(lambda: x.add_(1))) == [1]


def test_decorator():
    @vt.track(record="none")
    def run(times, *, add):
        """Add."""
        x = torch.zeros(1)
        for _ in range(times):
            below_autograd(lambda: x.add_(add))
        return x._version, x.item()

    assert run.__name__ == "run"
    assert run.__doc__ == "Add."
    assert run(2, add=3) == (2, 6.0)
    assert run(1, add=1) == (1, 1.0)


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, GeneratorExit])
def test_the_body_raises(error):
    @vt.track()
    def body():
        assert tracks()
        raise error

    with pytest.raises(error):
        body()


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_a_handler_above_raises(error):
    class Raises(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            args[0].view(-1).add_(1)
            raise error

    x = torch.zeros(2)
    with vt.track():
        before = excluded()
        with pytest.raises(error), Raises():
            x.sin()
        assert excluded() == before
        assert tracks()
    assert x._version == 1


def test_a_kernel_in_python_raises():
    lib = torch.library.Library("vt_mode", "DEF")
    lib.define("fails_(Tensor(a!) x) -> ()")

    def fails_(x):
        x.add_(1)
        raise ValueError("no")

    lib.impl("fails_", fails_, "CompositeExplicitAutograd")
    x = torch.zeros(1)
    with vt.track():
        before = excluded()
        with pytest.raises(ValueError, match="no"):
            torch.ops.vt_mode.fails_(x)
        assert excluded() == before
        assert tracks()
    assert x._version == 1


def test_a_generator_suspended_inside():
    def generator():
        with vt.track():
            yield tracks()
            yield tracks()

    steps = generator()
    assert next(steps)
    assert tracks()  # a mode stays on the stack while its generator sleeps, as torch's own do
    assert next(steps)
    steps.close()


def test_trackers_left_out_of_order():
    first, second = vt.track(), vt.track()
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert tracks()
    second.__exit__(None, None, None)


def test_another_thread_is_tracked_only_by_its_own_tracker():
    found = {}

    def work(own):
        found[own, "before"] = tracks()
        if own:
            with vt.track():
                found[own, "inside"] = tracks()
            found[own, "after"] = tracks()

    with vt.track():
        for own in (False, True):
            thread = threading.Thread(target=work, args=(own,))
            thread.start()
            thread.join()
        assert tracks()
    assert found == {
        (False, "before"): False,
        (True, "before"): False,
        (True, "inside"): True,
        (True, "after"): False,
    }


def test_entered_above_another_mode_it_says_so_once(caplog):
    mode_module._say_entered_above.cache_clear()
    with caplog.at_level(logging.WARNING, logger="viewtrack"):
        for _ in range(2):
            with NoOp(), vt.track():
                pass
    assert [record.name for record in caplog.records] == ["viewtrack.mode"]
    assert "entered above another dispatch mode" in caplog.text


@pytest.mark.parametrize(
    ("wrong", "names"), [({"views": "some"}, "`views`"), ({"record": "all"}, "`record`")]
)
def test_arguments_are_checked(wrong, names):
    with pytest.raises(ValueError, match=names):
        vt.track(**wrong)


# What is recorded.


def test_none_records_nothing():
    x = torch.zeros(2)
    with vt.track(record="none"):
        x.add_(1)
        below_autograd(lambda: x.add_(1))
    assert vt.storage_version(x) == 0


@pytest.mark.parametrize("record", ["site", "stack"])
def test_op_and_line_are_recorded_of_every_write(record):
    from viewtrack.ledger import ledger

    x = torch.zeros(2)
    with vt.track(record=record):
        x.view(2).add_(1)
        torch.mul(x, 2, out=x)
        torch._foreach_add_([x], 1)
        below_autograd(lambda: x.detach().zero_())
    writes = ledger.writes(x)
    assert [(w.op, w.argument) for w in writes] == [
        ("aten.add_.Tensor", "self"),
        ("aten.mul.out", "out"),
        ("aten._foreach_add_.Scalar", "self"),
        ("aten.zero_.default", "self"),
    ]
    assert [(w.version_before, w.version_after) for w in writes] == [(0, 1), (1, 2), (2, 3), (3, 4)]
    lines = [w.lineno for w in writes]
    assert lines == list(range(lines[0], lines[0] + 4))
    assert {w.filename for w in writes} == {__file__}
    assert [w.site.in_handler for w in writes] == [False, False, False, True]
    assert all(bool(w.site.stack) is (record == "stack") for w in writes)


def test_the_line_beyond_a_mode_that_passes_the_op_on_is_recorded():
    from viewtrack.ledger import ledger

    x = torch.zeros(2)
    with vt.track(), NoOp(), NoOp():
        x.add_(1)
        torch._foreach_add_([x], 1)
    assert {w.filename for w in ledger.writes(x)} == {__file__}
    assert not any(w.site.in_handler for w in ledger.writes(x))


# After the tracker is left.


def test_a_kept_view_and_its_base_stay_joined_after_the_tracker_is_left():
    mode = SavesAlias()
    with vt.track(), mode:
        b = torch.zeros(3).sin()
    assert share_a_counter(mode.saved, b)
    assert moves([b, mode.saved], lambda: b.add_(1)) == [1, 1]
