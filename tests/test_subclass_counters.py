"""A `TrackedTensor` and the tensor inside it count on one counter."""

import sys
import threading

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import viewtrack as vt
from viewtrack import TrackedTensor
from viewtrack.counted_above import counting, is_counted
from viewtrack.plan import plan_of


def layers(t):
    """A wrapper and all that is in it."""
    found = [t]
    while isinstance(found[-1], TrackedTensor):
        found.append(found[-1].unwrap())
    return found


def versions(*tensors):
    return [vt.version(layer) for t in tensors for layer in layers(t)]


def wrapped(depth, t):
    for _ in range(depth):
        t = TrackedTensor(t)
    return t


@pytest.fixture(params=[1, 2])
def depth(request):
    return request.param


# Whoever writes.


def test_a_write_to_the_inner_tensor_moves_the_wrapper(depth):
    inner = torch.ones(4)
    w = wrapped(depth, inner)
    v = w[1:]
    inner.add_(1)
    assert versions(w, v) == [1] * (2 * depth + 2)
    w.mul_(2)
    inner[0].add_(1)
    v.unwrap().mul_(2)
    assert versions(w, v) == [4] * (2 * depth + 2)
    assert inner._version == 4


def test_a_write_to_the_inner_tensor_of_what_autograd_saved_is_noticed(depth):
    inner = torch.ones(2)
    x = wrapped(depth, inner).requires_grad_()
    y = x.sin()
    inner.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


@pytest.mark.parametrize("made", [lambda t: t + 1, lambda t: t[1:], lambda t: t.clone().t_()])
def test_a_write_to_the_inner_tensor_of_a_result_is_noticed(made, depth):
    y = made(wrapped(depth, torch.ones(2, 3, requires_grad=True)))
    z = y.exp()
    y2 = z.exp()
    layers(z)[-1].mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y2.sum().backward()


def test_all_wrappers_of_one_tensor_share_its_counter():
    inner = torch.ones(2).add_(1)
    a, b, c = TrackedTensor(inner), TrackedTensor(inner), TrackedTensor(inner[:1])
    assert versions(a, b, c) == [1] * 6
    a.add_(1)
    b.mul_(2)
    c.zero_()
    assert versions(a, b, c) == [4] * 6
    assert inner.tolist() == [0, 6]


def test_a_wrapper_of_what_requires_grad_shares_its_counter():
    inner = torch.ones(2, requires_grad=True)
    w = TrackedTensor(inner)
    assert w.requires_grad
    assert w.is_leaf
    with torch.no_grad():
        inner.add_(1)
    assert versions(w) == [1, 1]


@pytest.mark.parametrize("whole", [True, False])
def test_threads_lose_no_count(whole):
    was = sys.getswitchinterval()
    w = TrackedTensor(torch.zeros(8))
    pieces = w.chunk(4)
    barrier = threading.Barrier(4)

    def work(v):
        barrier.wait()
        for _ in range(100):
            (w if whole else v).add_(1)
            w[:5].add_(1)
            torch._foreach_add_([w], 1.0)

    threads = [threading.Thread(target=work, args=(v,)) for v in pieces]
    sys.setswitchinterval(1e-5)
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(was)
    assert versions(w, *pieces) == [1200] * 10


# One write of the user is one count, whoever looks on.


