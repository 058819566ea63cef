"""Threads, processes, exceptions, re-entry, generators, and modes above and below."""

from __future__ import annotations

import contextlib
import multiprocessing
import signal
import threading

import pytest
import torch
from handlers import NoOp
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _disable_current_modes,
    _get_current_dispatch_mode_stack,
)
from torch.utils.data import DataLoader, Dataset
from torch.utils.flop_counter import FlopCounterMode

import viewtrack as vt
from viewtrack.mode import active


def _is_tracked():
    """Whether a handler's write moves the counter here."""

    class Writer(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            if func is torch.ops.aten.exp.default:
                out.add_(1)
            return out

    with Writer():
        return torch.zeros(2).exp()._version == 1


@pytest.fixture(autouse=True)
def nothing_left():
    yield
    assert active.trackers == []
    assert _get_current_dispatch_mode_stack() == []
    assert not _is_tracked()


# ------------------------------------------------------------------------------ threads


def test_each_thread_has_its_own():
    inside, both = threading.Event(), threading.Barrier(2)
    found = {}

    def work(name, tracked):
        with vt.track() if tracked else contextlib.nullcontext():
            both.wait(20)
            found[name] = _is_tracked()
            both.wait(20)
        found[name + " after"] = _is_tracked()

    threads = [
        threading.Thread(target=work, args=("tracked", True)),
        threading.Thread(target=work, args=("plain", False)),
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {
        "tracked": True,
        "plain": False,
        "tracked after": False,
        "plain after": False,
    }
    assert not inside.is_set()


def test_a_tracker_may_be_left_in_no_other_thread():
    tracker = vt.track()
    with tracker:
        thread = threading.Thread(target=_is_tracked)
        thread.start()
        thread.join()
        assert _is_tracked()


def test_one_tracker_in_two_threads():
    tracker = vt.track()
    found = []

    def work():
        with tracker:
            found.append(_is_tracked())

    with tracker:
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        assert found == [True]
        assert _is_tracked()


def test_backward_in_another_thread():
    x = torch.rand(3, requires_grad=True)
    with vt.track():
        y = (x * 2).view(-1)
        y[1:].mul_(3)
        thread = threading.Thread(target=lambda: y.sum().backward())
        thread.start()
        thread.join()
    assert x.grad.tolist() == [2, 6, 6]


# ------------------------------------------------------------------------------ processes


class _Data(Dataset):
    def __len__(self):
        return 4

    def __getitem__(self, index):
        item = torch.zeros(2)
        item[1:].add_(index)
        return item, _is_tracked()


@pytest.mark.parametrize(
    ("method", "tracked"),
    [
        ("fork", True),  # a forked worker goes on with the stack of modes that it was forked with
        ("spawn", False),
    ],
)
def test_data_loader_workers(method, tracked):
    if method not in multiprocessing.get_all_start_methods():
        pytest.skip(f"no {method} here")
    loader = DataLoader(_Data(), num_workers=1, batch_size=2, multiprocessing_context=method)
    with vt.track(views="full"):
        batches = list(loader)
        assert _is_tracked()
    assert torch.cat([items for items, _ in batches])[:, 1].tolist() == [0, 1, 2, 3]
    assert all(bool(flags.all()) is tracked for _, flags in batches)


# ------------------------------------------------------------------------------ exceptions


@pytest.mark.parametrize("views", ["version", "full"])
@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, SystemExit])
def test_left_by_an_exception(error, views):
    def body():
        with vt.track(views=views), NoOp():
            torch.ones(2).add_(1)
            raise error

    with pytest.raises(error):
        body()
    assert not _is_tracked()


@pytest.mark.parametrize("views", ["version", "full"])
@pytest.mark.parametrize("where", ["exp", "view", "add_", "_foreach_add_", "chunk"])
def test_handler_raises(where, views):
    class Fails(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if func._schema.name == f"aten::{where}" or (where == "chunk" and "split" in str(func)):
                raise KeyboardInterrupt
            return func(*args, **(kwargs or {}))

    calls = {
        "exp": lambda x: x.exp(),
        "view": lambda x: x.view(2, 1),
        "add_": lambda x: x.add_(1),
        "_foreach_add_": lambda x: torch._foreach_add_([x], 1.0),
        "chunk": lambda x: x.chunk(2),
    }
    x = torch.ones(2)
    with vt.track(views=views):
        with pytest.raises(KeyboardInterrupt), Fails():
            calls[where](x)
        assert _is_tracked()
        before = x._version
        x.view(2, 1).add_(1)
        assert x._version == before + 1


def test_kernel_raises():
    x = torch.ones(2)
    with vt.track(), NoOp():
        with pytest.raises(RuntimeError):
            x.view(3)
        with pytest.raises(RuntimeError):
            x.add_(torch.ones(3))
        with pytest.raises(RuntimeError):
            torch._foreach_add_([x], [torch.ones(3)])
        x[1:].add_(1)
    assert x._version == 1


@pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="needs interval timers")
def test_interrupted_anywhere():
    """An interrupt at any moment leaves the state as it was."""

    def interrupt(*_):
        raise KeyboardInterrupt

    old = signal.signal(signal.SIGALRM, interrupt)
    try:
        for n in range(60):
            x = torch.ones(4)
            try:
                with vt.track(views="full"), NoOp():
                    signal.setitimer(signal.ITIMER_REAL, 0.0005 + n * 0.00002)
                    # Not for ever: Python drops what is raised in a weakref's callback.
                    for _ in range(10_000):
                        x.view(2, 2)[0].add_(1)
                        torch._foreach_mul_(list(x.split(2)), 2.0)
            except KeyboardInterrupt:
                pass
            finally:
                signal.setitimer(signal.ITIMER_REAL, 0)
    finally:
        signal.signal(signal.SIGALRM, old)
    y = torch.ones(2)
    y[1:].add_(1)
    assert y._version == 1


