"""`guard` around pairs of contexts that others made: torch's, hand-made ones, plain managers."""

from __future__ import annotations

import contextlib
import functools
import gc

import pytest
import torch
import torch.nn.functional as F
from regions import MATMULS, REGIONS, LiveBytes, aten, inputs, mlp, run
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils import checkpoint as torch_checkpoint
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint
from write_ways import ALIASES, OPS, here, in_handler, line_of, one_process_group

from viewtrack import MutatedTensorError, _torch
from viewtrack.checkpoint import guard
from viewtrack.mode import active

stock = functools.partial(torch_checkpoint.create_selective_checkpoint_contexts, MATMULS)
unchecked = functools.partial(stock, allow_cache_entry_mutation=True)


@pytest.fixture(scope="module", autouse=True)
def process_group(tmp_path_factory):
    with one_process_group(tmp_path_factory.mktemp("gloo") / "store"):
        yield


class Keep(TorchDispatchMode):
    """A cache as people write one: it keeps the results themselves, and looks at no counter."""

    def __init__(self, kept):
        super().__init__()
        self.kept = kept

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if func in MATMULS:
            self.kept.append(out.detach())
        return out


class HandOut(Keep):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func in MATMULS:
            return self.kept.pop(0)
        return func(*args, **(kwargs or {}))


def hand_made():
    kept = []
    return Keep(kept), HandOut(kept)


def pair_of_pairs():
    first, second = hand_made()

    @contextlib.contextmanager
    def both(context):
        with contextlib.nullcontext(), context:
            yield

    return both(first), both(second)


def nothing():
    return contextlib.nullcontext(), contextlib.nullcontext()


PAIRS = [stock, unchecked, hand_made, pair_of_pairs, nothing]
NAMES = ["torch", "torch_unchecked", "hand_made", "pair_of_pairs", "nothing"]
every_pair = pytest.mark.parametrize("pair", PAIRS, ids=NAMES)
caching_pair = pytest.mark.parametrize("pair", PAIRS[:-1], ids=NAMES[:-1])


def same(a, b):
    return all(
        torch.equal(x, y) if isinstance(x, torch.Tensor) else x == y
        for x, y in zip(a, b, strict=True)
    )


@every_pair
@pytest.mark.parametrize("check", ["storage", "content", "off"])
@pytest.mark.parametrize("region", REGIONS, ids=lambda region: region.__name__)
def test_values_and_gradients_are_those_without_the_guard(region, pair, check):
    guarded, bare = run(region, guard(pair, check=check)), run(region, pair)
    assert same(guarded[0], bare[0])
    assert same(guarded[1], bare[1])


def region_with(write):
    def region(x, w):
        h = x[0] @ w
        write(h)
        return (h * h).sin().sum()

    return region


def error_of(region, context_fn):
    with pytest.raises(MutatedTensorError) as caught:
        run(region, context_fn)
    return caught.value


@caching_pair
@pytest.mark.parametrize("place", [here, in_handler], ids=["here", "in_handler"])
@pytest.mark.parametrize("alias", ALIASES)
@pytest.mark.parametrize("op", OPS, ids=lambda op: op.name)
def test_every_way_to_write_in_the_region(op, alias, place, pair):
    region = region_with(lambda h: place(lambda: op.write(ALIASES[alias](h.detach()))))
    check = "storage" if op.seen else "content"
    error = error_of(region, guard(pair, check=check))
    assert error.saved.op == "aten.mm.default"
    if op.seen:
        assert (error.writes[0].filename, error.writes[0].lineno) in line_of(op.write)


@every_pair
def test_a_write_to_what_is_not_kept_is_no_alarm(pair):
    def region(x, w):
        h = x.sin()
        h.mul_(2)
        g = h @ w
        k = g + 1
        F.relu(k, inplace=True)
        return (k @ w).exp().sum()

    assert same(run(region, guard(pair))[1], run(region, pair)[1])


@caching_pair
def test_three_dimensions_without_bias(pair):
    def region(x, w):
        h = F.linear(x, w)
        h.relu_()
        return h.sin().sum()

    error = error_of(region, guard(pair))
    assert [write.op for write in error.writes] == ["aten.relu_.default"]


class HandOutChecked(HandOut):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func in MATMULS and self.kept[0]._version:
            raise RuntimeError("what this pair keeps has been mutated")
        return super().__torch_dispatch__(func, types, args, kwargs)


def checked_by_hand():
    kept = []
    return Keep(kept), HandOutChecked(kept)


def test_the_error_of_the_pairs_own_check_is_the_cause():
    error = error_of(region_with(lambda h: h.mul_(2)), guard(checked_by_hand))
    assert [write.op for write in error.writes] == ["aten.mul_.Tensor"]
    assert "what this pair keeps" in str(error.__cause__)


