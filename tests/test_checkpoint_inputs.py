"""check_inputs: what the forward changed of the things that it starts from."""

import functools
import sys

import pytest
import torch
from torch.utils import checkpoint as torch_checkpoint
from torch.utils.checkpoint import checkpoint

from viewtrack import MutatedTensorError
from viewtrack.checkpoint import create_selective_checkpoint_contexts, guard

OPS = [torch.ops.aten.mm.default, torch.ops.aten.add_.Tensor]


def own(**options):
    return functools.partial(
        create_selective_checkpoint_contexts, OPS, check_inputs=True, **options
    )


def foreign(**options):
    pair = functools.partial(torch_checkpoint.create_selective_checkpoint_contexts, OPS[:1])
    return guard(pair, check_inputs=True, **options)


both = pytest.mark.parametrize("contexts", [own, foreign])


class Gate(torch.nn.Module):
    load = None

    def forward(self, x):
        s = x @ x
        count = (s.detach() > 0).sum(0).float()
        if self.load is None:
            self.load = count
        else:
            self.load += count
        return s.sin().exp().sum()


def run(module, contexts):
    torch.manual_seed(0)
    x = torch.randn(3, 3, requires_grad=True)
    checkpoint(module, x, use_reentrant=False, context_fn=contexts).backward()
    return x.grad


@both
def test_an_attribute_that_the_forward_made_is_named(contexts):
    with pytest.raises(MutatedTensorError) as caught:
        run(Gate(), contexts())
    assert "`Gate.load` was None when the forward began and is f32[3] now" in str(caught.value)


@both
def test_an_attribute_that_the_forward_wrote_is_named_with_the_line(contexts):
    gate = Gate()
    gate.load = torch.zeros(3)
    with pytest.raises(MutatedTensorError, match=r"Gate\.load -> f32\[3\]") as caught:
        run(gate, contexts())
    write = caught.value.writes[0]
    assert (write.op, write.filename, write.function) == ("aten.add_.Tensor", __file__, "forward")


class Numbers(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.calls, self.scale, self.name = 0, 1.0, "a"
        self.register_buffer("table", torch.ones(3))

    def forward(self, x):
        self.calls += 1
        self.table = self.table.clone()
        return (x @ x * self.scale).sin().sum()


class NormIn(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = torch.nn.BatchNorm1d(3)

    def forward(self, x):
        return (self.norm(x) @ x).sin().sum()


@both
def test_numbers_and_exchanged_buffers(contexts):
    with pytest.raises(MutatedTensorError) as caught:
        run(Numbers(), contexts())
    text = str(caught.value)
    assert "`Numbers.calls` was 0 when the forward began and is 1 now" in text
    assert "`Numbers.table` was" in text
    assert "scale" not in text
    with pytest.raises(MutatedTensorError) as caught:
        run(Numbers(), contexts(allow={"Numbers.table": "equal"}))
    assert "Numbers.table" not in str(caught.value)


@both
def test_a_captured_tensor(contexts):
    captured = torch.ones(3)

    def region(x):
        captured.add_(1)
        return ((x * captured) @ x).sin().sum()

    with pytest.raises(MutatedTensorError, match=r"an input -> f32\[3\]") as caught:
        run(region, contexts())
    assert caught.value.writes[0].op == "aten.add_.Tensor"


@both
@pytest.mark.parametrize(
    ("check", "write", "op"),
    [
        ("storage", lambda t: t.data.add_(1), "aten.add_.Tensor"),
        ("content", lambda t: t.data.add_(1), "aten.add_.Tensor"),
        ("content", lambda t: t.numpy().__iadd__(1), "no op that PyTorch saw"),
    ],
    ids=["data", "data_by_content", "numpy"],
)
def test_a_captured_tensor_that_torch_does_not_see_written(contexts, check, write, op):
    captured = torch.ones(3)

    def region(x):
        out = ((x * captured) @ x).sin().sum()
        write(captured)
        return out

    with pytest.raises(MutatedTensorError, match=r"an input -> f32\[3\]") as caught:
        run(region, contexts(check=check))
    assert caught.value.writes[0].op == op


@both
def test_a_written_buffer_is_named_and_may_be_allowed_by_name(contexts):
    module = NormIn()
    with pytest.raises(MutatedTensorError) as caught:
        run(module, contexts())
    text = str(caught.value)
    for name in ("running_mean", "running_var", "num_batches_tracked"):
        assert f"BatchNorm1d.{name}" in text
    allow = dict.fromkeys(
        (f"BatchNorm1d.{name}" for name in module.norm._buffers), "the recompute does not read it"
    )
    right = run(NormIn(), torch_checkpoint.noop_context_fn)
    assert torch.equal(run(NormIn(), contexts(allow=allow)), right)


@both
def test_a_region_that_changes_nothing_is_no_alarm(contexts):
    torch.manual_seed(0)
    module = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Dropout(0.2), torch.nn.GELU())

    def region(x):
        made = torch.zeros(3)
        made += 1
        return (module(x) @ x + made).sum()

    right = run(region, torch_checkpoint.noop_context_fn)
    assert torch.equal(run(region, contexts()), right)
    assert torch.equal(run(region, contexts(check="content")), right)


@both
def test_the_hook_on_modules_is_taken_off(contexts):
    hooks = torch.nn.modules.module._global_forward_pre_hooks
    before = len(hooks)
    with pytest.raises(MutatedTensorError):
        run(Gate(), contexts())
    assert len(hooks) == before


class Lazy(torch.nn.Module):
    seen = False

    def forward(self, x):
        h = x @ x
        if self.seen:
            h.detach().cos()
        self.seen = True
        return h.sin().sum()


def another_way(contexts):
    with pytest.raises(RuntimeError) as caught:
        run(Lazy(), contexts)
    return caught.value


SAVED = [torch.ops.aten.mm.default, torch.ops.aten.cos.default]
torchs_own = functools.partial(torch_checkpoint.create_selective_checkpoint_contexts, SAVED)


@pytest.mark.parametrize(
    "contexts",
    [functools.partial(create_selective_checkpoint_contexts, SAVED), guard(torchs_own)],
    ids=["own", "guard"],
)
def test_a_recompute_that_goes_another_way_gets_a_hint(contexts):
    error = another_way(contexts)
    assert "encountered during backward" in str(error)
    assert str(error) == str(another_way(torchs_own))
    if sys.version_info >= (3, 11):
        (note,) = error.__notes__
        assert "`check_inputs=True` names what changed" in note


@both
def test_the_line_that_made_a_changed_attribute_is_told(contexts):
    with pytest.raises(MutatedTensorError) as caught:
        run(Gate(), contexts())
    line = Gate.forward.__code__.co_firstlineno + 2
    assert f"is f32[3] now, made at {__file__}:{line} in forward; if it may," in str(caught.value)
