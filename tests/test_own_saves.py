"""Ops that write what autograd has saved for their own backward before they ran."""

from __future__ import annotations

import contextlib
import functools

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from viewtrack import MutatedTensorError, MutationGuard, guard_saved_tensors
from viewtrack.own_saves import OPS

aten = torch.ops.aten


def nested(depth, **kwargs):
    stack = contextlib.ExitStack()
    for _ in range(depth):
        stack.enter_context(guard_saved_tensors(**kwargs))
    return stack


GUARDS = {
    "storage": guard_saved_tensors,
    "content": functools.partial(guard_saved_tensors, check="content"),
    "copy": functools.partial(guard_saved_tensors, on_mutation="copy"),
    "two": functools.partial(nested, 2),
    "two_by_content": functools.partial(nested, 2, check="content"),
    "three_that_copy": functools.partial(nested, 3, on_mutation="copy"),
}
CALLS = {
    "rrelu": lambda x, mean, var: F.rrelu(x, training=True),
    "rrelu_": lambda x, mean, var: F.rrelu(x * 1, training=True, inplace=True),
    "rrelu_in_eval": lambda x, mean, var: F.rrelu(x * 1, inplace=True) + F.rrelu(x),
    "rrelu_twice": lambda x, mean, var: F.rrelu(F.rrelu(x, training=True).sin(), training=True),
    "batch_norm": lambda x, mean, var: F.batch_norm(x, mean, var, training=True),
    "legit": lambda x, mean, var: aten._native_batch_norm_legit(
        x, None, None, mean, var, True, 0.1, 1e-5
    )[0],
    "legit_in_eval": lambda x, mean, var: aten._native_batch_norm_legit(
        x, None, None, mean, var, False, 0.1, 1e-5
    )[0],
    "with_update": lambda x, mean, var: aten._batch_norm_with_update(
        x, torch.ones(3), torch.zeros(3), mean, var, 0.1, 1e-5
    )[0],
}


def gradients(call, *, checkpointed):
    torch.manual_seed(0)
    x, stats = torch.randn(8, 3, requires_grad=True), (torch.zeros(3), torch.ones(3))

    def region(x):
        # Without the sine torch would stop the recompute before the last op, which has saved, but
        # not yet written, its noise.
        return call(x, *stats).sin()

    y = checkpoint(region, x, use_reentrant=False) if checkpointed else region(x)
    y.pow(3).sum().backward()
    return [y, x.grad, *stats]


@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.parametrize("guard", GUARDS)
@pytest.mark.parametrize("name", CALLS)
def test_all_is_as_without_the_guard(name, guard, checkpointed):
    with GUARDS[guard]():
        guarded = gradients(CALLS[name], checkpointed=checkpointed)
    assert all(map(torch.equal, guarded, gradients(CALLS[name], checkpointed=checkpointed)))


@pytest.mark.parametrize("check", ["storage", "content"])
def test_a_later_write_to_what_backward_reads_is_found(check):
    """The noise is guarded from there on, and stock torch finds this one too."""
    x, noise = torch.randn(8, requires_grad=True), torch.zeros(8)
    with nested(2, check=check):
        y = aten.rrelu_with_noise(x, noise, 0.1, 0.3, True)
        noise.add_(1)
        with pytest.raises(MutatedTensorError) as caught:
            y.sum().backward()
    (write,) = caught.value.writes
    assert (write.op, write.lineno) == ("aten.add_.Tensor", caught.value.saved.lineno + 1)


@pytest.mark.parametrize("check", ["storage", "content"])
def test_a_write_to_what_an_earlier_call_saved_is_found(check):
    x, noise = torch.randn(8, requires_grad=True), torch.zeros(8)
    with nested(2, check=check):
        y = (x * noise).sum()
        z = aten.rrelu_with_noise(x, noise, 0.1, 0.3, True)
        z.sum().backward()
        with pytest.raises(MutatedTensorError):
            y.backward()


def test_a_copy_is_of_the_noise_that_was_used():
    torch.manual_seed(0)
    x, noise = torch.randn(8, requires_grad=True), torch.zeros(8)
    with guard_saved_tensors(on_mutation="copy"):
        y = aten.rrelu_with_noise(x, noise, 0.1, 0.3, True)
        used = noise.clone()
        noise.zero_()
        y.sum().backward()
    assert torch.equal(x.grad, used)
    assert not used.eq(0).any()


@pytest.mark.parametrize("check", ["storage", "content"])
def test_in_eval_the_noise_is_not_written_and_the_argument_is(check):
    noise = torch.zeros(8)
    with MutationGuard(check=check) as guard:
        guard.save(noise, "the noise")
        aten.rrelu_with_noise(torch.randn(8), noise, 0.1, 0.3, False)
        guard.check()
        entry = guard.save(x := torch.randn(8), "x")
        aten.rrelu_with_noise_(x, torch.zeros(8), 0.1, 0.3, False)
        with pytest.raises(MutatedTensorError):
            entry.get()
        entry.release()


def test_one_statistic_is_excused_for_the_call_that_updates_it_only():
    model, x = nn.BatchNorm1d(3), torch.randn(8, 3, requires_grad=True)
    with nested(2, check="content"):
        y = model.eval()(x)
        model.train()(x * 2).sum().backward()
        with pytest.raises(MutatedTensorError):
            y.sum().backward()


def test_the_table_is_complete():
    """Every other op of ATen that autograd knows writes what it returns, or saves nothing of it."""
    noise = {"aten::rrelu_with_noise", "aten::rrelu_with_noise_"}
    for schema in torch._C._jit_get_all_schemas():
        if schema.overload_name or not schema.name.startswith("aten::"):
            continue
        names = [a.name for a in schema.arguments if a.alias_info and a.alias_info.is_write]
        if "noise" in names or schema.name in noise:
            assert schema.name in OPS
        if "running_mean" in names and "functional" not in schema.name:
            assert schema.name in OPS
    for name, saves in OPS.items():
        (schema,) = (s for s in torch._C._jit_get_schemas_for_operator(name) if not s.overload_name)
        names = [a.name for a in schema.arguments]
        assert {names[i] for i in saves.positions} in ({"noise"}, {"running_mean", "running_var"})
        assert saves.training is None or names[saves.training] == "training"