def in_a_manager(pair=stock):
    @contextlib.contextmanager
    def both(context):
        with contextlib.nullcontext(), context:
            yield

    forward, recompute = pair()
    return both(forward), both(recompute)


torchs_pair = pytest.mark.parametrize("pair", [stock, in_a_manager, unchecked])


@torchs_pair
@pytest.mark.parametrize("check", ["storage", "content"])
def test_what_is_allowed_passes_torchs_own_check_too(pair, check):
    def region(x, w):
        h = x[0] @ w
        F.relu(h, inplace=True)
        return h.exp().sum()

    right = run(region, nothing)[1]
    allowed = guard(pair, check=check, allow={"aten.relu_": "idempotent"})
    assert same(run(region, allowed)[1], right)
    with pytest.raises(MutatedTensorError, match=r"aten\.relu_"):
        run(region, guard(pair, check=check, allow=["aten.mul_"]))


@torchs_pair
@pytest.mark.parametrize("check", ["storage", "content"])
def test_a_warning_or_a_call_takes_the_place_of_torchs_error_too(pair, check):
    def policy(ctx, op, *args, **kwargs):
        asked.append(op)
        return op in MATMULS

    asked = []
    region = region_with(lambda h: F.relu(h, inplace=True))
    right = run(region, nothing)[1]
    with pytest.warns(UserWarning, match=r"aten\.relu_\.default\(self\)") as warned:
        assert same(run(region, guard(pair, check=check, on_mutation="warn"))[1], right)
    assert [warning.filename for warning in warned] == [__file__]
    errors = []
    assert same(run(region, guard(pair, check=check, on_mutation=errors.append))[1], right)
    assert [[write.op for write in error.writes] for error in errors] == [["aten.relu_.default"]]

    asking = functools.partial(torch_checkpoint.create_selective_checkpoint_contexts, policy)
    run(region, functools.partial(asking, allow_cache_entry_mutation=True))
    times = len(asked)
    run(region, guard(asking, check=check, on_mutation=errors.append))
    assert len(asked) == 2 * times


@torchs_pair
def test_a_write_of_equal_bytes_is_none_at_the_content_level(pair):
    region = region_with(lambda h: h.copy_(h.detach().clone()))
    assert same(run(region, guard(pair, check="content"))[1], run(region, nothing)[1])


def saving(*ops):
    return functools.partial(
        torch_checkpoint.create_selective_checkpoint_contexts, [*MATMULS, *ops]
    )


@pytest.mark.parametrize("check", ["storage", "content"])
@pytest.mark.parametrize("detached", [False, True])
def test_a_write_to_a_view_that_torch_keeps_is_named(check, detached):
    """Torch's counter of a view that was made below autograd stands still: stock is silent."""

    def region(x, w):
        h = x[0] * 2
        part = (h.detach() if detached else h)[2:]
        part.add_(1)
        return (part.sin() @ w).sum()

    error = error_of(region, guard(saving(aten.slice.Tensor), check=check))
    assert [write.op for write in error.writes] == ["aten.add_.Tensor"]
    assert error.writes[0].function == "region"


@pytest.mark.parametrize("check", ["storage", "content"])
def test_a_kept_view_of_what_the_region_did_not_make(check):
    """What is handed out lies in the storage of the op's own argument."""
    buffer = torch.ones(4, 4)

    def region(x, w):
        part = buffer[1:]
        buffer.mul_(2)
        return (part @ (x[0] @ w)).sin().sum()

    error = error_of(region, guard(saving(aten.slice.Tensor), check=check))
    assert [write.op for write in error.writes] == ["aten.mul_.Tensor"]


@pytest.mark.parametrize("make", [lambda t: t.to_sparse(), TwoTensor], ids=["sparse", "wrapper"])
def test_what_no_watch_can_see_is_told_by_torchs_own_counter(make):
    kept = []

    def region(x, w):
        h = torch.mul(make_of, 2)
        kept.append(h)
        return (x[0] @ w).sin().sum() + (h.to_dense() if h.is_sparse else h.a).sum()

    make_of = make(torch.eye(4)) if make is not TwoTensor else make(torch.eye(4), torch.eye(4))
    x, w = inputs()
    context_fn = guard(saving(aten.mul.Tensor))
    loss = checkpoint(region, x, w, use_reentrant=False, context_fn=context_fn)
    torch.autograd.graph.increment_version(kept[0])
    with pytest.raises(MutatedTensorError, match="by an op that no mode saw") as caught:
        loss.backward()
    assert caught.value.saved.op == "aten.mul.Tensor"
    assert caught.value.saved.function == "region"


