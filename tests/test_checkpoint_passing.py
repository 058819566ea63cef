"""Ops of a region that are not kept: what passes them on must not be seen in anything but time."""

import functools
import gc
import traceback

import pytest
import torch
from regions import MATMULS, aten, inputs, mlp, run
from torch.utils import checkpoint as torch_checkpoint
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from viewtrack import MutatedTensorError
from viewtrack._torch.guard import POLICY_IN_FORWARD_ONLY
from viewtrack.checkpoint import create_selective_checkpoint_contexts as ours
from viewtrack.checkpoint import passing
from viewtrack.plan import forget

stock = torch_checkpoint.create_selective_checkpoint_contexts
LISTS = [[], MATMULS, [*MATMULS, aten.clone.default, aten.t.default, aten._unsafe_view.default]]


def both(region, ops, *args):
    """Gradients with our contexts and with torch's.

    Ours come the second time, when it is settled how each op is passed on.
    """
    found = []
    for contexts in (ours, ours, stock):
        leaves = [t.detach().clone().requires_grad_() for t in args]
        context_fn = functools.partial(contexts, ops)
        checkpoint(region, *leaves, use_reentrant=False, context_fn=context_fn).backward()
        found.append([t.grad for t in leaves])
    return found[1:]


def lazily_conjugated(z):
    c = z.conj()
    return torch.view_as_real(c.clone() * 2 + c.contiguous().t() + (c @ z)).pow(2).sum()


def by_keyword(x):
    h = torch.add(x, x, alpha=3).to(torch.float64).clone(memory_format=torch.contiguous_format)
    return (h.sum(-1, dtype=torch.float64) * torch.ones_like(h[..., 0])).sum()


def numbers_first(x):
    return (2 - x / 3 + torch.div(1.0, x.exp()) * 2.5).mean()


def without_a_tensor(x):
    return (x * torch.arange(4) + torch.full((4,), 2.0) + torch.zeros(2, 4, 4)).sum()


@pytest.mark.parametrize("ops", LISTS, ids=len)
@pytest.mark.parametrize(
    ("region", "dtype"),
    [
        (lazily_conjugated, torch.complex64),
        (by_keyword, torch.float32),
        (numbers_first, torch.float32),
        (without_a_tensor, torch.float32),
    ],
)
def test_gradients_are_those_of_torch(region, dtype, ops):
    torch.manual_seed(0)
    shape = (4, 4) if dtype.is_complex else (2, 4, 4)
    mine, right = both(region, ops, torch.randn(shape, dtype=dtype))
    assert torch.equal(mine[0], right[0])


def pseudo_inverse(z):
    return torch.view_as_real(torch.linalg.pinv(z.conj()) @ z.exp()).pow(2).sum()


def pseudo_inverse_by_keyword(z):
    inverse = torch.linalg.pinv(z.conj(), rtol=torch.tensor(1e-6))
    return torch.view_as_real(inverse @ z.exp()).pow(2).sum()


def save_matmuls(ctx, op, *args, **kwargs):
    return op in MATMULS


@pytest.mark.parametrize("policy", [[], MATMULS, save_matmuls], ids=["none", "list", "function"])
@pytest.mark.parametrize("region", [pseudo_inverse, pseudo_inverse_by_keyword])
def test_lazy_conjugates_are_resolved_where_a_kernel_needs_it(region, policy):
    # Torch's contexts read them as they lie in memory, and so the gradient is wrong.
    torch.manual_seed(0)
    z = torch.randn(3, 3, dtype=torch.complex64, requires_grad=True)
    right = torch.autograd.grad(region(z), z)[0]
    for _ in range(2):
        out = checkpoint(region, z, use_reentrant=False, context_fn=lambda: ours(policy))
        torch.testing.assert_close(torch.autograd.grad(out, z)[0], right)


