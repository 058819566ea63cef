"""Frames that a walk up the stack stops at: how long they are anchors, and which are none."""

from __future__ import annotations

import gc
import sys
import weakref
from contextlib import ExitStack

import pytest
import torch
from handlers import NoOp
from torch.utils._python_dispatch import TorchDispatchMode

import viewtrack as vt
from viewtrack.anchors import anchors
from viewtrack.ledger import ledger

aten = torch.ops.aten


@vt.tracked
class Tracked(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


CONTEXTS = [vt.track, Tracked]


@pytest.fixture(autouse=True)
def steady():
    """No test leaves an anchor behind."""
    before = dict(anchors)
    yield
    assert anchors == before


@pytest.mark.parametrize("context", CONTEXTS)
def test_a_frame_is_an_anchor_while_its_with_statement_runs(context):
    frame = sys._getframe()
    with context():
        assert anchors[frame] == 1
        with context():
            assert anchors[frame] == 2
        assert anchors[frame] == 1
    assert frame not in anchors


@pytest.mark.parametrize("context", CONTEXTS)
def test_it_is_left_by_an_exception(context):
    with pytest.raises(ZeroDivisionError), context():
        raise ZeroDivisionError


@pytest.mark.parametrize("context", CONTEXTS)
def test_a_helper_that_enters_is_none_and_is_let_go(context):
    def enter(stack):
        kept = torch.ones(1)
        stack.enter_context(context())
        mode = context()
        mode.__enter__()
        stack.callback(mode.__exit__, None, None, None)
        return weakref.ref(kept)

    before = dict(anchors)
    gc.disable()
    try:
        with ExitStack() as stack:
            kept = enter(stack)
            assert anchors == before
            assert kept() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("context", CONTEXTS)
def test_a_generator_is_none(context):
    """Whoever resumes it is above it: here a handler, which then issued the write."""

    def steps(x):
        with context():
            yield
            x.add_(1)
            yield

    class Resume(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if func is aten.neg.default:
                next(generator)
            return func(*args, **(kwargs or {}))

    x = torch.zeros(1)
    generator = steps(x)
    next(generator)
    assert not [frame for frame in anchors if frame.f_code is steps.__code__]
    with Resume():
        torch.ones(1).neg()
    assert x._version == 1
    generator.close()


@pytest.mark.parametrize("context", CONTEXTS)
def test_a_frame_below_a_handler_is_none(context):
    seen = []

    class Enter(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            with context():
                seen.append(sys._getframe() in anchors)
                x.add_(1)
            return func(*args, **(kwargs or {}))

    x, y = torch.zeros(1), torch.ones(1)
    with context(), Enter():
        y.neg()
    assert seen == [False]
    assert x._version == 1


def test_a_manual_exit_in_an_anchor_costs_time_and_nothing_else():
    x, mode = torch.zeros(1), Tracked()
    mode.__enter__()
    with Tracked():
        x.add_(1)
        with NoOp():
            x.add_(1)
    mode.__exit__(None, None, None)
    assert x._version == 2


@pytest.mark.parametrize("context", CONTEXTS)
@pytest.mark.parametrize("planted", [False, True])
def test_walks_stop_there(context, planted):
    """A planted anchor hides the function above it, which has the name of a handler and is none."""
    x = torch.zeros(1)

    def write():
        if planted:
            anchors[sys._getframe()] = 1
        with NoOp():
            x.add_(1)
        anchors.pop(sys._getframe(), None)

    def __torch_dispatch__():
        write()

    like_a_handler = __torch_dispatch__  # called by its own name it would be known for what it is
    with context():
        like_a_handler()
    assert x._version == (1 if planted else 2)
    if context is vt.track:
        assert [write.site.in_handler for write in ledger.writes(x)] == [not planted]
        assert [write.function for write in ledger.writes(x)] == ["write"]


def test_without_the_opcode_nothing_is_one(monkeypatch):
    """Python 3.14 enters by other opcodes."""
    monkeypatch.setattr("viewtrack.anchors._ENTERING", None)
    x, before = torch.zeros(1), dict(anchors)
    with Tracked(), vt.track():
        assert anchors == before
        x.add_(1)
    assert x._version == 1


def test_a_frame_without_user_code_below_the_anchor_is_looked_for_above():
    """The decorator's own frame is the anchor, and is no user code."""

    @vt.track(record="site")
    def relu_(x):
        return x.relu_()

    @vt.track(record="site")
    def write(x):
        relu_(x)

    x = torch.zeros(1)
    torch.nn.functional.relu(x)
    vt.track(record="site")(torch.relu_)(x)
    write(x)
    first, second = ledger.writes(x)
    assert first.function == "test_a_frame_without_user_code_below_the_anchor_is_looked_for_above"
    assert second.function == "relu_"