@caching_pair
@pytest.mark.parametrize("three_dimensions", [False, True])
def test_the_content_level_names_the_line_too_where_the_pair_raises_first(pair, three_dimensions):
    def region(x, w):
        h = F.linear(x if three_dimensions else x[0], w)
        F.silu(h, inplace=True)
        return h.sin().sum()

    error = error_of(region, guard(pair, check="content"))
    assert [write.op for write in error.writes] == ["aten.silu_.default"]
    assert error.writes[0].function == "region"


@caching_pair
def test_a_write_between_forward_and_backward(pair):
    kept = []

    def region(x, w):
        h = x[0] @ w
        kept.append(h)
        return h.sin().sum()

    x, w = inputs()
    loss = checkpoint(region, x, w, use_reentrant=False, context_fn=guard(pair))
    kept[0].detach().mul_(2)
    with pytest.raises(MutatedTensorError, match="by an op that no mode saw"):
        loss.backward()


def test_allowed_ops_and_reactions():
    region = region_with(lambda h: F.relu(h, inplace=True))
    right = run(region, nothing)[1]
    assert same(run(region, guard(unchecked, allow={"aten.relu_": "idempotent"}))[1], right)
    with pytest.warns(UserWarning, match="has been mutated"):
        assert same(run(region, guard(unchecked, on_mutation="warn"))[1], right)
    errors = []
    run(region, guard(unchecked, on_mutation=errors.append))
    assert [type(error) for error in errors] == [MutatedTensorError]


def test_the_policy_is_asked_no_extra_time():
    def calls_of(wrap):
        calls = []

        def policy(ctx, op, *args, **kwargs):
            calls.append((str(op), ctx.is_recompute))
            return op in MATMULS

        pair = functools.partial(torch_checkpoint.create_selective_checkpoint_contexts, policy)
        run(mlp, wrap(pair))
        return calls

    assert calls_of(guard) == calls_of(lambda pair: pair)


@caching_pair
def test_nothing_more_is_kept_alive(pair):
    def held_and_peak(context_fn):
        gc.collect()
        x, w = inputs()
        with LiveBytes() as live:
            loss = checkpoint(mlp, x, w, use_reentrant=False, context_fn=context_fn)
            held = live.now
            loss.backward()
        return held, live.peak

    assert held_and_peak(guard(pair)) == held_and_peak(pair)


def test_an_error_on_entering_leaves_nothing_entered():
    class Fails(contextlib.AbstractContextManager):
        def __enter__(self):
            raise KeyError("from the context")

        def __exit__(self, *exc):
            return None

    with pytest.raises(KeyError, match="from the context"):
        run(mlp, guard(lambda: (Fails(), contextlib.nullcontext())))
    assert _torch.mode_stack_len() == 0
    assert active.trackers == []


def test_arguments_go_on_to_the_context_fn():
    assert same(
        run(
            mlp,
            functools.partial(
                guard(torch_checkpoint.create_selective_checkpoint_contexts), [aten.mm.default]
            ),
        )[1],
        run(mlp, stock)[1],
    )
    with pytest.raises(ValueError, match="`check` must be"):
        guard(stock, check="bytes")


def test_guard_makes_a_plain_function():
    assert type(guard(stock)) is type(test_guard_makes_a_plain_function)


MEMORY = {
    "empty": lambda t: torch.empty(t.shape),
    "empty_like": torch.empty_like,
    "new_empty": lambda t: t.new_empty(t.shape),
    "empty_strided": lambda t: torch.empty_strided(t.shape, t.stride()),
    "new_empty_strided": lambda t: t.new_empty_strided(t.shape, t.stride()),
}
TAKES_MEMORY = [
    getattr(getattr(torch.ops.aten, name), "memory_format" if name == "empty" else "default")
    for name in MEMORY
]


@pytest.mark.parametrize("check", ["storage", "content"])
@pytest.mark.parametrize("make", MEMORY.values(), ids=MEMORY)
def test_memory_without_content_that_a_pair_keeps_is_no_alarm(make, check):
    def region(x):
        h = make(x)
        h.copy_(x @ x)
        h.mul_(2)
        return (h.sin() * h).exp().sum()

    def gradient(context_fn):
        torch.manual_seed(0)
        x = torch.randn(3, 3, requires_grad=True)
        checkpoint(region, x, use_reentrant=False, context_fn=context_fn).backward()
        return x.grad

    pair = functools.partial(torch_checkpoint.create_selective_checkpoint_contexts, TAKES_MEMORY)
    right = gradient(torch_checkpoint.noop_context_fn)
    assert torch.equal(gradient(guard(pair, check=check)), right)
