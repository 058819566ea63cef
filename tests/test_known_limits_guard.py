"""The rows of LIMITATIONS.md about the guard: each test states what one would wish for.

See `test_known_limits.py`.
"""

from __future__ import annotations

import functools

import pytest
import torch
from regions import MATMULS
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint
from write_ways import OPS, OUTER, here, in_bare_thread, in_outer_handler

import viewtrack as vt
from viewtrack import MutatedTensorError
from viewtrack._torch.guard import CachingMode, top_saved_tensors_hooks
from viewtrack.checkpoint import create_selective_checkpoint_contexts as ours

limit = pytest.mark.xfail(strict=True, raises=AssertionError)
WAYS = {op.name: op for op in OPS}
UNSEEN = [op for op in OPS if not op.seen]
named = pytest.mark.parametrize("op", UNSEEN, ids=lambda op: op.name)


def error_of(step, *args):
    """The error of a step, or None."""
    try:
        step(*args)
    except MutatedTensorError as error:
        return error
    return None


def region_with(write, *, inside, check="storage", place=here):
    """A step with a write to what a region kept, in the region or between forward and backward."""
    kept = []

    def region(x, w):
        h = x @ w
        kept.append(h.detach())
        if inside and len(kept) == 1:
            place(lambda: write(kept[0]))
        return h.sin().sum()

    x, w = torch.ones(3, 3, requires_grad=True), torch.ones(3, 3)
    context_fn = functools.partial(ours, MATMULS, check=check)
    loss = checkpoint(region, x, w, use_reentrant=False, context_fn=context_fn)
    if not inside:
        place(lambda: write(kept[0]))
    loss.backward()


def has_line(error):
    return error is not None and error.writes[0].lineno > 0


@limit
@pytest.mark.parametrize("place", [here, in_bare_thread])
def test_a_write_where_no_mode_is_has_a_line(place):
    write = functools.partial(region_with, WAYS["mul_"].write, inside=False, place=place)
    assert has_line(error_of(write))


def test_a_write_where_no_mode_is_is_found_all_the_same():
    assert error_of(functools.partial(region_with, WAYS["mul_"].write, inside=False)) is not None


WITHOUT_COUNTER = {
    "data": lambda t: t.data.mul_(2),
    "_unsafe_view": lambda t: torch.ops.aten._unsafe_view.default(t, (-1,)).mul_(2),
    "fused": WAYS["fused_sgd"].write,
}
by_another_counter = pytest.mark.parametrize("way", WITHOUT_COUNTER)


@limit
@by_another_counter
def test_a_write_where_no_mode_is_that_moves_another_counter_is_found(way):
    assert error_of(functools.partial(region_with, WITHOUT_COUNTER[way], inside=False)) is not None


@by_another_counter
def test_it_is_found_by_content(way):
    step = functools.partial(region_with, WITHOUT_COUNTER[way], inside=False, check="content")
    assert error_of(step) is not None


@limit
@named
def test_a_write_that_no_op_tells_of_is_found(op):
    assert error_of(functools.partial(region_with, op.write, inside=True)) is not None


@limit
@named
def test_a_write_that_no_op_tells_of_has_a_line(op):
    step = functools.partial(region_with, op.write, inside=True, check="content")
    assert has_line(error_of(step))


@limit
def test_a_write_in_the_handler_of_a_mode_around_the_region_is_found():
    write = WAYS["mul_"].write
    with OUTER:
        error = error_of(functools.partial(region_with, write, inside=True, place=in_outer_handler))
    assert error is not None


@limit
def test_memory_that_is_emptied_and_filled_anew_with_the_same_values_is_as_it_was():
    def step():
        shard = torch.ones(4)
        leaf = torch.ones(4, requires_grad=True)
        with vt.guard_saved_tensors():
            gathered = shard * 2
            out = (leaf * gathered).sum()
            gathered.untyped_storage().resize_(0)
            gathered.untyped_storage().resize_(16)
            torch.mul(shard, 2, out=gathered.data)
            out.backward()

    assert error_of(step) is None


