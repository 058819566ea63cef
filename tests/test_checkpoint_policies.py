"""Policies of the installed torch, effects, offloading and compiled regions, as torch has them."""

from __future__ import annotations

import functools
import gc

import pytest
import torch
from regions import MATMULS, LiveBytes, aten, dropped, inputs, mlp, run
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch.utils import checkpoint as torch_checkpoint
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointPolicy, checkpoint

import viewtrack as vt
from viewtrack import MutatedTensorError
from viewtrack.checkpoint import create_selective_checkpoint_contexts as ours
from viewtrack.checkpoint import guard

stock = torch_checkpoint.create_selective_checkpoint_contexts
guarded = guard(stock)
RELEASE = tuple(int(part) for part in torch.__version__.split(".")[:2])
PAIRS = {"own": ours, "foreign": guarded}
both = pytest.mark.parametrize("contexts", PAIRS.values(), ids=PAIRS)


def same(a, b):
    return all(
        torch.equal(x, y) if isinstance(x, torch.Tensor) else x == y
        for x, y in zip(a, b, strict=True)
    )


def joint(look):
    """A partitioner that looks at the graph of forward and backward before it is cut."""

    def partition(graph_module, *args, **kwargs):
        look(graph_module, None)
        return min_cut_rematerialization_partition(graph_module, *args, **kwargs)

    return partition


