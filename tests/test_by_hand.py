"""Handlers that a program calls by name: what they issue is above autograd, and counted there."""

from __future__ import annotations

import functools
import sys

import pytest
import torch
from handlers import NoOp, On
from torch.utils._python_dispatch import TorchDispatchMode

import viewtrack as vt
from viewtrack import by_hand

aten = torch.ops.aten

pytestmark = pytest.mark.skipif(
    sys.version_info < (3, 11), reason="Python 3.10 does not know the column of a call"
)


class Doubling(TorchDispatchMode):
    """Writes, by an op of its own, what it is given, and a view of it."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        args[0].mul_(2)
        args[0][1:].add_(1)
        return args[0]


class TrackedDoubling(Doubling):
    @vt.tracked
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return Doubling.__torch_dispatch__(self, func, types, args, kwargs)


def __torch_dispatch__(func, types, args=(), kwargs=None):
    args[0].mul_(2)
    args[0][1:].add_(1)
    return args[0]


def _by_class(x):
    return Doubling.__torch_dispatch__(Doubling(), aten.neg_.default, (), (x,))


def _by_instance(x):
    return Doubling().__torch_dispatch__(
        aten.neg_.default,
        (),
        args=(x,),
        kwargs={},
    )


def _by_name(x):
    return __torch_dispatch__(aten.neg_.default, (), (x,))


def _of_tracked(x):
    return TrackedDoubling().__torch_dispatch__(aten.neg_.default, (), (x,))


CALLS = [_by_class, _by_instance, _by_name, _of_tracked]
TRACKERS = {
    "track": vt.track,
    "full": lambda: vt.track(views="full"),
    "site off": lambda: vt.track(record="none"),
}


@pytest.mark.parametrize("tracker", TRACKERS)
@pytest.mark.parametrize("call", CALLS)
def test_what_it_writes_counts_as_without_a_tracker(call, tracker):
    x, y = torch.ones(3), torch.ones(3)
    call(y)
    with TRACKERS[tracker]():
        assert call(x) is x
    assert x._version == y._version == 2
    assert x.tolist() == y.tolist() == [2, 3, 3]


def test_what_modes_inside_of_it_issue_is_counted_below_autograd():
    def __torch_dispatch__(func, types, args=(), kwargs=None):
        with On(aten.exp.default, lambda out: (out.add_(1), out._version)) as mode:
            args[0].exp()
        return mode.kept[0][1]

    with vt.track():
        assert __torch_dispatch__(aten.exp.default, (), (torch.zeros(2),)) == 1


def test_a_handler_that_calls_another_by_name_is_one():
    class Delegating(NoOp):
        def handle(self, func, types, args=(), kwargs=None):
            if func is aten.exp.default:
                return __torch_dispatch__(aten.neg.default, (), (torch.ones(3),))
            return func(*args, **(kwargs or {}))

        __torch_dispatch__ = handle

    with vt.track(), Delegating():
        assert torch.zeros(3).exp()._version == 2


@pytest.mark.parametrize("tracker", TRACKERS)
def test_a_handler_that_calls_the_inherited_one_is_one(tracker):
    class Above(NoOp):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = super().__torch_dispatch__(func, types, args, kwargs)
            if func is aten.exp.default:
                Doubling.__torch_dispatch__(self, func, types, (out,), {})
            return out

    with TRACKERS[tracker](), Above():
        assert torch.zeros(3).exp()._version == 2


def test_calls_without_a_source_are_those_of_a_handler():
    names = {"handler": __torch_dispatch__, "op": aten.neg_.default, "x": torch.ones(3)}
    exec("def f():\n  return __torch_dispatch__(op, (), (x,))", names)
    assert not by_hand._names_a_handler(names["f"].__code__, 0)


def test_what_is_known_of_calls_does_not_grow(monkeypatch):
    monkeypatch.setattr(by_hand, "_MOST_CALLS", 3)
    sources = [functools.partial(exec, f"x.add_({n})") for n in range(9)]
    x = torch.ones(3)

    class Writing(NoOp):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if func is aten.exp.default:
                args[0].mul_(1)
            return func(*args, **(kwargs or {}))

    with vt.track(), Writing():
        for run in sources:
            run({"x": x})
            exec("x.exp()", {"x": x})
    assert len(by_hand._calls) <= 3
    assert x._version == 18
