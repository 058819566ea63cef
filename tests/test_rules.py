"""Handlers of single ops: those of others are handlers like any, and ours are the tracker's own."""

from __future__ import annotations

import contextlib
import pickle
import threading
from types import MethodType
from typing import Any

import pytest
import torch
from handlers import NoOp, Wrapper, moves
from lines import line_of
from torch.utils._python_dispatch import TorchDispatchMode

import viewtrack as vt
from viewtrack import op_handlers, rules
from viewtrack._torch.rules import find_rule
from viewtrack.handler_calls import HandlerCalls
from viewtrack.ledger import ledger
from viewtrack.observing import ObservingTracker
from viewtrack.tracking import TrackingMode

aten = torch.ops.aten


def writes_and_views(owner, func, types, args, kwargs):
    owner.t.add_(1)
    owner.view = owner.t.view(-1)
    return func(*args, **kwargs)


def writes_by_another_op(owner, func, types, args, kwargs):
    return args[0].copy_(args[0] * args[1])


def passes_on(owner, func, types, args, kwargs):
    return func(*args, **kwargs)


def leaves_to_the_class(owner, func, types, args, kwargs):
    return owner.__torch_dispatch__(func, types, args, kwargs)


RULES = {
    aten.sin.default: writes_and_views,
    aten.mul_.Tensor: writes_by_another_op,
    aten.add_.Tensor: passes_on,
    aten.cos.default: leaves_to_the_class,
}


def right_name():
    class Mode(NoOp):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            return super().__torch_dispatch__(func, types, args, kwargs)

    return Mode


def other_name():
    class Mode(TorchDispatchMode):
        def handle(self, func, types, args=(), kwargs=None):
            return func(*args, **(kwargs or {}))

        __torch_dispatch__ = handle

    return Mode


@pytest.fixture
def library():
    library = torch.library.Library("aten", "FRAGMENT")
    yield library
    library._destroy()


@pytest.fixture(params=[right_name, other_name])
def mode(request, library):
    cls = request.param()
    for op, rule in RULES.items():
        torch.library.register_torch_dispatch(op, cls, rule, lib=library)
    mode: Any = cls()
    mode.t = torch.zeros(2)
    return mode


TRACKERS = {
    "track": vt.track,
    "full": lambda: vt.track(views="full"),
    "site off": lambda: vt.track(record="none"),
    "observed": lambda: ObservingTracker("site", lambda *_: None),
}


@pytest.mark.parametrize("tracker", TRACKERS)
def test_what_a_rule_writes_counts_and_what_it_passes_on_counts_once(mode, tracker):
    x = torch.ones(2)
    with TRACKERS[tracker](), mode:
        assert moves([mode.t, x], lambda: torch.ones(1).sin()) == [1, 0]
        assert moves([mode.t, x], lambda: x.add_(1)) == [0, 1]
        assert moves([mode.t, x], lambda: x.mul_(2)) == [0, 1]
        assert moves([mode.view], lambda: mode.t.add_(1)) == [1]
    assert x.tolist() == [4, 4]


@pytest.mark.parametrize("others", [0, 1, 2])
def test_between_other_modes(mode, others):
    x = torch.ones(2)
    with vt.track(), contextlib.ExitStack() as stack:
        for entered in [NoOp()] * others + [mode] + [NoOp()] * others:
            stack.enter_context(entered)
        assert moves([mode.t, x], lambda: x.mul_(2)) == [0, 1]
        assert moves([mode.t, x], lambda: torch.ones(1).sin()) == [1, 0]


@pytest.mark.parametrize("tracker", TRACKERS)
def test_a_rule_that_leaves_the_op_to_the_handler_of_the_class(mode, tracker):
    x = torch.zeros(1)
    with TRACKERS[tracker](), mode:
        assert x.cos().item() == 1


def test_what_a_rule_keeps_becomes_a_view(mode, library):
    mode.t = torch.zeros(2, requires_grad=True).clone()

    def views(owner, func, types, args, kwargs):
        owner.view = owner.t.view(-1)
        return func(*args, **kwargs)

    torch.library.register_torch_dispatch(aten.tan.default, type(mode), views, lib=library)
    with vt.track(views="full"), mode:
        torch.ones(1).tan()
    assert mode.view._base is mode.t


def test_a_rule_of_a_subclass(library):
    outside = torch.zeros(2)

    class Inner(Wrapper):
        pass

    def writes(cls, func, types, args, kwargs):
        outside.add_(1)
        return cls.__torch_dispatch__(func, types, args, kwargs)

    torch.library.register_torch_dispatch(aten.sin.default, Inner, writes, lib=library)
    torch.library.register_torch_dispatch(aten.mul_.Tensor, Inner, writes, lib=library)
    x = Inner(torch.ones(2))
    with vt.track():
        assert moves([outside, x, x.inner], lambda: x.sin()) == [1, 0, 0]
        assert moves([outside, x, x.inner], lambda: x.mul_(2)) == [1, 1, 1]