@pytest.mark.skipif(
    top_saved_tensors_hooks() is None and torch.__version__ >= "2.7",
    reason="newer torch tells which hooks are there",
)
def test_on_torch_2_6_hooks_around_the_guard_are_not_called():
    packed = []
    hooks = torch.autograd.graph.saved_tensors_hooks(lambda t: packed.append(t) or t, lambda t: t)
    with hooks, vt.guard_saved_tensors():
        torch.ones(2, requires_grad=True).exp()
    assert packed == []


@limit
def test_a_write_to_a_sparse_tensor_that_is_kept_in_a_region_has_a_line():
    def region(x):
        h = torch.eye(4).to_sparse() * 2
        h.neg_()
        return (h.to_dense() * x).sin().sum()

    leaf = torch.ones(4, 4, requires_grad=True)
    context_fn = functools.partial(ours, [torch.ops.aten.mul.Tensor])

    def step():
        checkpoint(region, leaf, use_reentrant=False, context_fn=context_fn).backward()

    assert has_line(error_of(step))


def test_a_write_to_a_sparse_tensor_is_found_all_the_same():
    t = torch.eye(2).to_sparse()
    guard = vt.MutationGuard()
    entry = guard.save(t)
    t.mul_(2)
    with pytest.raises(MutatedTensorError):
        entry.get()


def test_a_sparse_alias_whose_write_makes_new_values_is_refused_all_the_same():
    t = torch.eye(2).to_sparse()
    with vt.protect(t), pytest.raises(MutatedTensorError):
        t.detach().mul_(2)
    t.detach().mul_(2)
    assert t.to_dense().equal(torch.eye(2))


@limit
def test_a_write_through_an_alias_of_an_opaque_tensor_is_refused():
    t = torch.ones(2, 2).to_mkldnn()
    with vt.protect(t):
        t.detach().zero_()
    assert t.to_dense().equal(torch.ones(2, 2))


@limit
def test_the_contexts_are_ours_under_compile():
    made = []

    def contexts():
        pair = ours(MATMULS)
        made.append(isinstance(pair[0], CachingMode))
        return pair

    def region(x, w):
        return (x @ w).sin().sum()

    step = torch.compile(
        lambda x, w: checkpoint(region, x, w, use_reentrant=False, context_fn=contexts),
        backend="aot_eager",
    )
    step(torch.ones(2, 2, requires_grad=True), torch.ones(2, 2)).backward()
    assert any(made)


@limit
def test_a_write_to_the_original_of_a_copy_that_a_pair_kept_is_told():
    kept = []

    class Keep(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            if func in MATMULS:
                kept.append(out.clone())
            return out

    class HandOut(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            return kept.pop() if func in MATMULS else func(*args, **(kwargs or {}))

    def region(x, w):
        return (x @ w).mul_(2).sin().sum()

    x = torch.ones(2, 2, requires_grad=True)
    context_fn = vt.checkpoint.guard(lambda: (Keep(), HandOut()))
    loss = checkpoint(region, x, torch.ones(2, 2), use_reentrant=False, context_fn=context_fn)
    assert error_of(loss.backward) is not None


@limit
def test_a_write_to_another_part_of_a_wrappers_buffer_is_no_alarm():
    two_tensor = pytest.importorskip("torch.testing._internal.two_tensor").TwoTensor

    def step():
        buffer = two_tensor(torch.ones(4), torch.ones(4))
        guard = vt.MutationGuard()
        entry = guard.save(buffer[:2])
        buffer[2:].mul_(2)
        entry.get()

    assert error_of(step) is None


@pytest.mark.skipif(torch.__version__ < "2.7", reason="there dynamo does not trace inside of it")
def test_a_transform_in_a_function_compiled_inside_of_the_guard_meets_torchs_error():
    @torch.compile(backend="eager")
    def step(x):
        return torch.func.grad(lambda x: x.sin().sum())(x)

    x = torch.ones(2)
    try:
        with (
            vt.guard_saved_tensors(),
            pytest.raises(Exception, match="don't yet support saved tensor hooks"),
        ):
            step(x)
    finally:
        # Dynamo leaves hooks forbidden for the rest of the thread, whoever had one.
        torch._C._autograd._saved_tensors_hooks_enable()
    with vt.guard_saved_tensors():
        assert torch.equal(torch.compiler.disable(step)(x), x.cos())
