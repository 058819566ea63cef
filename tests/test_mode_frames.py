"""Handlers of modes whose own frames do not tell who they are, or what they were given."""

from __future__ import annotations

import contextlib
import copy
import functools
import gc
import sys
import threading
import weakref
from types import MethodType
from typing import Any

import pytest
import torch
from handlers import NoOp, moves
from lines import line_of
from torch.utils._python_dispatch import TorchDispatchMode

import viewtrack as vt
from viewtrack import mode_frames
from viewtrack.handler_calls import HandlerCalls
from viewtrack.ledger import ledger
from viewtrack.observing import ObservingTracker

aten = torch.ops.aten
HANDLER = "__torch_dispatch__"


def serve(mode: Any, func: Any, args: Any, kwargs: Any = None) -> Any:
    """What all handlers here do: write in `sin`, add by another op, and pass on the rest."""
    if func is aten.sin.default:
        mode.t.add_(1)
        mode.view = mode.t.view(-1)
    if func is aten.mul_.Tensor:
        return args[0].copy_(args[0] * args[1])
    return func(*args, **(kwargs or {}))


def other_name(self, func, types, args=(), kwargs=None):
    return serve(self, func, args, kwargs)


def all_as_a_tuple(*given):
    return serve(given[0], given[1], *given[3:])


def some_as_a_tuple(self, func, *rest):
    return serve(self, func, *rest[1:])


def other_defaults(self, func, types, args=(), kwargs={}):  # noqa: B006
    return func(*args, **kwargs) if kwargs else serve(self, func, args)


def keeps_the_name(fn: Any) -> Any:
    @functools.wraps(fn)
    def wrapper(*args, **kwargs):
        return fn(*args, **kwargs)

    return wrapper


def writes_around(fn: Any) -> Any:
    @functools.wraps(fn)
    def wrapper(self, func, types, args=(), kwargs=None):
        if func is aten.sin.default:
            return serve(self, func, args, kwargs)
        return fn(self, func, types, args, kwargs)

    return wrapper


