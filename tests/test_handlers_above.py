"""Whatever handler comes to be above the tracker, and however: what it views and writes counts."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from handlers import NoOp, On, Wrapper
from torch.utils import _python_dispatch
from torch.utils._python_dispatch import TorchDispatchMode

import viewtrack as vt
from viewtrack.handlers_above import UNKNOWN
from viewtrack.mode import active

aten = torch.ops.aten


RIGHT = [(1, True)]


def look(*_: Any) -> tuple[int, bool]:
    """By how much a write moves the counter of what it writes, and whether a view shares that."""
    t = torch.zeros(4)
    view, was = t.view(2, 2), t._version
    t.add_(1)
    return t._version - was, view._version == t._version


def probe() -> list[Any]:
    """What the handler of a mode that is entered here finds."""
    with On(aten.sin.default, look) as mode:
        torch.ones(()).sin()
    return mode.kept


def as_a_decorator() -> list[Any]:
    found: list[Any] = []

    @contextlib.contextmanager
    def entered() -> Iterator[None]:
        found.extend(probe())
        yield

    @entered()
    def fn() -> None: ...

    fn()
    return found


def in_a_subclass() -> list[Any]:
    found: list[Any] = []

    class Probing(Wrapper):
        @classmethod
        def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
            found[:] = [look()]
            return super().__torch_dispatch__(func, types, args, kwargs)

    Probing(torch.ones(2)).sin()
    return found


def after_others() -> list[Any]:
    with contextlib.suppress(ZeroDivisionError), NoOp():
        _ = 1 / 0
    with NoOp(), NoOp():
        torch.ones(1).sin()
    assert active.mode.above == []
    return probe()


def left_in_another_order() -> list[Any]:
    outer, inner = NoOp(), NoOp()
    outer.__enter__()
    inner.__enter__()
    outer.__exit__(None, None, None)  # torch takes the other one off the stack
    found = probe()
    inner.__exit__(None, None, None)
    return found


def in_a_hook() -> list[Any]:
    found: list[Any] = []
    t = torch.ones(1, requires_grad=True)
    t.register_hook(lambda grad: found.extend(probe()))
    (t * 2).sum().backward()
    return found


def left_in_a_hook() -> list[Any]:
    """Torch puts it back on the stack when backward ends."""
    mode = On(aten.sin.default, look)
    x = torch.ones(1, requires_grad=True)
    y = (x * 2).sum()
    mode.__enter__()
    x.register_hook(lambda _: mode.__exit__(None, None, None))
    y.backward()
    torch.ones(()).sin()
    mode.__enter__()
    mode.__exit__(None, None, None)
    _python_dispatch._pop_mode()
    return mode.kept


def with_an_entering_of_its_own() -> list[Any]:
    class Own(On):
        def __enter__(self):
            _python_dispatch._push_mode(self)
            return self

        def __exit__(self, *error):
            _python_dispatch._pop_mode()

    with Own(aten.sin.default, look) as mode:
        torch.ones(()).sin()
    return mode.kept


def put_back_on_the_stack() -> list[Any]:
    with On(aten.sin.default, look) as mode:
        with _python_dispatch._disable_current_modes():
            pass
        with _python_dispatch._pop_mode_temporarily():
            assert active.mode.above == []
        torch.ones(()).sin()
    return mode.kept


def twice_by_the_same_mode() -> list[Any]:
    mode = On(aten.sin.default, look)
    with mode:
        with mode:
            pass
        torch.ones(()).sin()
    return mode.kept


def in_a_thread_of_backward() -> list[Any]:
    """Backward that is nested more than 60 deep goes on in a thread of the engine's pool."""
    found: list[Any] = []
    threads = set()

    class Nested(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, depth):
            ctx.depth = depth
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            threads.add(threading.get_ident())
            if ctx.depth:
                with torch.enable_grad():
                    t = torch.ones(1, requires_grad=True)
                    Nested.apply(t, ctx.depth - 1).backward()
            else:
                found.extend(probe())
            return grad, None

    Nested.apply(torch.ones(1, requires_grad=True), 70).backward()
    assert len(threads) == 2
    return found


WAYS: list[Callable[[], list[Any]]] = [
    *(probe, as_a_decorator, in_a_subclass, after_others, left_in_another_order),
    *(in_a_hook, left_in_a_hook, twice_by_the_same_mode, in_a_thread_of_backward),
    *(with_an_entering_of_its_own, put_back_on_the_stack),
]


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
@pytest.mark.parametrize("record", ["none", "site"])
def test_a_handler_is_tracked(way, record):
    with vt.track(record=record):
        assert way() == RIGHT


def test_a_tracker_in_a_generator_is_told():
    def entered() -> Iterator[None]:
        with vt.track():
            yield

    held = entered()
    next(held)
    assert probe() == RIGHT
    held.close()


def test_a_tracker_that_is_entered_in_a_handler():
    with On(aten.sin.default, vt.track()(look)) as mode:
        torch.ones(()).sin()
    assert mode.kept == RIGHT


def test_somebody_else_sees_to_the_stack(monkeypatch):
    """The code that they gave a function of torch's stays, and ours does not run."""
    push = _python_dispatch._push_mode
    monkeypatch.setattr(push, "__code__", push.__code__.replace(co_firstlineno=1))
    with vt.track():
        assert active.mode.above == [UNKNOWN]
        assert probe() == RIGHT


def test_somebody_else_sees_to_the_entering(monkeypatch):
    def enter(mode):
        _python_dispatch._push_mode(mode)
        return mode

    with vt.track():
        monkeypatch.setattr(TorchDispatchMode, "__enter__", enter)
        monkeypatch.setattr(TorchDispatchMode, "__exit__", lambda *_: _python_dispatch._pop_mode())
        assert probe() == RIGHT
        monkeypatch.undo()


def test_a_tracker_that_is_entered_while_the_modes_are_off():
    tracker = vt.track()
    with On(aten.sin.default, look) as mode:
        with _python_dispatch._disable_current_modes():
            tracker.__enter__()
        torch.ones(()).sin()
    tracker.__exit__()
    assert mode.kept == RIGHT


def test_the_frame_of_a_mode_outlives_a_bracket_of_somebody_else():
    """Then it is counted anew, and other trackers are told of modes afterwards."""

    class Unnamed(On):
        pass

    handler = On.__torch_dispatch__
    Unnamed.__torch_dispatch__ = lambda *given, **named: handler(*given, **named)
    mode = Unnamed(aten.sin.default, look)
    with vt.track():
        full = vt.track("full")
        full.__enter__()
        mode.__enter__()
        full.__exit__()
        mode.__exit__(None, None, None)
        for _ in range(2):
            with mode:
                torch.ones(()).sin()
    with vt.track():
        with Unnamed(aten.sin.default, look):
            pass
        with Unnamed(aten.sin.default, look) as other:
            torch.ones(()).sin()
    assert mode.kept == 2 * RIGHT
    assert other.kept == RIGHT


def test_what_is_above_is_forgotten():
    """Only then is the op of user code left to the kernels above, which is what makes it quick."""
    seen = []
    with vt.track():
        seen.append(list(active.mode.above))
        with NoOp() as mode:
            seen.append(list(active.mode.above))
            with contextlib.suppress(TypeError):
                torch.ones(1).sin(1)
        seen.append(list(active.mode.above))
        with contextlib.suppress(RuntimeError):
            Wrapper(torch.ones(2)).view(3)
        seen.append(list(active.mode.above))
    assert seen == [[], [id(mode)], [], []]
    assert active.mode.above == [UNKNOWN]
