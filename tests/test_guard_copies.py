"""guard_saved_tensors(on_mutation="copy"): backward gets what was saved, whatever is written."""

from __future__ import annotations

import ctypes
import functools

import pytest
import torch
from write_ways import ALIASES, OPS, one_process_group

from viewtrack import MutatedTensorError, guard_saved_tensors, track
from viewtrack.watch import watched

copying = functools.partial(guard_saved_tensors, on_mutation="copy")
LEVELS = ["storage", "content"]


@pytest.fixture(scope="module", autouse=True)
def process_group(tmp_path_factory):
    with one_process_group(tmp_path_factory.mktemp("gloo") / "store"):
        yield


def gradients(write, alias=None):
    """Of a leaf whose value, views of it and an input without gradient are saved, then written."""
    leaf = torch.tensor([1.0, 2.0, 3.0, 4.0], requires_grad=True)
    base = leaf * 1
    view = base.view(2, 2)
    scale = torch.arange(4.0)
    loss = (
        (base * base).sum() + (view * view[0]).sum() + (leaf * scale).sum() + base[1:].exp().sum()
    )
    if write is not None:
        with torch.no_grad():
            for t in (base, scale):
                write(alias(t))
    loss.backward()
    return leaf.grad


@pytest.mark.parametrize("part", [slice(None), slice(1, 3), slice(0, 4, 2)])
@pytest.mark.parametrize("alias", ALIASES)
@pytest.mark.parametrize("op", [op for op in OPS if op.seen], ids=lambda op: op.name)
@pytest.mark.parametrize("check", LEVELS)
def test_every_way_to_write_that_a_mode_sees_is_right(check, op, alias, part):
    if part.step and alias in ("view", "view_of_view", "unsafe_view", "no_grad_view"):
        part = slice(2, 4)  # such a view needs a contiguous tensor
    right = gradients(None)
    with copying(check=check):
        assert torch.equal(gradients(op.write, lambda t: ALIASES[alias](t[part])), right)


@pytest.mark.parametrize("check", LEVELS)
@pytest.mark.parametrize(
    "write",
    [
        lambda t: t.set_(torch.zeros(4)),
        lambda t: t.requires_grad or t.resize_(2),  # torch refuses it for the others
        lambda t: t.unsqueeze_(0),
        lambda t: (t.mul_(3), t.mul_(3), t.unsqueeze_(0), t.zero_()),
    ],
    ids=["set_", "resize_", "unsqueeze_", "several"],
)
def test_other_storage_and_sizes(write, check):
    right = gradients(None)
    with copying(check=check):
        assert torch.equal(gradients(write, lambda t: t), right)


def test_second_derivatives_and_a_second_backward():
    def derivatives(write):
        x = torch.tensor([1.0, 2.0], requires_grad=True)
        y = x * 1
        loss = (y * y * x).sum()
        if write:
            with torch.no_grad():
                y.zero_()
        (first,) = torch.autograd.grad(loss, x, create_graph=True)
        (second,) = torch.autograd.grad(first.sum(), x, retain_graph=True)
        (again,) = torch.autograd.grad(loss, x)
        return first, second, again

    with copying():
        found = derivatives(True)
    assert all(map(torch.equal, found, derivatives(False)))


def test_lazily_conjugated_and_negated_tensors():
    def gradient(write):
        z = torch.tensor([1 + 2j, 3 - 1j], requires_grad=True)
        kept = torch.tensor([2 + 1j, 1 - 1j])
        loss = (z * kept.conj()).real.sum() + (z.imag * kept.conj().imag).sum()
        if write:
            kept.zero_()
        loss.backward()
        return z.grad

    with copying():
        assert torch.equal(gradient(True), gradient(False))


@pytest.mark.parametrize(
    ("check", "write"),
    [
        ("content", lambda t: ctypes.memset(t.data_ptr(), 0, t.nbytes)),
        ("content", lambda t: setattr(t, "data", torch.zeros(4))),
    ],
    ids=["raw", "data="],
)
def test_what_nobody_sees_in_time_raises(check, write):
    with copying(check=check), pytest.raises(MutatedTensorError):
        gradients(write, lambda t: t)


@pytest.mark.parametrize("check", LEVELS)
def test_what_nobody_saw_before_the_copy_raises(check):
    x = torch.ones(4, requires_grad=True)
    with copying(check=check):
        y = x * 1
        loss = (y * y).sum()
    with torch.no_grad():
        y.mul_(2)  # where no mode is
    with track(), torch.no_grad():
        y.mul_(2)
    with pytest.raises(MutatedTensorError):
        loss.backward()


def test_a_copy_is_made_of_what_is_written_and_lives_as_long_as_the_graph():
    x = torch.ones(4, requires_grad=True)
    with copying():
        y, other = x * 1, x * 2
        loss = (y * y).sum() + (other * other).sum()
        before = len(watched)
        with torch.no_grad():
            y.mul_(2)
        assert len(watched) == before - 1  # what is safe is watched no more
        loss.backward()
    assert x.grad.tolist() == [10.0] * 4


def test_statistics_of_batch_norm_that_backward_reads():
    def gradient(update):
        torch.manual_seed(0)
        model, x = torch.nn.BatchNorm1d(3), torch.randn(4, 3, requires_grad=True)
        y = model.eval()(x)
        if update:
            model.train()(torch.randn(4, 3))
        y.pow(2).sum().backward()
        return x.grad

    with copying():
        assert torch.equal(gradient(True), gradient(False))


def test_the_argument_is_checked():
    with pytest.raises(ValueError, match="on_mutation"), guard_saved_tensors(on_mutation="clone"):
        pass
