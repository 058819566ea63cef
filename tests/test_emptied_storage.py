"""Storages that are emptied under a kept tensor: it would be read from freed memory."""

from __future__ import annotations

import functools

import pytest
import torch
from regions import aten
from torch.utils import checkpoint as torch_checkpoint
from torch.utils.checkpoint import checkpoint

from viewtrack import MutatedTensorError, MutationGuard, guard_saved_tensors
from viewtrack.checkpoint import create_selective_checkpoint_contexts, guard

both_levels = pytest.mark.parametrize("check", ["storage", "content"])
KEPT = [aten.mm.default]
stock = functools.partial(torch_checkpoint.create_selective_checkpoint_contexts, KEPT)
CONTEXTS = {
    "own": lambda **options: functools.partial(
        create_selective_checkpoint_contexts, KEPT, **options
    ),
    "guard": lambda **options: guard(stock, **options),
}


def resized(t, elements):
    t.untyped_storage().resize_(elements * 4)


def run(contexts, between, region=lambda h: h.sin()):
    kept = []

    def fn(x, w):
        h = x @ w
        kept.append(h.detach())
        return region(h).sum()

    torch.manual_seed(0)
    x, w = torch.randn(4, 4), torch.randn(4, 4, requires_grad=True)
    loss = checkpoint(fn, x, w, use_reentrant=False, context_fn=contexts)
    between(kept[0])
    loss.backward()
    return w.grad, x.t() @ torch.cos(x @ w.detach())


@both_levels
@pytest.mark.parametrize("contexts", CONTEXTS)
@pytest.mark.parametrize("elements", [0, 15])
def test_a_kept_result_whose_storage_is_too_small_is_not_read(contexts, check, elements):
    with pytest.raises(MutatedTensorError, match="resize of its storage") as caught:
        run(CONTEXTS[contexts](check=check), lambda h: resized(h, elements))
    assert caught.value.saved.op == "aten.mm.default"
    assert caught.value.saved.function == "fn"


@pytest.mark.parametrize("contexts", CONTEXTS)
def test_a_storage_that_grows_or_is_filled_again_is_no_alarm(contexts):
    def filled_again(h):
        values = h.clone()
        resized(h, 0)
        resized(h, 16)
        h.data.copy_(values)

    grad, right = run(CONTEXTS[contexts](), lambda h: resized(h, 32))
    assert torch.allclose(grad, right)
    grad, right = run(CONTEXTS[contexts](check="content"), filled_again)
    assert torch.allclose(grad, right)


@both_levels
def test_a_guarded_tensor_whose_storage_is_emptied(check):
    with MutationGuard(check=check) as watching:
        whole, part = torch.ones(8), torch.ones(8)[2:4]
        entry, other = watching.save(whole), watching.save(part)
        resized(whole, 4)
        resized(part, 4)
        assert other.get() is part  # what it shows is there
        with pytest.raises(MutatedTensorError, match="too few bytes"):
            entry.get()
        resized(whole, 8)
        whole.data.fill_(1)
        if check == "content":
            entry.get()
        entry.release()


@both_levels
def test_what_autograd_saved_is_not_read_from_freed_memory(check):
    leaf = torch.ones(4, requires_grad=True)
    with guard_saved_tensors(check=check):
        y = leaf.exp()
        loss = y.sum()
        resized(y, 0)
        with pytest.raises(MutatedTensorError, match="resize of its storage"):
            loss.backward()


def test_inputs_may_be_away_between_the_passes():
    """Sharded parameters are given away after the forward, and gathered for the recompute."""
    w = torch.ones(4, 4, requires_grad=True)
    values = w.detach().clone()

    class Gathering(torch.nn.Module):
        def forward(self, x):
            resized(w, 16)
            w.untyped_storage().copy_(values.untyped_storage())
            return (x @ w).sin().sum()

    contexts = CONTEXTS["own"](check_inputs=True)
    loss = checkpoint(Gathering(), torch.ones(4, 4), use_reentrant=False, context_fn=contexts)
    resized(w, 0)
    loss.backward()
    assert torch.allclose(w.grad, torch.full((4, 4), 4 * torch.cos(torch.tensor(4.0)).item()))