class Seen(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.ops = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.ops.append((str(func), len(args), sorted(kwargs or {})))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("ops", LISTS, ids=len)
def test_modes_below_see_what_they_see_under_torch(ops):
    seen = []
    for contexts in (ours, stock):
        run(mlp, functools.partial(contexts, ops))  # by now it is settled how each op is passed on
        with Seen() as below:
            run(mlp, functools.partial(contexts, ops))
        # Where torch's own contexts issue a detach more to hand an entry out, it is theirs.
        seen.append([op for op in below.ops if op[0] != "aten.detach.default"])
    assert seen[0] == seen[1]


def once_more(contexts):
    times = []

    def region(x, w):
        times.append(1)
        h = x @ w
        for _ in times:
            h = h.neg()  # which saves nothing that checkpoint() could count
        return h.sin().sum()

    run(region, functools.partial(contexts, MATMULS))


def never_before(contexts):
    times = []

    def region(x, w):
        times.append(1)
        h = (x @ w).sin()
        return (h if len(times) == 1 else h.cos()).exp().sum()

    run(region, functools.partial(contexts, MATMULS))


@pytest.mark.skipif(not POLICY_IN_FORWARD_ONLY, reason="older torch counts kept ops only")
@pytest.mark.parametrize("body", [once_more, never_before])
def test_an_op_that_the_forward_did_not_run_so_often_is_refused_as_by_torch(body):
    errors = []
    for contexts in (ours, stock):
        with (
            torch_checkpoint.set_checkpoint_early_stop(False),
            pytest.raises(RuntimeError, match="encountered during backward") as caught,
        ):
            body(contexts)
        errors.append(str(caught.value))
    assert errors[0] == errors[1]


def test_an_error_of_an_op_comes_alone():
    times = []

    def region(x, w):
        times.append(1)
        return (x.exp() + torch.ones(4 if len(times) == 1 else 3)).exp().sum()

    x, w = inputs()
    for _ in range(2):
        with pytest.raises(RuntimeError, match="must match the size") as caught:
            checkpoint(
                region, x, w, use_reentrant=False, context_fn=lambda: ours(MATMULS)
            ).backward()
        assert "During handling" not in "".join(traceback.format_exception(caught.value))
    assert len(times) == 3  # in the recompute, and then in the forward
    # Torch 2.6 leaves a region's contexts, where its forward raises, when the error is freed.
    del caught
    gc.collect()


@pytest.mark.skipif(not POLICY_IN_FORWARD_ONLY, reason="older torch asks in the recompute too")
@pytest.mark.parametrize("change", [list.append, list.remove])
def test_a_list_that_changes_in_the_forward_changes_no_gradient(change):
    ops = [*MATMULS, aten.sin.default]
    op = aten.cos.default if change is list.append else aten.sin.default

    def region(x):
        h = (x.sin() * 2).cos()
        if op in ops and change is list.remove:
            ops.remove(op)
        if op not in ops and change is list.append:
            ops.append(op)
        return (h.sin() + h.cos() * x).sum()

    x = torch.randn(3, requires_grad=True)
    checkpoint(region, x, use_reentrant=False, context_fn=lambda: ours(ops)).backward()
    right = torch.autograd.grad(region(x), x)[0]
    assert torch.equal(x.grad, right)


def test_an_op_that_is_ignored_from_the_middle_of_a_region_on():
    def region(x, w):
        h = (x.sin() @ w).sin()
        torch_checkpoint.SAC_IGNORED_OPS.add(aten.sin.default)
        return (h.sin() @ w).sum()

    right = run(region, torch_checkpoint.noop_context_fn)
    try:
        for ops in (MATMULS, [*MATMULS, aten.sin.default]):
            torch_checkpoint.SAC_IGNORED_OPS.discard(aten.sin.default)
            assert all(map(torch.equal, run(region, lambda ops=ops: ours(ops))[1], right[1]))
    finally:
        torch_checkpoint.SAC_IGNORED_OPS.discard(aten.sin.default)


@pytest.mark.skipif(not POLICY_IN_FORWARD_ONLY, reason="older torch is asked for each op")
def test_an_op_that_is_planned_anew_is_settled_anew():
    run(mlp, lambda: ours(MATMULS))
    gelu = aten.gelu.default
    tables = [passing.in_forward, passing.in_recompute, *passing._tables.values()]
    assert sum(gelu._op in table for table in tables) >= 3
    forget(gelu)
    assert not any(gelu._op in table for table in tables)
    assert run(mlp, lambda: ours(MATMULS))[1][0] is not None


def test_lists_that_alternate_are_not_mixed_up():
    def kept(ops):
        caching, _ = ours(ops)
        with caching:
            (torch.ones(2, 2) @ torch.ones(2, 2)).sin()
        return {
            op for op, entries in caching.cache.entries.items() if type(entries[0]) is not object
        }

    for _ in range(2):
        assert kept([aten.mm.default]) == {aten.mm.default._op}
        assert kept([aten.sin.default]) == {aten.sin.default._op}


def test_many_lists_keep_no_more_than_some_tables():
    ops = [getattr(aten, name).default for name in ("sin", "cos", "tan", "exp", "log", "abs")]
    for bits in range(1 << len(ops)):
        caching, _ = ours([op for i, op in enumerate(ops) if bits >> i & 1])
        with caching:
            torch.ones(1).neg()
    assert len(passing._tables) <= passing._TABLES_KEPT


def test_a_write_to_an_unsafe_view_of_what_is_kept_is_found_after_the_region():
    out = []

    def region(x, w):
        out.append(aten._unsafe_view.default(torch.mm(x[0], w), [2, 8]))
        return out[-1].sin().sum()

    for _ in range(2):  # the second time it is settled how the view is passed on
        x, w = inputs()
        loss = checkpoint(region, x, w, use_reentrant=False, context_fn=lambda: ours(MATMULS))
        with torch.no_grad():
            out[-1].add_(1)
        with pytest.raises(MutatedTensorError, match="has been mutated"):
            loss.backward()