class NoOp(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


class InHandler(TorchDispatchMode):
    """Calls `write` once, below autograd."""

    def __init__(self, write):
        super().__init__()
        self.write = write

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.sin.default:
            self.write()
        return out


WRITES = {
    "add_": lambda w: w.add_(1),
    "copy_": lambda w: w.copy_(w + 1),
    "view": lambda w: w.view(-1)[1:].add_(1),
    "out": lambda w: torch.add(w, 1, out=w),
    "foreach": lambda w: torch._foreach_add_([w], 1.0),
    "metadata": lambda w: w.t_(),
    "dropout_": lambda w: torch.dropout_(w, 0.5, True),
    "two_outs": lambda w: torch.max(w[:2], 1, out=(w[2][:2], torch.zeros(2, dtype=torch.long))),
}


@pytest.mark.parametrize("mode", [None, "none", "site", NoOp])
@pytest.mark.parametrize("name", WRITES)
def test_a_write_is_counted_as_a_plain_one_is(name, mode, depth):
    plain = torch.zeros(3, 3)
    WRITES[name](plain)
    w = wrapped(depth, torch.zeros(3, 3))
    with NoOp() if mode is NoOp else vt.track(record=mode) if mode else torch.enable_grad():
        WRITES[name](w)
    assert versions(w) == [plain._version] * (depth + 1)


@pytest.mark.parametrize("tracks", [False, True])
@pytest.mark.parametrize("name", ["add_", "copy_", "out", "foreach"])
def test_a_handler_s_write_is_counted_once(name, tracks, depth):
    w = wrapped(depth, torch.zeros(3, 3))
    mode = InHandler(lambda: WRITES[name](w))
    with vt.track() if tracks else NoOp(), mode:
        torch.ones(1).sin()
    assert versions(w) == [1] * (depth + 1)


def test_a_run_that_writes_by_other_ops_is_counted_once():
    class Twice(TrackedTensor):
        """Does what it is asked for in two steps."""

        @classmethod
        def run(cls, func, args, kwargs):
            if func is torch.ops.aten.add_.Tensor:
                args[0].unwrap().mul_(1)
                args[0].unwrap().copy_(args[0].unwrap() + args[1])
                return args[0]
            return super().run(func, args, kwargs)

    for mode in (NoOp(), vt.track()):
        for inner in (torch.zeros(2), TrackedTensor(torch.zeros(2))):
            w = Twice(inner)
            with mode:
                w.add_(1)
            assert set(versions(w)) == {1}
            assert inner.tolist() == [1, 1]


def test_a_run_that_puts_another_tensor_inside_keeps_one_counter():
    class Swapping(TrackedTensor):
        @classmethod
        def run(cls, func, args, kwargs):
            if func is torch.ops.aten.add_.Tensor:
                args[0]._inner = args[0].unwrap() + args[1]
                return args[0]
            return super().run(func, args, kwargs)

    w = Swapping(torch.zeros(2))
    w.add_(1)
    assert versions(w) == [1, 1]
    w.unwrap().mul_(3)
    assert versions(w) == [2, 2]
    assert w.tolist() == [3, 3]


# Inference tensors, which have no counter.


def test_a_normal_tensor_in_an_inference_wrapper_is_counted():
    inner = torch.zeros(2)
    with torch.inference_mode():
        w = TrackedTensor(inner)
        w.add_(1)
        torch._foreach_add_([w], 1.0)
    assert w.is_inference()
    assert inner._version == 2


def test_an_inference_tensor_in_a_normal_wrapper_is_counted():
    with torch.inference_mode():
        inner = torch.zeros(2)
    w = TrackedTensor(inner)
    w.add_(1)
    assert versions(w) == [1, None]


# Telling what is counted above.


def test_what_is_counted_above_is_told_until_it_is_over():
    a, b = torch.zeros(2), torch.zeros(2)
    add = plan_of(torch.ops.aten.add_.Tensor)
    with counting([a]):
        assert is_counted(add, (a, b), {})
        assert not is_counted(add, (b, a), {})
        with pytest.raises(ZeroDivisionError), counting([b]):
            raise ZeroDivisionError
        assert is_counted(add, (a, b), {})
        with counting([b]):
            assert not is_counted(add, (a, b), {})
    assert not is_counted(add, (a, b), {})


# `.data`, whose counter is its own.


def test_data_has_a_counter_of_its_own_at_every_level(depth):
    w = wrapped(depth, torch.zeros(2))
    w.data.add_(1)
    alias = w.data
    alias.mul_(2)
    alias.unwrap().mul_(2)
    assert versions(w, alias) == [0] * (depth + 1) + [2] * (depth + 1)
    assert layers(w)[-1].tolist() == [4, 4]


def test_what_is_put_into_data_goes_on_counting_with_the_wrapper(depth):
    w, new = wrapped(depth, torch.zeros(2).add_(1)), wrapped(depth, torch.zeros(3))
    w.data = new
    w.add_(1)
    w.unwrap().add_(1)
    assert versions(w, new) == [3] * (depth + 1) + [0] * (depth + 1)
    assert layers(new)[-1].tolist() == [2, 2, 2]
