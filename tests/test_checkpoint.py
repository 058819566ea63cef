"""The guarded contexts against torch's own: values, gradients, errors, policy calls, memory."""

from __future__ import annotations

import functools
import gc
import threading

import pytest
import torch
import torch.nn.functional as F
from regions import (
    MATMULS,
    REGIONS,
    LiveBytes,
    aten,
    dropped,
    inputs,
    mlp,
    run,
    written_before_it_is_saved,
)
from torch.utils import checkpoint as torch_checkpoint
from torch.utils.checkpoint import CheckpointPolicy, checkpoint

from viewtrack import MutatedTensorError, track
from viewtrack._torch.guard import POLICY_IN_FORWARD_ONLY
from viewtrack.checkpoint import create_selective_checkpoint_contexts as ours

stock = torch_checkpoint.create_selective_checkpoint_contexts
LEVELS = ["storage", "content", "off"]


def save_all(ctx, op, *args, **kwargs):
    return CheckpointPolicy.MUST_SAVE


def save_views_and_matmuls(ctx, op, *args, **kwargs):
    views = (aten.split.Tensor, aten.transpose.int, aten.view.default, aten.unbind.int)
    return op in MATMULS or op in views


def prefer(ctx, op, *args, **kwargs):
    if op in MATMULS:
        return CheckpointPolicy.PREFER_SAVE
    return CheckpointPolicy.MUST_RECOMPUTE


def save_every_second(ctx, op, *args, **kwargs):
    # By what comes in, since a policy may be asked again in recompute and must say the same.
    return op is aten.mm.default and args[1].stride(0) == 4


POLICIES = [MATMULS, [], save_all, save_views_and_matmuls, prefer, save_every_second]


def named(value):
    return getattr(value, "__name__", None) or f"list_of_{len(value)}"


def assert_same(a, b):
    """Outputs and gradients of two runs."""
    assert same(a[0], b[0])
    assert same(a[1], b[1])


def same(a, b):
    return len(a) == len(b) and all(
        torch.equal(x, y) if isinstance(x, torch.Tensor) else x == y
        for x, y in zip(a, b, strict=True)
    )


@pytest.mark.parametrize("check", LEVELS)
@pytest.mark.parametrize("policy", POLICIES, ids=named)
@pytest.mark.parametrize("region", REGIONS, ids=named)
def test_values_and_gradients_are_those_of_torch(region, policy, check):
    right = run(region, torch_checkpoint.noop_context_fn)
    contexts = functools.partial(ours, policy, check=check)
    if policy is save_all and region is written_before_it_is_saved:
        stock_error = error_of(stock, lambda c: run(region, functools.partial(c, policy)))
        assert "has been mutated" in stock_error[1]
        if check != "off":
            with pytest.raises(MutatedTensorError, match=r"written   aten.mul_.Tensor\(self\)"):
                run(region, contexts)
        return
    assert_same(run(region, contexts), right)
    if policy is not save_all or region is not dropped:  # torch takes empty_like for a result
        assert_same(run(region, functools.partial(stock, policy)), right)


def test_an_op_that_only_writes_is_never_kept():
    # Torch keeps the result of mul_, and its recompute leaves out the write.
    def region(x, w):
        h = x + 1
        h.mul_(3)
        torch._foreach_mul_([h], 2.0)
        with torch.no_grad():
            out = torch.empty_like(h)
            torch.add(h, 1, out=out)
        return (h.sin() @ w * out).sum()

    writes = [aten.mul_.Tensor, aten._foreach_mul_.Scalar, aten.add.out]
    right = run(region, torch_checkpoint.noop_context_fn)
    assert_same(run(region, functools.partial(ours, writes)), right)


@pytest.mark.parametrize("early_stop", [True, False])
def test_early_stop(early_stop):
    with torch_checkpoint.set_checkpoint_early_stop(early_stop):
        assert same(
            run(mlp, functools.partial(ours, MATMULS))[1],
            run(mlp, functools.partial(stock, MATMULS))[1],
        )


def calls_of(contexts, region=mlp):
    calls = []

    def policy(ctx, op, *args, **kwargs):
        output = getattr(ctx, "op_output", None)
        calls.append((str(op), ctx.is_recompute, len(args), sorted(kwargs), type(output)))
        return op in MATMULS

    run(region, functools.partial(contexts, policy))
    return calls


@pytest.mark.parametrize("region", REGIONS, ids=named)
def test_the_policy_is_asked_as_often_as_torch_asks(region):
    assert calls_of(ours, region) == calls_of(stock, region)


