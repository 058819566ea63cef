"""What the guards hold, and that a write does not cost more the more tensors are guarded."""

import functools
import sys

import pytest
import torch
from regions import MATMULS
from torch.profiler import ProfilerActivity, profile
from torch.utils import checkpoint as torch_checkpoint
from torch.utils.checkpoint import checkpoint

from viewtrack import MutationGuard, before_write, track, watch
from viewtrack.checkpoint import create_selective_checkpoint_contexts as ours

stock = torch_checkpoint.create_selective_checkpoint_contexts


def layer():
    torch.manual_seed(0)
    made = torch.nn.TransformerEncoderLayer(16, 2, 32, batch_first=True, dropout=0.0)
    return made, torch.randn(2, 5, 16, requires_grad=True)


def halves():
    def region(x):
        first, second = (x * 2).split(64)
        return (first.sin() * second).sin()

    return region, torch.randn(128, 256, requires_grad=True)


def held(contexts, *args, make=layer, **kwargs):
    """The bytes that PyTorch's allocator has given out more after a region than before it.

    No mode is there that could keep the contexts from going their shortest way.
    """
    body, x = make()
    context_fn = functools.partial(contexts, *args, **kwargs)

    def region():
        return checkpoint(body, x, use_reentrant=False, context_fn=context_fn)

    region().sum().backward()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        out = region()
    events = profiler.profiler.kineto_results.events()
    del out
    return sum(event.nbytes() for event in events if event.name() == "[memory]")


@pytest.mark.parametrize("ops", [MATMULS, [], [*MATMULS, torch.ops.aten.gelu.default]], ids=len)
def test_the_storage_level_holds_no_byte_more_than_torch(ops):
    assert held(ours, ops) == held(ours, ops, check="off") == held(stock, ops) > 0


def test_the_probe_sees_what_is_kept():
    assert held(stock, MATMULS) > held(stock, [])
    assert held(ours, MATMULS, check="content") > held(ours, MATMULS)  # its fingerprints


def test_parts_of_a_buffer_are_held_with_a_fingerprint_of_a_64th():
    ops = [torch.ops.aten.split.Tensor]
    kept = 128 * 256 * 4
    assert held(stock, ops, make=halves) >= kept
    assert 0 < held(ours, ops, make=halves) - held(stock, ops, make=halves) <= kept // 64


def steps_of_a_write(guarded):
    """How many steps of Python's virtual machine a write takes."""
    guard = MutationGuard()
    t = torch.ones(4)
    for one in [*(torch.ones(1) for _ in range(guarded)), t]:
        guard.save(one)
    count = 0

    def trace(frame, event, _):
        nonlocal count
        frame.f_trace_opcodes = True
        count += event == "opcode"
        return trace

    with track(record="none"):
        t.add_(1)
        before = sys.gettrace()
        sys.settrace(trace)
        try:
            t.add_(1)
        finally:
            sys.settrace(before)
    return count


def test_a_write_takes_as_many_steps_however_many_tensors_are_guarded():
    assert steps_of_a_write(10) == steps_of_a_write(2000) > 50


def test_a_guard_that_looks_at_all_would_be_noticed(monkeypatch):
    right = before_write.watches_reached

    def slow(plan, args, kwargs):
        for _ in watch.watched:
            pass
        return right(plan, args, kwargs)

    monkeypatch.setattr("viewtrack.steps.watches_reached", slow)
    assert steps_of_a_write(2000) > steps_of_a_write(10) + 2000