def exchanging(name: str = HANDLER) -> Any:
    """A handler of the right name that has other things in its variables than it was given."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        op, func, given, args = func, functools.partial(func), args, [*args]
        return serve(self, op, given, kwargs) if op is aten.sin.default else func(*args)

    def by_name(self, func, types, args=(), kwargs=None):
        return __torch_dispatch__(self, func, types, args, kwargs)

    return __torch_dispatch__ if name == HANDLER else by_name


def deleting() -> Any:
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        op, given = func, args
        del func, args
        return serve(self, op, given, kwargs)

    return __torch_dispatch__


def through_a_closure() -> Any:
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        def run():
            return func(*args)

        op, given, func = func, args, functools.partial(func)
        return serve(self, op, given) if op is aten.sin.default else run()

    return __torch_dispatch__


class Mixin:
    def handle(self, func, types, args=(), kwargs=None):
        return serve(self, func, args, kwargs)

    __torch_dispatch__ = handle


def with_more(self, more, func, types, args=(), kwargs=None):
    return serve(self, func, args, kwargs)


KINDS: dict[str, Any] = {
    "other name": other_name,
    "lambda": lambda self, func, types, args=(), kwargs=None: serve(self, func, args, kwargs),
    "all as a tuple": all_as_a_tuple,
    "some as a tuple": some_as_a_tuple,
    "other defaults": other_defaults,
    "decorated": keeps_the_name(other_name),
    "decorated twice": keeps_the_name(keeps_the_name(NoOp.__torch_dispatch__)),
    "decorated, of the right name": keeps_the_name(exchanging()),
    "a decorator that writes": writes_around(exchanging()),
    "no_grad": torch.no_grad()(other_name),
    "dynamo-disabled": torch._disable_dynamo(other_name),
    "partialmethod": functools.partialmethod(with_more, "more"),
    "exchanges what it was given": exchanging(),
    "deletes what it was given": deleting(),
    "exchanges what a closure has": through_a_closure(),
    "calls one that does": exchanging("by name"),
}
KINDS["decorated twice"] = keeps_the_name(keeps_the_name(other_name))


def mode_of(kind: str) -> Any:
    """A mode with such a handler, assigned after the class was made."""
    cls = type("Mode", (TorchDispatchMode,), {})
    cls.__torch_dispatch__ = KINDS[kind]
    mode = cls()
    mode.t = torch.zeros(2)
    return mode


each_kind = pytest.mark.parametrize("kind", KINDS)
TRACKERS = {
    "track": vt.track,
    "full": lambda: vt.track(views="full"),
    "site off": lambda: vt.track(record="none"),
    "observed": lambda: ObservingTracker("site", lambda *_: None),
}
each_tracker = pytest.mark.parametrize("tracker", TRACKERS)


@each_tracker
@each_kind
def test_what_it_writes_counts_and_what_it_passes_on_counts_once(kind, tracker):
    x = torch.ones(2)
    with TRACKERS[tracker](), mode_of(kind) as mode:
        assert moves([mode.t, x], lambda: torch.ones(1).sin()) == [1, 0]
        assert moves([mode.t, x], lambda: x.add_(1)) == [0, 1]
        assert moves([mode.t, x], lambda: x.mul_(2)) == [0, 1]
        assert moves([mode.view], lambda: mode.t.add_(1)) == [1]
    assert x.tolist() == [4, 4]
    assert HANDLER not in vars(mode)


@each_kind
@pytest.mark.parametrize("outer", ["other name", "exchanges what it was given", None])
def test_below_and_above_other_modes(kind, outer):
    x = torch.ones(2)
    above = NoOp() if outer is None else mode_of(outer)
    above.t = torch.zeros(2)
    with vt.track(), NoOp(), mode_of(kind) as mode, above:
        assert moves([mode.t, x], lambda: x.add_(1)) == [0, 1]
        assert moves([mode.t, x], lambda: x.mul_(2)) == [0, 1]
        assert moves([mode.t, above.t], lambda: torch.ones(1).sin()) == [1, int(outer is not None)]


@each_kind
def test_writes_are_put_down_to_their_lines(kind):
    x = torch.ones(2)
    with vt.track(), mode_of(kind) as mode:
        torch.ones(1).sin()
        x.add_(1)  # PASSED ON
    (theirs,), (passed_on,) = ledger.writes(mode.t), ledger.writes(x)
    assert (theirs.function, theirs.site.in_handler) == ("serve", True)
    assert (passed_on.lineno, passed_on.site.in_handler) == (line_of(__file__, "PASSED ON"), False)


def test_an_inherited_handler_of_another_name():
    class Mode(Mixin, TorchDispatchMode):
        pass

    class Inheriting(Mode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            return super().__torch_dispatch__(func, types, args, kwargs)

    for cls in (Mode, Inheriting):
        x = torch.ones(2)
        mode = cls()
        mode.t = torch.zeros(2)
        with vt.track(), mode:
            torch.ones(1).sin()
            x.add_(1)
            x.mul_(2)
        assert (mode.t._version, x._version) == (1, 2)


def test_a_handler_of_one_instance():
    mode = NoOp()
    mode.t = torch.zeros(2)
    handler = MethodType(other_name, mode)
    mode.__torch_dispatch__ = handler
    with vt.track(), mode:
        torch.ones(1).sin()
    assert mode.t._version == 1
    assert vars(mode)[HANDLER] is handler


def test_helpers_of_a_handlers_name_are_none():
    def handle(x):
        x.add_(1)

    class Mode(NoOp):
        def handle(self, func, types, args=(), kwargs=None):
            return func(*args, **(kwargs or {}))

        __torch_dispatch__ = handle

    x = torch.zeros(2)
    with vt.track(), Mode():
        handle(x)
        keeps_the_name(handle)(x)
    assert x._version == 2


def test_a_handler_that_the_program_calls():
    x = torch.ones(2)
    with vt.track(), mode_of("other name") as mode:
        other_name(mode, aten.mul_.Tensor, (), (x, 2))
        assert x._version == 1
        if sys.version_info >= (3, 11):
            mode.__torch_dispatch__(aten.mul_.Tensor, (), (x, 2))
            mode.__torch_dispatch__(aten.mul_.Tensor, (), args=(x, 2), kwargs={})
            assert x._version == 3


def test_a_mode_entered_below_the_tracker_has_none():
    with mode_of("other name") as mode, vt.track(), NoOp():
        torch.ones(2).add_(1)
        assert HANDLER not in vars(mode)


def test_only_modes_that_need_one_are_given_one():
    with vt.track(), NoOp() as mode:
        assert HANDLER not in vars(mode)


def test_what_c_plus_plus_refuses_it_still_refuses():
    class Mode(TorchDispatchMode):
        @classmethod
        def handle(cls, func, types, args=(), kwargs=None):
            return func(*args, **(kwargs or {}))

        __torch_dispatch__ = handle

    for context in (contextlib.nullcontext, vt.track):
        with context(), pytest.raises(RuntimeError, match="classmethod"), Mode():
            torch.ones(2)


def test_a_handler_exchanged_while_the_mode_is_active():
    with vt.track(), mode_of("other name") as mode:
        type(mode).__torch_dispatch__ = KINDS["lambda"]
        assert moves([mode.t], lambda: torch.ones(1).sin()) == [1]


# It comes and goes.


def _codes():
    return TorchDispatchMode.__enter__.__code__, TorchDispatchMode.__exit__.__code__


def test_torch_and_modes_are_left_as_they_were():
    codes = _codes()
    mode = mode_of("other name")

    def run():
        with vt.track(), vt.track(), mode, mode:
            assert HANDLER in vars(mode)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        run()
    assert HANDLER not in vars(mode)
    assert _codes() == codes


def test_a_mode_left_after_its_tracker():
    codes = _codes()
    tracker, mode = vt.track(), mode_of("other name")
    tracker.__enter__()
    with mode:
        mode_frames.stop()  # as the tracker does when it is left
        torch.ones(1).sin()
        assert HANDLER in vars(mode)
    mode_frames.start()
    tracker.__exit__()
    assert HANDLER not in vars(mode)
    assert _codes() == codes


def test_a_mode_entered_in_another_thread_has_none():
    found = []

    def run():
        with mode_of("other name") as mode:
            found.append(HANDLER in vars(mode))

    with vt.track():
        thread = threading.Thread(target=run)
        thread.start()
        thread.join()
    assert found == [False]


def test_a_mode_entered_twice_keeps_it_until_it_is_left_twice():
    mode = mode_of("other name")
    with vt.track():
        with mode, mode:
            assert moves([mode.t], lambda: torch.ones(1).sin()) == [2]
        assert HANDLER not in vars(mode)


@pytest.mark.parametrize("views", ["version", "full"])
def test_among_the_brackets_of_others(views):
    calls = HandlerCalls(lambda call, out: None, lambda call, error: None)
    mode, x = mode_of("other name"), torch.ones(2)
    with vt.track(views=views), calls.watch():
        with mode, mode:
            assert moves([mode.t], lambda: torch.ones(1).sin()) == [2]
        with mode:
            assert moves([mode.t], lambda: torch.ones(1).sin()) == [1]
            assert moves([x], lambda: x.mul_(2)) == [1]
        assert HANDLER not in vars(mode)


def test_modes_that_torch_takes_off_and_puts_back():
    with vt.track(), mode_of("other name") as mode:
        with torch.utils._python_dispatch._disable_current_modes():
            torch.ones(1).sin()
        assert moves([mode.t], lambda: torch.ones(1).sin()) == [1]
    assert HANDLER not in vars(mode)


def test_a_copy_of_an_active_mode():
    with vt.track(), mode_of("other name") as mode:
        other = copy.deepcopy(mode)
    with other:
        assert moves([other.t, mode.t], lambda: torch.ones(1).sin()) == [0, 0]


def test_a_mode_that_was_left_is_freed_at_once():
    gc.disable()
    try:
        mode = mode_of("other name")
        with vt.track(), mode:
            torch.ones(1).sin()
        ref = weakref.ref(mode)
        del mode
        assert ref() is None
    finally:
        gc.enable()


def test_what_is_known_of_functions_goes_with_them():
    def known():
        gc.collect()
        return len(mode_frames.wrapped), len(mode_frames._known_plain)

    def run(number):
        names: dict[str, Any] = {}
        body = f"a = (*a,)\n  return f(*a), {number}"
        exec(f"def __torch_dispatch__(s, f, t, a=(), k=None):\n  {body}", names)
        cls = type("Mode", (TorchDispatchMode,), {})
        cls.__torch_dispatch__ = keeps_the_name(names[HANDLER])
        with vt.track(), cls():
            assert known()[0] > before[0]

    before = known()
    for number in range(3):
        run(number)
    assert known() == before


def test_a_mode_in_compiled_code():
    @torch.compile(backend="aot_eager")
    def f(x):
        with mode_of("other name"):
            return x.sin()

    x = torch.ones(2)
    with vt.track():
        assert torch.equal(f(x), x.sin())
        with mode_of("other name") as mode:
            assert torch.equal(f(x), x.sin())
        assert HANDLER not in vars(mode)