def error_of(contexts, body):
    with pytest.raises(Exception) as caught:  # noqa: PT011
        body(contexts)
    return type(caught.value), str(caught.value)


def backward_twice(contexts):
    x, w = inputs()
    loss = checkpoint(
        mlp, x, w, use_reentrant=False, context_fn=functools.partial(contexts, MATMULS)
    )
    loss.backward(retain_graph=True)
    loss.backward()


def other_ops_in_recompute(contexts):
    times = []

    def region(x, w):
        times.append(1)
        h = (x if len(times) == 1 else torch.bmm(x, x)) @ w
        return h.sin().sum()

    run(region, functools.partial(contexts, [*MATMULS, aten.sin.default]))


def other_shapes_in_recompute(contexts):
    times = []

    def region(x, w):
        times.append(1)
        return (x.sin() if len(times) == 1 else x[:1].sin()).exp().sum()

    run(region, functools.partial(contexts, MATMULS))


def raises_in_forward(contexts):
    def region(x, w):
        raise KeyError("from the region")

    run(region, functools.partial(contexts, MATMULS))


def packet(contexts):
    contexts([torch.ops.aten.mm])


def no_op(contexts):
    contexts([3])


def no_policy(contexts):
    contexts(3)


BODIES = [
    backward_twice,
    other_ops_in_recompute,
    other_shapes_in_recompute,
    # Before 2.13 torch leaves the forward's context entered, until the garbage collector comes by.
    *([raises_in_forward] if POLICY_IN_FORWARD_ONLY else []),
    packet,
    no_op,
    no_policy,
]


@pytest.mark.parametrize("body", BODIES, ids=named)
def test_errors_are_those_of_torch(body):
    assert error_of(ours, body) == error_of(stock, body)


def test_names_stand_for_ops():
    names = ["aten.mm.default", aten.bmm.default, "aten.addmm.default"]
    assert same(run(mlp, functools.partial(ours, names))[1], run(mlp, lambda: ours(MATMULS))[1])
    kept = []
    caching, _ = ours(names)
    with caching:
        torch.ones(2, 2) @ torch.ones(2, 2)
    kept = [type(entry).__name__ for entry in caching.cache.entries[aten.mm.default._op]]
    assert kept == ["Watch"]


@pytest.mark.parametrize("name", ["aten.mm", "aten::mm", "aten::mm.default", "aten.mm.default"])
def test_a_name_may_be_written_as_people_write_it(name):
    caching, _ = ours([name, "notyet.attention.default", "notyet::attention"])
    with caching:
        (torch.ones(2, 2) @ torch.ones(2, 2)).sin()
    entries = caching.cache.entries.items()
    kept = {op for op, found in entries for e in found if type(e).__name__ == "Watch"}
    assert kept == {aten.mm.default._op}


def test_an_op_that_is_defined_after_the_list_is_known_by_its_name():
    contexts = ours(["guardlater.twice.default"])
    with torch.library._scoped_library("guardlater", "DEF") as library:
        library.define("twice(Tensor x) -> Tensor")
        library.impl("twice", lambda x: x * 2, "CompositeExplicitAutograd")
        with contexts[0]:
            torch.ops.guardlater.twice(torch.ones(2))
        (entry,) = contexts[0].cache.entries[torch.ops.guardlater.twice.default._op]
        assert entry.tensor.tolist() == [2, 2]


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("mm", "did you mean 'aten.mm'?"),
        ("aten.matmull", "did you mean 'aten.matmul'?"),
        ("aten.sofmax", "did you mean 'aten.softmax'?"),
        ("aten::addmm.defualt", "its overloads are default"),
        ("", "write it as 'aten.mm.default'"),
    ],
)
def test_a_name_of_no_op_is_refused(name, told):
    with pytest.raises(ValueError, match="names no op") as caught:
        ours([aten.mm.default, name])
    assert told in str(caught.value)


def test_ignored_ops_are_read_when_an_op_comes():
    def count(contexts):
        return sum(call[0] == "aten.sin.default" for call in calls_of(contexts))

    assert count(ours) == count(stock) > 0
    torch_checkpoint.SAC_IGNORED_OPS.add(aten.sin.default)
    try:
        assert count(ours) == count(stock) == 0
    finally:
        torch_checkpoint.SAC_IGNORED_OPS.remove(aten.sin.default)


def nested(contexts, x, w):
    def inner(x, w):
        return (x @ w).sin() @ w

    def outer(x, w):
        h = checkpoint(inner, x.cos(), w, use_reentrant=False, context_fn=contexts)
        return (h @ w).exp().sum()

    return checkpoint(outer, x, w, use_reentrant=False, context_fn=contexts)