class Ran(TorchDispatchMode):
    """Counts the matmuls that are really run."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func in MATMULS
        return func(*args, **(kwargs or {}))


def always(answer):
    return lambda ctx, op, *args, **kwargs: answer


ANSWERS = [*CheckpointPolicy, True, False]  # with CPU_OFFLOAD, from 2.13 on


@both
@pytest.mark.parametrize("answer", ANSWERS, ids=str)
def test_every_answer_is_followed_as_torch_follows_it(answer, contexts):
    def policy(ctx, op, *args, **kwargs):
        return answer if op in MATMULS else CheckpointPolicy.PREFER_RECOMPUTE

    def step(contexts):
        with Ran() as ran:
            values, grads = run(mlp, functools.partial(contexts, policy))
        x, w = inputs()
        gc.collect()
        with LiveBytes() as live:
            context_fn = functools.partial(contexts, policy)
            loss = checkpoint(mlp, x, w, use_reentrant=False, context_fn=context_fn)
            held = live.now
            loss.backward()
        return [ran.count, held, live.peak, *values, *grads]

    assert same(step(contexts), step(stock))


@both
@pytest.mark.parametrize("policy", [[], *map(always, ANSWERS)], ids=["list", *map(str, ANSWERS)])
def test_an_effect_is_repeated_where_torch_repeats_it(policy, contexts, capfd):
    def region(x, w):
        aten._print("an effect")
        return (x @ w).sin().sum()

    times = []
    for pair in (contexts, stock):
        run(region, functools.partial(pair, policy))
        times.append(capfd.readouterr().out.count("an effect"))
    assert times[0] == times[1] > 0


def test_from_2_15_on_an_effect_is_saved_unasked(capfd):
    run(lambda x, w: (aten._print("an effect"), (x @ w).sum())[1], lambda: ours(MATMULS))
    assert capfd.readouterr().out.count("an effect") == (1 if RELEASE >= (2, 15) else 2)


# Options of checkpoint().


def region_of_another_shape():
    times = []

    def region(x, w):
        times.append(1)
        h = (x if len(times) == 1 else x[:1]) @ w
        return h.sin().exp().sum()

    return region


def outcome(contexts, make_region, **options):
    """Gradients and the state of the random numbers after a step; or the error."""
    torch.manual_seed(0)
    try:
        grads = run(make_region(), functools.partial(contexts, MATMULS), **options)[1]
    except Exception as error:
        return [type(error).__name__, str(error).replace(str(contexts), "")]
    return [*grads, torch.get_rng_state()]


@both
@pytest.mark.parametrize(
    "options",
    [
        {"determinism_check": "none"},
        {"determinism_check": "default"},
        {"preserve_rng_state": False},
        {"preserve_rng_state": True},
        {"debug": True},
    ],
    ids=str,
)
@pytest.mark.parametrize(
    "make_region", [lambda: mlp, lambda: dropped, region_of_another_shape], ids=range(3)
)
def test_options_of_checkpoint_do_what_they_do_with_torchs_contexts(contexts, options, make_region):
    assert same(outcome(contexts, make_region, **options), outcome(stock, make_region, **options))


@both
def test_the_graph_of_a_compiled_region_has_the_marks_that_torch_makes(contexts):
    """`ac_graph_id` and the decisions, for the partitioner."""

    def marks(pair):
        torch._dynamo.reset()
        found = []

        def look(graph_module, _):
            found.extend(
                [n.name, n.meta.get("ac_graph_id"), str(n.meta.get("recompute"))]
                for n in graph_module.graph.nodes
                if n.meta.get("recompute") is not None
            )
            return graph_module.forward

        def step(x, w):
            context_fn = functools.partial(pair, MATMULS)
            return checkpoint(mlp, x, w, use_reentrant=False, context_fn=context_fn)

        torch.compile(step, backend=aot_autograd(fw_compiler=look, partition_fn=joint(look)))(
            *inputs()
        ).backward()
        torch._dynamo.reset()
        return found

    mine, torchs = marks(contexts), marks(stock)
    first = {mark[1] for mark in torchs}
    assert len(mine) == len(torchs) > 0
    assert {mark[1] is None for mark in mine} == {one is None for one in first}
    assert [mark[2] for mark in mine] == [mark[2] for mark in torchs]


# Offloading by saved-tensor hooks.


def overwrites(x, w):
    h = x @ w
    h.mul_(2)
    return (h.sin() * h).sum()


def step_on_cpu(region, context_fn, **kwargs):
    x, w = inputs()
    with torch.autograd.graph.save_on_cpu():
        loss = checkpoint(region, x, w, use_reentrant=False, context_fn=context_fn, **kwargs)
    loss.backward()
    return [x.grad, w.grad]


@both
@pytest.mark.filterwarnings("ignore:.*saved_tensors_hooks:FutureWarning")
def test_what_is_offloaded_around_a_region_has_the_same_gradients(contexts):
    right = run(mlp, functools.partial(stock, MATMULS))[1]
    assert same(step_on_cpu(mlp, functools.partial(contexts, MATMULS)), right)
    with pytest.raises(MutatedTensorError, match=r"aten\.mul_\.Tensor\(self\)"):
        step_on_cpu(overwrites, functools.partial(contexts, MATMULS))


class Copied(torch.autograd.graph.saved_tensors_hooks):
    """What `save_on_cpu` does on an accelerator."""

    def __init__(self):
        super().__init__(lambda t: [t.clone()], lambda packed: packed[0])


@both
@pytest.mark.skipif(RELEASE < (2, 14), reason="torch before 2.14 has no such argument")
@pytest.mark.parametrize("check", ["storage", "content"])
def test_a_cache_that_passes_the_hooks(contexts, check):
    """A copy cannot be overwritten; what is on the CPU already is no copy, and torch is silent."""

    def step(hooks):
        x, w = inputs()
        context_fn = (
            functools.partial(ours, MATMULS, check=check)
            if contexts is ours
            else guard(functools.partial(stock, MATMULS), check=check)
        )
        options = {"use_reentrant": False, "respect_saved_tensors_hooks": True}
        with hooks:
            loss = checkpoint(overwrites, x, w, context_fn=context_fn, **options)
        loss.backward()
        return [x.grad, w.grad]

    x, w = inputs()
    assert same(step(Copied()), torch.autograd.grad(overwrites(x, w), [x, w]))
    with pytest.raises(MutatedTensorError, match=r"aten\.mul_\.Tensor\(self\)"):
        step(torch.autograd.graph.save_on_cpu())


@pytest.mark.parametrize("check", ["storage", "content"])
@pytest.mark.parametrize("inside", [False, True], ids=["hooks around", "guard around"])
@pytest.mark.parametrize("hooks", [Copied, torch.autograd.graph.save_on_cpu])
def test_the_guard_of_what_autograd_saves_and_offloading(check, inside, hooks):
    offload, saved = hooks(), vt.guard_saved_tensors(check=check)
    first, second = (saved, offload) if inside else (offload, saved)
    leaf = torch.rand(4, requires_grad=True)
    with first, second:
        y = leaf.exp()
        out = (y * y).sum()
        right = torch.autograd.grad(out, leaf, retain_graph=True)
        with torch.no_grad():
            y.view(-1).zero_()
        # Torch 2.6 cannot tell which hooks are there, so they are not called: LIMITATIONS.md.
        if hooks is Copied and (inside or RELEASE >= (2, 7)):
            assert same(torch.autograd.grad(out, leaf), right)
        else:
            with pytest.raises(MutatedTensorError, match=r"aten\.zero_\.default\(self\)"):
                out.backward()


# Compiled regions.


def compiled(fn):
    return torch.compile(fn, backend="aot_eager")


@pytest.fixture
def _fresh_dynamo():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@both
@pytest.mark.usefixtures("_fresh_dynamo")
@pytest.mark.parametrize("place", ["inside", "outside"])
def test_compiled_code_inside_and_outside_of_the_region(contexts, place):
    inner = compiled(lambda h: (h.sin() * 2).tanh()) if place == "inside" else torch.sin

    def region(x, w):
        return (inner(x @ w) @ w).exp().sum()

    def step(context_fn):
        x, w = inputs()
        x_in = compiled(lambda t: t * 2 + 1)(x) if place == "outside" else x
        loss = checkpoint(region, x_in, w, use_reentrant=False, context_fn=context_fn)
        if place == "outside":
            loss = compiled(lambda t: t * 3)(loss)
        loss.backward()
        return [x.grad, w.grad]

    right = step(functools.partial(stock, MATMULS))
    assert same(step(functools.partial(contexts, MATMULS)), right)


@both
@pytest.mark.usefixtures("_fresh_dynamo")
def test_a_write_beside_compiled_code_is_found(contexts):
    inner = compiled(lambda h: h.sin() * 2)

    def region(x, w):
        h = x @ w
        out = inner(h)
        h.mul_(2)
        return (out @ w + h).exp().sum()

    with pytest.raises(MutatedTensorError, match=r"aten\.mul_\.Tensor\(self\)"):
        run(region, functools.partial(contexts, MATMULS))


@both
@pytest.mark.usefixtures("_fresh_dynamo")
def test_a_write_by_compiled_code_is_found(contexts):
    write = compiled(lambda h: h.mul_(2))

    def region(x, w):
        h = x @ w
        write(h)
        return (h @ w).exp().sum()

    with pytest.raises(MutatedTensorError, match="has been mutated"):
        run(region, functools.partial(contexts, MATMULS))


@pytest.mark.heavy
@both
@pytest.mark.usefixtures("_fresh_dynamo")
@pytest.mark.parametrize("writes", [False, True])
def test_the_result_of_code_that_inductor_compiled_is_kept_and_guarded(contexts, writes):
    config = pytest.importorskip("torch._inductor.config")
    if not hasattr(config, "wrap_inductor_compiled_regions"):
        pytest.skip("this torch shows no mode what inductor compiled")
    compiled_code = torch._higher_order_ops.inductor_compiled_code
    asked = []

    def policy(ctx, op, *args, **kwargs):
        asked.append(op)
        return op is compiled_code

    def step(pair):
        torch._dynamo.reset()
        inner = torch.compile(lambda h: (h.sin() * 2).tanh(), backend="inductor")

        def region(x, w):
            h = inner(x @ w)
            if writes:
                h.mul_(2)
            return (h @ w).exp().sum()

        return run(region, functools.partial(pair, policy))[1]

    with config.patch(wrap_inductor_compiled_regions=True):
        if writes:
            with pytest.raises(MutatedTensorError, match=r"aten\.mul_\.Tensor\(self\)"):
                step(contexts)
        else:
            assert same(step(contexts), step(stock))
    assert compiled_code in asked