def test_writes_are_put_down_to_their_lines(mode):
    x = torch.ones(2)
    with vt.track(), mode:
        torch.ones(1).sin()
        x.mul_(2)  # PASSED ON
    (theirs,), (passed_on,) = ledger.writes(mode.t), ledger.writes(x)
    assert (theirs.function, theirs.site.in_handler) == ("writes_and_views", True)
    assert (passed_on.lineno, passed_on.site.in_handler) == (line_of(__file__, "PASSED ON"), False)


def test_who_watches_handlers_sees_it_run(mode):
    returned = []
    calls = HandlerCalls(lambda call, out: returned.append((call.func, call.mode)), print)
    with calls.watch(), mode:
        torch.ones(1).sin()
    assert (aten.sin.default, mode) in returned


# Of a `tracked` class.


@vt.tracked
class Tracked(NoOp):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        seen.append(func)
        return func(*args, **(kwargs or {}))


class Derived(Tracked):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return super().__torch_dispatch__(func, types, args, kwargs)


seen: list[Any] = []
SIN = aten.sin.default


def calls_it_sees(cls=Tracked):
    """How often the handler of `Tracked` runs for one `sin`, before and after it is known."""
    x = torch.ones(1)
    seen.clear()
    with cls():
        x.sin()
        x.sin()
    return seen.count(SIN)


@pytest.mark.parametrize("cls", [Tracked, Derived])
def test_a_tracked_handler_is_called_once_an_op(cls):
    assert calls_it_sees(cls) == 2
    with Tracked():
        assert calls_it_sees(cls) == 2 * 2
    assert Tracked not in rules.of_modes


def test_cpp_calls_what_the_tracked_handler_does_for_the_op():
    with Tracked():
        torch.ones(1).sin()
        assert find_rule(SIN, Tracked).__name__ == "rule"
    assert find_rule(SIN, Tracked) is None


def test_what_a_handler_keeps_for_each_op_can_be_pickled():
    calls_it_sees()
    kept = [cell.cell_contents for cell in Tracked.__torch_dispatch__.__closure__]
    kept = [x for x in kept if isinstance(x, dict)]
    assert all(SIN._op in x for x in kept)
    assert pickle.loads(pickle.dumps(kept)) == [{}, {}]


def test_a_rule_of_a_tracked_class_comes_before_its_handler(library):
    calls_it_sees()
    seen.clear()
    torch.library.register_torch_dispatch(SIN, Tracked, vt.tracked(writes_and_views), lib=library)
    with Tracked() as mode:
        mode.t = torch.zeros(2)
        assert moves([mode.t], lambda: torch.ones(1).sin()) == [1]
        assert mode.view._base is mode.t
    assert SIN not in seen


def test_a_rule_of_another_class_changes_nothing(library):
    torch.library.register_torch_dispatch(SIN, NoOp, passes_on, lib=library)
    assert calls_it_sees() == 2
    assert find_rule(SIN, NoOp) is passes_on


def test_a_handler_exchanged_while_the_tracked_mode_is_active(monkeypatch):
    instead = []

    def exchanged(self, func, types, args=(), kwargs=None):
        instead.append(func)
        return func(*args, **(kwargs or {}))

    calls_it_sees()
    x = torch.ones(1)
    with Tracked() as mode:
        mode.__torch_dispatch__ = MethodType(exchanged, mode)
        x.sin()
        del mode.__torch_dispatch__
        monkeypatch.setattr(Tracked, "__torch_dispatch__", exchanged)
        x.sin()
    assert (instead, seen.count(SIN)) == ([SIN, SIN], 2)


def test_a_handler_that_is_no_function_while_the_tracked_mode_is_active():
    class Instead:
        def __init__(self, mode):
            self.__self__ = mode

        def __call__(self, func, types, args=(), kwargs=None):
            return args[0]

    calls_it_sees()
    x = torch.ones(1)
    with Tracked() as mode:
        mode.__torch_dispatch__ = Instead(mode)
        assert x.sin() is x


def test_a_tracked_mode_that_is_given_another_class():
    code = find_rule.__code__
    for cls, other in ((Tracked, Derived), (Derived, Tracked)):
        with Tracked(), cls() as mode:
            mode.__class__ = other
            torch.ones(1).sin()
        assert find_rule.__code__ is code
        assert Tracked not in rules.of_modes