def test_nested_regions():
    grads = []
    for contexts in (ours, stock):
        x, w = inputs()
        nested(functools.partial(contexts, MATMULS), x, w).backward()
        grads.append([x.grad, w.grad])
    assert same(*grads)


def test_a_region_under_track():
    with track():
        tracked = run(mlp, functools.partial(ours, MATMULS))
    assert same(tracked[1], run(mlp, functools.partial(stock, MATMULS))[1])


def test_a_layer_with_parameters_and_autocast():
    torch.manual_seed(0)
    layer = torch.nn.TransformerEncoderLayer(16, 2, 32, batch_first=True, dropout=0.2)
    grads = []
    for contexts in (ours, stock):
        layer.zero_grad()
        torch.manual_seed(1)
        x = torch.randn(2, 5, 16, requires_grad=True)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            out = checkpoint(
                layer, x, use_reentrant=False, context_fn=functools.partial(contexts, MATMULS)
            )
        out.float().pow(2).sum().backward()
        grads.append([x.grad, *(p.grad for p in layer.parameters())])
    assert same(*grads)


def bytes_of(contexts, policy, layers=3):
    """Live bytes after the forward, and the peak over forward and backward."""
    torch.manual_seed(0)
    model = [torch.nn.Linear(16, 16, bias=bool(i % 2)) for i in range(layers)]
    x = torch.randn(2, 8, 16, requires_grad=True)
    gc.collect()
    with LiveBytes() as live:
        h = x
        for layer in model:
            h = checkpoint(
                lambda h, layer=layer: F.gelu(layer(h)).sin(),
                h,
                use_reentrant=False,
                context_fn=functools.partial(contexts, policy),
            )
        held = live.now
        h.sum().backward()
    return held, live.peak


@pytest.mark.parametrize("policy", [MATMULS, save_all, []], ids=named)
def test_no_more_memory_than_torch(policy):
    assert bytes_of(ours, policy) == bytes_of(stock, policy)


def test_the_memory_probe_sees_a_kept_tensor():
    assert bytes_of(stock, MATMULS)[0] > bytes_of(stock, [])[0]


def test_a_graph_that_is_dropped_lets_go_of_the_cache():
    x, w = inputs()
    with LiveBytes() as live:
        loss = checkpoint(mlp, x, w, use_reentrant=False, context_fn=lambda: ours(MATMULS))
        held = live.now
        del loss
        gc.collect()
    given = x.nbytes + w.nbytes  # of which ops made views
    assert live.now == given < held


def test_regions_in_several_threads():
    def region(x, w):
        return (torch.relu_(x @ w + 1) @ w).sigmoid()

    def work(grads, seed, contexts):
        mine = torch.Generator().manual_seed(seed)  # the default one is for all threads
        x = torch.randn(4, 5, 6, generator=mine, requires_grad=True)
        w = torch.randn(6, 6, generator=mine, requires_grad=True)
        for _ in range(3):
            y = x
            for _ in range(3):
                context_fn = functools.partial(contexts, MATMULS)
                y = checkpoint(region, y, w, use_reentrant=False, context_fn=context_fn)
            y.sum().backward()
        grads[seed] = [x.grad, w.grad]

    found, right = {}, {}
    threads = [threading.Thread(target=work, args=(found, seed, ours)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for seed in range(4):
        work(right, seed, stock)
        assert same(found[seed], right[seed])


def test_a_wrapper_subclass_is_kept_and_guarded_with_its_parts():
    two_tensor = pytest.importorskip("torch.testing._internal.two_tensor").TwoTensor

    def step(contexts, *, writes):
        def region(x, w):
            h = x @ w
            if writes:
                h.mul_(2)
            return (h.sin() * h).sum()

        torch.manual_seed(0)
        x = two_tensor(torch.randn(3, 3), torch.randn(3, 3)).requires_grad_()
        w = torch.randn(3, 3, requires_grad=True)
        context_fn = functools.partial(contexts, MATMULS)
        checkpoint(region, x, w, use_reentrant=False, context_fn=context_fn).backward()
        return [x.grad.a, x.grad.b]

    assert same(step(ours, writes=False), step(stock, writes=False))
    with pytest.raises(MutatedTensorError, match=r"aten\.mul_\.Tensor\(self\)"):
        step(ours, writes=True)


@pytest.mark.parametrize(
    "arguments", [{"check": "bytes"}, {"on_mutation": "print"}, {"on_mutation": 3}]
)
def test_arguments_are_checked(arguments):
    (name,) = arguments
    with pytest.raises(ValueError, match=f"`{name}` must be"):
        ours(MATMULS, **arguments)
