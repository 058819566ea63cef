"""Running statistics that an op updates without declaring it."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from viewtrack import MutatedTensorError, MutationGuard, guard_saved_tensors, protect, track
from viewtrack.ledger import ledger
from viewtrack.undeclared_writes import UPDATES

LEVELS = ["storage", "content"]
LAYERS = {
    "batch_norm": lambda: nn.BatchNorm1d(3),
    "without_momentum": lambda: nn.BatchNorm1d(3, momentum=None),
    "without_weight": lambda: nn.BatchNorm1d(3, affine=False),
    "instance_norm": lambda: nn.InstanceNorm1d(3, affine=True, track_running_stats=True),
    "in_a_net": lambda: nn.Sequential(nn.Conv1d(3, 3, 1), nn.BatchNorm1d(3), nn.ReLU(True)),
}


def gradients(layer, calls):
    torch.manual_seed(0)
    model = LAYERS[layer]()
    x = torch.randn(4, 3, 5, requires_grad=True)
    outs = [model(x * (i + 1)) for i in range(calls)]
    torch.stack(outs).pow(3).sum().backward()
    return [x.grad, *(p.grad for p in model.parameters()), *model.buffers()]


@pytest.mark.parametrize("calls", [1, 2])
@pytest.mark.parametrize("check", LEVELS)
@pytest.mark.parametrize("layer", LAYERS)
def test_training_is_as_without_the_guard(layer, check, calls):
    with guard_saved_tensors(check=check):
        guarded = gradients(layer, calls)
    assert all(map(torch.equal, guarded, gradients(layer, calls)))


@pytest.mark.parametrize("check", LEVELS)
def test_statistics_that_backward_does_read_are_guarded(check):
    """Those of a call in eval mode. Stock torch says nothing, and the gradient is wrong."""
    model, x = nn.BatchNorm1d(3), torch.randn(4, 3, requires_grad=True)
    with guard_saved_tensors(check=check):
        y = model.eval()(x)
        model.train()(torch.randn(4, 3))
        with pytest.raises(MutatedTensorError) as caught:
            y.sum().backward()
    (write,) = caught.value.writes
    assert (write.op, write.argument) == ("aten.native_batch_norm.default", "running_mean")
    assert (write.filename, write.lineno) == (__file__, caught.value.saved.lineno + 1)


@pytest.mark.parametrize("check", LEVELS)
def test_a_call_in_eval_mode_updates_nothing(check):
    model = nn.BatchNorm1d(3)
    with MutationGuard(check=check) as guard, protect(model.running_var):
        guard.save(model.running_mean)
        model.eval()(torch.randn(4, 3))
    model = nn.BatchNorm1d(3, track_running_stats=False)
    with guard_saved_tensors(check=check):
        x = torch.randn(4, 3, requires_grad=True)
        model(x).sum().backward()


def test_a_guarded_statistic_is_told_by_name():
    model = nn.BatchNorm1d(3)
    guard = MutationGuard()
    guard.save(model.running_var)
    with track():
        model(torch.randn(4, 3))
    with pytest.raises(MutatedTensorError) as caught:
        guard.check()
    (write,) = caught.value.writes
    assert (write.op, write.argument) == ("aten.native_batch_norm.default", "running_var")
    # Autograd saves the statistics before they are updated, so their counters must not move.
    assert write.version_before == write.version_after == model.running_var._version
    assert not ledger.writes(model.running_var)


def test_a_protected_statistic_is_not_updated():
    model = nn.BatchNorm1d(3)
    refused = pytest.raises(MutatedTensorError, match=r"running_mean\)` would write")
    with refused, protect(model.running_mean):
        model(torch.randn(4, 3))
    assert model.running_mean.tolist() == [0.0] * 3
    assert model.running_var.tolist() == [1.0] * 3


def test_the_table_is_complete():
    """Every op of ATen that takes running statistics updates what it says, or never does."""
    never = {
        "aten::_batch_norm_no_update",
        "aten::_batch_norm_with_update_functional",
        "aten::_native_batch_norm_legit_functional",
        "aten::_native_batch_norm_legit_no_training",
    }
    for schema in torch._C._jit_get_all_schemas():
        names = [a.name for a in schema.arguments]
        if not schema.name.startswith("aten::") or "running_mean" not in names:
            continue
        declared = schema.arguments[names.index("running_mean")].alias_info is not None
        is_backward = schema.name.endswith("backward")
        is_composite = torch._C._dispatch_has_kernel_for_dispatch_key(
            schema.name, "CompositeImplicitAutograd"
        )
        if declared or is_backward or is_composite or schema.overload_name or schema.name in never:
            continue
        updates = UPDATES[schema.name]
        assert [names[i] for i in updates.positions] == ["running_mean", "running_var"]
        assert updates.training is None or names[updates.training] == "training"
