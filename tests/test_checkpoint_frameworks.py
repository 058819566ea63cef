"""Regions, policies and pairs in the shape that training frameworks give them, under the guard.

Written anew after what torchtitan, axolotl and transformers do; each is tried with a model that is
right and with one that edits a kept result in place.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import inspect
from dataclasses import dataclass, field

import pytest
import torch
import torch.nn.functional as F
from regions import MATMULS, aten
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils import checkpoint as torch_checkpoint
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map
from torch.utils.checkpoint import CheckpointPolicy, SelectiveCheckpointContext, checkpoint
from write_ways import one_process_group

import viewtrack as vt
from viewtrack import MutatedTensorError
from viewtrack.checkpoint import create_selective_checkpoint_contexts as ours
from viewtrack.checkpoint import guard, install, uninstall

stock = torch_checkpoint.create_selective_checkpoint_contexts


# An argument of checkpoint() in newer releases.
RUNS_TO_THE_END = (
    {"early_stop": False} if "early_stop" in inspect.signature(checkpoint).parameters else {}
)


class Block(torch.nn.Module):
    """Bias-free, as Llama's; a router like that of a mixture of experts."""

    def __init__(self, width: int, inplace: bool) -> None:
        super().__init__()
        self.inplace = inplace
        self.qkv = torch.nn.Linear(width, 3 * width, bias=False)
        self.out = torch.nn.Linear(width, width, bias=False)
        self.gate = torch.nn.Linear(width, 4, bias=False)
        self.up = torch.nn.Linear(width, 2 * width, bias=False)
        self.down = torch.nn.Linear(2 * width, width, bias=False)
        self.norm = torch.nn.LayerNorm(width)

    def forward(self, x):
        q, k, v = (t.unflatten(-1, (2, -1)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        h = self.norm(x)
        weight = self.gate(h).softmax(-1).topk(2, -1).values.sum(-1, keepdim=True)
        return x + weight * self.down(F.silu(self.up(h), inplace=self.inplace))


def gradients(wrap, *, inplace=False, around=contextlib.nullcontext):
    """Gradients of a step of three blocks, each wrapped."""
    torch.manual_seed(0)
    blocks = [Block(16, inplace) for _ in range(3)]
    wrapped = [wrap(block) for block in blocks]
    x = torch.randn(2, 5, 16)
    with around():
        for block in wrapped:
            x = block(x)
        x.pow(2).sum().backward()
    return [p.grad for block in blocks for p in block.parameters()]


right = functools.cache(lambda: gradients(lambda block: block))


def same(a, b):
    return all(map(torch.equal, a, b))


def error_of(wrap, **kwargs):
    with pytest.raises(MutatedTensorError) as caught:
        gradients(wrap, inplace=True, **kwargs)
    return caught.value


def names_the_line(error):
    write = error.writes[0]
    return (write.op, write.function) == ("aten.silu_.default", "forward")


# torchtitan: the policy counts matmuls, keeps every second one, and looks at shapes.

KEPT = {*MATMULS, aten.topk.default, aten._scaled_dot_product_flash_attention_for_cpu.default}


def every_other_matmul(recomputed_shapes):
    def make():
        counts = collections.Counter()

        def policy(ctx, op, *args, **kwargs):
            if op is aten._to_copy.default and "cuda" in str(args[0].device):
                return CheckpointPolicy.MUST_SAVE
            if op is aten.mm.default:
                if args[1].shape in recomputed_shapes:
                    return CheckpointPolicy.PREFER_RECOMPUTE
                counts[ctx.is_recompute] += 1
                if counts[ctx.is_recompute] % 2 == 0:
                    return CheckpointPolicy.PREFER_RECOMPUTE
            return CheckpointPolicy.MUST_SAVE if op in KEPT else CheckpointPolicy.PREFER_RECOMPUTE

        return policy

    return make


def titan(create):
    def wrap(block):
        gate = block.gate.weight
        policy = every_other_matmul({gate.t().shape})
        return checkpoint_wrapper(
            block,
            context_fn=lambda: create(policy()),
            preserve_rng_state=True,
            determinism_check="default",
            **RUNS_TO_THE_END,
        )

    return wrap


CREATE = {
    "own": ours,
    "own, content": functools.partial(ours, check="content"),
    "own, inputs": functools.partial(ours, check_inputs=True),
    "foreign": guard(stock),
    "foreign, content": guard(stock, check="content"),
    "foreign, inputs": guard(stock, check_inputs=True),
}
every_create = pytest.mark.parametrize("create", CREATE.values(), ids=CREATE)


def saving_up_projections(create):
    """Keeps what feeds the activation: the second wide matmul of a block."""

    def policy(ctx, op, *args, **kwargs):
        return op in MATMULS

    return lambda: create(policy)


@every_create
def test_checkpoint_wrapper_with_a_policy_that_counts(create):
    assert same(gradients(titan(create)), right())


@every_create
def test_checkpoint_wrapper_and_a_write(create):
    def wrap(block):
        context_fn = saving_up_projections(create)
        return checkpoint_wrapper(block, context_fn=context_fn, **RUNS_TO_THE_END)

    assert names_the_line(error_of(wrap))


# transformers: one partial of checkpoint() for the whole model, called with the layer's __call__.


@every_create
@pytest.mark.parametrize("inplace", [False, True])
def test_gradient_checkpointing_by_one_partial(create, inplace):
    options = {"use_reentrant": False, "context_fn": saving_up_projections(create)}
    function = functools.partial(checkpoint, **options)

    def wrap(block):
        return lambda hidden: function(functools.partial(block.__call__), hidden)

    if inplace:
        assert names_the_line(error_of(wrap))
    else:
        assert same(gradients(wrap), right())


@pytest.mark.parametrize("inplace", [False, True])
def test_a_framework_that_binds_torchs_name_when_it_is_imported(inplace):
    install()
    try:
        bound = torch_checkpoint.create_selective_checkpoint_contexts
    finally:
        uninstall()
    if inplace:
        wrap = functools.partial(checkpoint_wrapper, context_fn=saving_up_projections(bound))
        assert names_the_line(error_of(wrap))
    else:
        assert same(gradients(titan(bound)), right())


# axolotl: a pair of modes of its own, that parks what is kept elsewhere, region by region.


@dataclass
class Parked:
    """Stands for a kept tensor; `shelf` has it, or a copy of it."""

    region: int
    shelf: list = field(default_factory=list)


class Park(TorchDispatchMode):
    """The forward's mode. `copies` tells whether what is parked is a copy."""

    def __init__(self, shared, copies):
        super().__init__()
        self.shared, self.copies = shared, copies

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        if func in torch_checkpoint.SAC_IGNORED_OPS:
            return out
        context = SelectiveCheckpointContext(
            is_recompute=False, **({"op_output": out} if ASKED_AFTERWARDS else {})
        )
        if self.shared["policy"](context, func, *args, **kwargs) is CheckpointPolicy.MUST_SAVE:
            self.shared["kept"][func].append(tree_map(self.park, out))
        return out

    def park(self, t):
        if not isinstance(t, torch.Tensor):
            return t
        kept = t.detach()
        if self.copies:
            kept = torch.empty_strided(t.size(), t.stride(), dtype=t.dtype).copy_(t)
        return Parked(self.shared["region"], [kept])


class Fetch(TorchDispatchMode):
    """The recompute's mode."""

    def __init__(self, shared):
        super().__init__()
        self.shared = shared

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func not in torch_checkpoint.SAC_IGNORED_OPS and self.shared["kept"].get(func):
            entry = self.shared["kept"][func].pop(0)
            return tree_map(lambda x: x.shelf.pop() if isinstance(x, Parked) else x, entry)
        return func(*args, **(kwargs or {}))


ASKED_AFTERWARDS = vt._torch.guard.POLICY_IN_FORWARD_ONLY


def parking(copies):
    regions = iter(range(100))

    def policy(ctx, op, *args, **kwargs):
        return CheckpointPolicy.MUST_SAVE if op in MATMULS else CheckpointPolicy.PREFER_RECOMPUTE

    def make():
        kept = collections.defaultdict(list)
        shared = {"policy": policy, "kept": kept, "region": next(regions)}
        return Park(shared, copies), Fetch(shared)

    return make


class OffloadsHidden(torch.autograd.graph.saved_tensors_hooks):
    """Hooks around the step that copy what was marked and pass the rest."""

    def __init__(self):
        super().__init__(self.pack, lambda packed: packed[1])
        self.copied = 0

    def pack(self, t):
        copy = t.dim() == 3 and not t.requires_grad
        self.copied += copy
        return ("copy", t.detach().clone()) if copy else ("itself", t)


def checkpointed(context_fn):
    def wrap(block):
        return lambda x: checkpoint(block, x, use_reentrant=False, context_fn=context_fn)

    return wrap


@pytest.mark.parametrize("check", ["storage", "content"])
@pytest.mark.parametrize("around", [contextlib.nullcontext, OffloadsHidden])
@pytest.mark.parametrize("copies", [False, True])
def test_a_pair_that_parks_what_it_keeps(copies, around, check):
    def wrap(block):
        return checkpointed(guard(parking(copies), check=check))(block)

    assert same(gradients(wrap, around=around), right())
    if copies:  # nothing can overwrite a copy, so that is no alarm
        assert same(gradients(wrap, inplace=True, around=around), right())
    else:
        assert names_the_line(error_of(wrap, around=around))


def test_without_the_guard_such_a_pair_is_silently_wrong():
    assert not same(gradients(checkpointed(parking(False)), inplace=True), right())


# FSDP2: parameters whose storage is emptied after forward and filled again before backward.


@pytest.fixture(scope="module")
def mesh(tmp_path_factory):
    if not hasattr(torch.cpu.Stream(), "record_event"):
        pytest.skip("FSDP2 of this torch does not run on a CPU")
    with one_process_group(tmp_path_factory.mktemp("gloo") / "store"):
        yield init_device_mesh("cpu", (1,))


def sharded_losses(mesh, context_fn, inplace=False):
    torch.manual_seed(0)
    model = torch.nn.Sequential(Block(16, inplace), Block(16, inplace))
    for block in model:
        fully_shard(block, mesh=mesh, reshard_after_forward=True)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    losses = []
    for _ in range(3):
        x = torch.randn(2, 4, 16)
        for block in model:
            x = checkpoint(block, x, use_reentrant=False, context_fn=context_fn)
        (loss := x.square().mean()).backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize(
    "context_fn",
    [
        functools.partial(ours, MATMULS),
        functools.partial(ours, MATMULS, check="content"),
        functools.partial(ours, MATMULS, check_inputs=True),
        guard(functools.partial(stock, MATMULS)),
    ],
    ids=["storage", "content", "inputs", "guard"],
)
def test_sharded_parameters(mesh, context_fn):
    assert sharded_losses(mesh, context_fn) == sharded_losses(
        mesh, functools.partial(stock, MATMULS)
    )
    with pytest.raises(MutatedTensorError) as caught:
        sharded_losses(mesh, context_fn, inplace=True)
    assert names_the_line(caught.value)