# ------------------------------------------------------------------------------ entering


def test_same_tracker_twice():
    tracker = vt.track()
    with tracker:
        with tracker:
            assert _is_tracked()
        assert _is_tracked()
    with tracker:
        assert _is_tracked()


def test_generator_that_is_suspended_inside():
    def numbers():
        with vt.track():
            yield _is_tracked()
            yield _is_tracked()

    generator = numbers()
    assert next(generator) is True
    with vt.track():
        assert next(generator) is True
        with pytest.raises(StopIteration):
            next(generator)
        assert _is_tracked()
    abandoned = numbers()
    next(abandoned)
    abandoned.close()


def test_decorated_function_calls_itself():
    @vt.track()
    def depth(n):
        return [_is_tracked()] + (depth(n - 1) if n else [])

    assert depth(3) == [True] * 4


# ------------------------------------------------------------------------------ other modes


MODERN = pytest.mark.skipif(
    tuple(map(int, torch.__version__.split(".")[:2])) < (2, 13),
    reason="torch 2.6 and 2.9 ask the modes below for a detach more where they detach",
)


class _Log(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.ops = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.ops.append(str(func))
        return func(*args, **(kwargs or {}))


def _step():
    net = torch.nn.Linear(3, 3)
    net.weight.data.fill_(1.0)
    y = net(torch.ones(2, 3)).view(-1)
    y[1:].mul_(2)
    y.sum().backward()
    return net.weight.grad


def test_mode_above_sees_the_ops_it_always_sees():
    with _Log() as want:
        _step()
    with vt.track(), _Log() as got:
        _step()
    assert got.ops == want.ops


@MODERN
def test_mode_below_sees_the_ops_it_always_sees():
    with _Log() as want:
        _step()
    with _Log() as got, vt.track():
        _step()
    assert got.ops == want.ops


@MODERN
def test_mode_below_a_tracked_handler_sees_no_more_ops():
    @vt.tracked
    class Mode(NoOp):
        __torch_dispatch__ = NoOp.__torch_dispatch__

    with _Log() as want, NoOp():
        _step()
    with _Log() as got, Mode():
        _step()
    assert got.ops == want.ops


def _flops(around=contextlib.nullcontext, within=contextlib.nullcontext):
    with around(), FlopCounterMode(display=False) as counter, within():
        _step()
    return counter.get_total_flops()


def test_flop_counter():
    assert _flops(around=vt.track) == _flops(within=vt.track) == _flops() > 0


def _logging_mode():
    from torch.testing._internal.logging_tensor import LoggingTensorMode

    return LoggingTensorMode()


def _debug_mode():
    module = pytest.importorskip("torch.utils._debug_mode")
    return module.DebugMode()


def _schema_check_mode():
    from torch._subclasses.schema_check_mode import SchemaCheckMode

    return SchemaCheckMode()


@pytest.mark.parametrize("make", [_logging_mode, _debug_mode, _schema_check_mode])
@pytest.mark.parametrize("order", ["above", "below"])
def test_modes_of_torch(make, order):
    def program():
        x = torch.ones(2, 3, requires_grad=True)
        y = (x * 2).view(-1)
        with torch.no_grad():
            y[1:].add_(1)
        return y._version, y.detach().clone(), torch.autograd.grad(y.sum(), x)[0].clone()

    with make():
        want = program()
    contexts = (vt.track, make) if order == "above" else (make, vt.track)
    with contexts[0](), contexts[1]():
        got = program()
    assert got[0] == want[0]
    assert all(torch.equal(mine, stock) for mine, stock in zip(got[1:], want[1:], strict=True))


def test_modes_switched_off_for_a_while():
    with vt.track():
        x = torch.ones(4)
        with _disable_current_modes():
            x.view(2, 2)[0].add_(1)
            assert not _is_tracked()
        assert x._version == 1
        assert _is_tracked()