@pytest.mark.parametrize("views", ["version", "full"])
def test_who_stands_in_front_of_a_tracked_handler_is_asked(views):
    returned = []
    calls = HandlerCalls(lambda call, out: returned.append(call.func), print)
    with vt.track(views=views), Tracked(), calls.watch(), Tracked():
        assert calls_it_sees() == 2 * 3
    assert returned.count(SIN) == 2 * 2


def test_of_a_custom_op(mode):
    @torch.library.custom_op("vt_rules::custom", mutates_args=())
    def custom(x: torch.Tensor) -> torch.Tensor:
        return x.sin()

    custom.register_torch_dispatch(type(mode), writes_and_views)
    with vt.track(), mode:
        assert moves([mode.t], lambda: custom(torch.ones(2))) == [1]


@pytest.mark.parametrize("views", ["version", "full"])
@pytest.mark.parametrize("when", ["before", "while active"])
def test_a_rule_comes_before_a_handler_of_the_instance(mode, views, when):
    def of_the_instance(self, func, types, args=(), kwargs=None):
        torch.ones(1).sin()
        return func(*args, **(kwargs or {}))

    x = torch.ones(2)
    other = type(mode)()
    other.t = torch.zeros(2)
    instance = MethodType(of_the_instance, mode)
    if when == "before":
        mode.__torch_dispatch__ = instance
    with vt.track(views=views), other, mode:
        if when == "while active":
            mode.__torch_dispatch__ = instance
        assert moves([mode.t, other.t], lambda: x.sin()) == [1, 1]


def test_a_rule_that_is_false_is_called(library):
    class Rule:
        def __len__(self):
            return 0

        def __call__(self, mode, func, types, args, kwargs):
            return args[0]

    cls = other_name()
    x = torch.ones(2)
    torch.library.register_torch_dispatch(aten.sin.default, cls, Rule(), lib=library)
    with vt.track(), cls():
        assert x.sin() is x
    with HandlerCalls(lambda *_: None, print).watch(), cls():
        assert x.sin() is x


def test_a_rule_of_a_subclass_that_declines_is_asked_again_as_torch_does(library):
    given = []

    class One(Wrapper):
        pass

    class Other(Wrapper):
        @classmethod
        def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
            return cls(func(*[t.inner for t in args]))

    def declines(cls, func, types, args, kwargs):
        given.append(func)
        return NotImplemented

    mul = aten.mul.Tensor
    torch.library.register_torch_dispatch(mul, One, declines, lib=library)
    for context in (contextlib.nullcontext, vt.track):
        with context():
            assert type(One(torch.ones(2)) * Other(torch.ones(2))) is Other
    assert given == [mul] * 2


def test_an_error_of_a_rule_reaches_the_caller_and_leaves_nothing(mode, library):
    def refuses(owner, func, types, args, kwargs):
        raise ZeroDivisionError

    torch.library.register_torch_dispatch(aten.tan.default, type(mode), refuses, lib=library)
    with vt.track(), mode:
        with pytest.raises(ZeroDivisionError):
            torch.ones(1).tan()
        assert rules.behind(mode, None) is None
        assert moves([mode.t], lambda: torch.ones(1).sin()) == [1]


# Ours.


def test_ops_have_handlers_of_our_own_while_a_tracker_is_active():
    code, defaults = find_rule.__code__, find_rule.__defaults__
    with vt.track():
        torch.ones(1).exp2()
        ours = find_rule(aten.exp2.default, TrackingMode)
        assert ours is op_handlers.handlers[aten.exp2.default._op]
        with vt.track():
            pass
        assert find_rule(aten.exp2.default, TrackingMode) is ours
        assert find_rule(aten.exp2.default, NoOp) is None
    assert (find_rule.__code__, find_rule.__defaults__) == (code, defaults)
    assert find_rule(aten.exp2.default, TrackingMode) is None


def test_two_threads_that_meet_an_op_first_have_one_handler():
    both = threading.Barrier(2)
    found = []

    def run():
        both.wait()
        found.append(op_handlers.handler_of(aten.erfinv.default))

    op_handlers.handlers.pop(aten.erfinv.default._op, None)
    threads = [threading.Thread(target=run) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found[0] is found[1]


def test_an_op_defined_anew_is_planned_anew():
    x = torch.ones(2)
    ways = (("op(Tensor x) -> Tensor", torch.neg, 0), ("op(Tensor(a!) x) -> Tensor", inc, 1))
    with vt.track():
        for schema, body, moved in ways:
            with torch.library._scoped_library("vt_rules", "DEF") as library:
                library.define(schema)
                library.impl("op", body, "CompositeExplicitAutograd")
                assert moves([x], lambda: torch.ops.vt_rules.op(x)) == [moved]


def inc(x):
    return x.add_(1) + 1
