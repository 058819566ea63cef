"""guard_saved_tensors: the check that autograd makes, with lines, and where autograd makes none."""

import contextlib
import ctypes
import functools

import pytest
import torch
from functions import square_storing
from torch.autograd import forward_ad
from torch.autograd.graph import allow_mutation_on_saved_tensors, save_on_cpu, saved_tensors_hooks
from torch.utils.checkpoint import checkpoint
from torch.utils.checkpoint import create_selective_checkpoint_contexts as torchs_own
from write_ways import ALIASES, OPS, OWN_COUNTER, line_of, one_process_group

from viewtrack import MutatedTensorError, guard_saved_tensors, track
from viewtrack._torch.guard import top_saved_tensors_hooks
from viewtrack.checkpoint import create_selective_checkpoint_contexts
from viewtrack.report import Recorder


@pytest.fixture(scope="module", autouse=True)
def process_group(tmp_path_factory):
    with one_process_group(tmp_path_factory.mktemp("gloo") / "store"):
        yield


def keep_as_it_is():
    return saved_tensors_hooks(lambda t: t, lambda t: t)


def leaf():
    return torch.tensor([1.0, 2.0, 3.0, 4.0], requires_grad=True)


def test_gradients_are_those_without_it():
    grads = []
    for guarded in (True, False):
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.GELU(), torch.nn.Linear(4, 1))
        x = torch.randn(3, 4, requires_grad=True)

        def step(model=model, x=x):
            loss = model(x).pow(2).sum()
            (g,) = torch.autograd.grad(loss, x, create_graph=True)
            (g.pow(2).sum() + loss).backward()

        if guarded:
            with guard_saved_tensors():
                step()
        else:
            step()
        grads.append([x.grad, *(p.grad for p in model.parameters())])
    assert all(map(torch.equal, *grads))


def test_both_lines_are_told():
    x = leaf()
    with guard_saved_tensors():
        y = x.exp()
        y.add_(1)
        with pytest.raises(MutatedTensorError, match="has been mutated") as caught:
            y.sum().backward()
    (write,) = caught.value.writes
    assert (write.op, write.filename, write.lineno) == (
        "aten.add_.Tensor",
        __file__,
        caught.value.saved.lineno + 1,
    )
    assert (write.version_before, write.version_after) == (0, 1)


@pytest.mark.parametrize("alias", ALIASES)
@pytest.mark.parametrize("op", OPS, ids=lambda op: op.name)
@pytest.mark.parametrize("check", ["storage", "content"])
@pytest.mark.parametrize("inside", [True, False], ids=["inside", "outside"])
def test_every_way_to_write(op, alias, check, inside):
    x = leaf()
    buffer = x * torch.ones(4)

    def write(half):
        with torch.no_grad():
            op.write(ALIASES[alias](half))

    with guard_saved_tensors(check=check):
        y = buffer[:2].exp()
        whole = torch.cat([y, y]).detach()
        kept = whole[:2].requires_grad_() * 1
        loss = (kept * kept).sum() + y.sum()
        neighbour = whole[2:]
        if inside:
            write(neighbour)
            write(kept.detach())
    if not inside:
        write(neighbour)
        write(kept.detach())
    found = check == "content" or (op.seen if inside else op.counted and alias not in OWN_COUNTER)
    if not found:
        loss.backward()
        return
    with pytest.raises(MutatedTensorError) as caught:
        loss.backward()
    if inside and op.seen:
        write = caught.value.writes[0]
        assert (write.filename, write.lineno) in line_of(op.write)


CHANGES = {
    "aten.set_.source_Tensor": lambda x: x.set_(torch.zeros(4, 4)),
    "aten.resize_.default": lambda x: x.resize_(4, 1),
    "aten.t_.default": lambda x: x.t_(),
}


@pytest.mark.parametrize("hooks", [contextlib.nullcontext, keep_as_it_is], ids=["none", "user's"])
@pytest.mark.parametrize("check", ["storage", "content"])
@pytest.mark.parametrize("op", CHANGES)
def test_an_input_with_another_storage_or_geometry_is_told(op, check, hooks):
    x = torch.arange(16.0).view(4, 4)
    scale = torch.ones(4, 4, requires_grad=True)
    with guard_saved_tensors(check=check), hooks():
        y = scale * x
        CHANGES[op](x)
        with pytest.raises(MutatedTensorError) as caught:
            y.sum().backward()
    (write,) = caught.value.writes
    assert (write.op, write.lineno) == (op, CHANGES[op].__code__.co_firstlineno)


def test_an_input_that_is_given_away_and_gathered_anew_is_right():
    """Sharded parameters: ``.data`` is emptied after the forward, and filled for the backward."""
    x, scale = torch.arange(4.0), torch.ones(4, requires_grad=True)
    for check in ("storage", "content"):
        with guard_saved_tensors(check=check):
            y = scale * x
            x.data = torch.empty(0)
            x.data = torch.arange(4.0)
            (grad,) = torch.autograd.grad(y.sum(), scale)
        assert torch.equal(grad, torch.arange(4.0))


def test_what_was_not_saved_may_be_written():
    x = torch.rand(2, 3, requires_grad=True)
    with guard_saved_tensors():
        row = (x - 0.5)[1]
        loss = row.sum() - row[0]
        (first,) = torch.autograd.grad(loss, x, retain_graph=True)
        with torch.no_grad():
            row.fill_(9.0)
        (second,) = torch.autograd.grad(loss, x)
    assert torch.equal(first, second)


def test_a_raw_write_in_the_first_backward_is_found_in_the_second():
    def store(x, grad):
        ctypes.memmove(x.data_ptr(), grad.data_ptr(), 4)

    x = torch.tensor([3.0], requires_grad=True)
    with guard_saved_tensors(check="content"):
        y = square_storing(store).apply(x)
        torch.autograd.grad(y, x, torch.ones(1), retain_graph=True)
        with pytest.raises(MutatedTensorError):
            torch.autograd.grad(y, x, torch.ones(1))


# Other hooks.


def kept_by_reference():
    return saved_tensors_hooks(lambda t: t, lambda t: t)


def test_hooks_that_keep_the_tensor_take_the_check_from_torch_and_not_from_us():
    def step():
        x = leaf()
        y = x.exp()
        y.data.mul_(2)
        y.mul_(1)
        y.sum().backward()
        return x.grad

    with kept_by_reference():
        assert not torch.allclose(step(), leaf().exp())  # silently wrong
    with guard_saved_tensors(), kept_by_reference(), pytest.raises(MutatedTensorError):
        step()


@pytest.mark.skipif(
    top_saved_tensors_hooks() is None and torch.__version__ < "2.7",
    reason="torch 2.6 cannot tell which hooks are there",
)
def test_hooks_that_are_there_already_go_on_working():
    calls = []

    def pack(t):
        calls.append("pack")
        return t

    with saved_tensors_hooks(pack, lambda t: calls.append("unpack") or t):
        x = leaf()
        with guard_saved_tensors():
            y = x.exp()
        y.sum().backward()
    assert calls == ["pack", "unpack"]
    assert torch.equal(x.grad, leaf().exp())


def test_an_offloaded_copy_cannot_be_overwritten():
    x = leaf()
    with guard_saved_tensors(), saved_tensors_hooks(lambda t: t.clone(), lambda t: t):
        y = x.exp()
        y.data.mul_(2)
    y.sum().backward()
    assert torch.equal(x.grad, leaf().exp())


def test_save_on_cpu_and_checkpoint_work_inside():
    def region(x):
        return (x.sin() @ x.cos().t()).exp()

    grads = []
    for guarded in (True, False):
        torch.manual_seed(0)
        x = torch.randn(3, 3, requires_grad=True)

        def step(x=x):
            with save_on_cpu():
                h = x.tanh() * 2
            contexts = functools.partial(
                create_selective_checkpoint_contexts, [torch.ops.aten.mm.default]
            )
            checkpoint(region, h, use_reentrant=False, context_fn=contexts).sum().backward()

        if guarded:
            with guard_saved_tensors():
                step()
        else:
            step()
        grads.append(x.grad)
    assert torch.equal(*grads)


def test_tensors_that_the_cache_keeps_are_guarded_with_those_that_autograd_saves():
    written = []

    def region(x, w):
        h = x @ w
        written.append(h)
        return h.sin().sum()

    contexts = functools.partial(create_selective_checkpoint_contexts, [torch.ops.aten.mm.default])
    x, w = torch.randn(3, 3, requires_grad=True), torch.randn(3, 3)
    with guard_saved_tensors():
        loss = checkpoint(region, x, w, use_reentrant=False, context_fn=contexts)
        written[0].data.zero_()
        with pytest.raises(MutatedTensorError, match=r"aten\.mm\.default"):
            loss.backward()


def test_a_cloned_saved_tensor_may_be_edited():
    def edit(write):
        r = leaf()
        with guard_saved_tensors(check="content"), allow_mutation_on_saved_tensors():
            b = r * 1
            v = b.view(2, 2)
            loss = (b * b).sum() + (v * v).sum()
            with torch.no_grad():
                write(b, v)
            loss.backward()
        return r.grad

    right = 4 * leaf().detach()
    for write in (
        lambda b, v: v.mul_(3),
        lambda b, v: (v.mul_(3), b.mul_(3)),
        lambda b, v: b[1:].zero_(),
        lambda b, v: torch.mul(torch.ones(4), 5.0, out=b),
        lambda b, v: b.data.mul_(3),
    ):
        with contextlib.suppress(MutatedTensorError):  # refused, where the clone came too late
            assert torch.equal(edit(write), right)
    with pytest.raises(MutatedTensorError):
        edit(lambda b, v: ctypes.memset(b.data_ptr(), 0, 16))


def test_the_level_is_checked():
    with pytest.raises(ValueError, match="`check` must be"), guard_saved_tensors(check="off"):
        pass


def test_torch_is_as_it_was_afterwards():
    enter = saved_tensors_hooks.__enter__
    with pytest.raises(KeyError), guard_saved_tensors():
        raise KeyError
    assert saved_tensors_hooks.__enter__ is enter
    x = leaf()
    x.exp().sum().backward()
    assert torch.equal(x.grad, leaf().exp())


def test_torchs_own_selective_checkpointing_refuses_no_more_than_without_the_guard():
    """Its cache is not what autograd saved, and written idempotently it serves its purpose."""

    def region(x, w):
        h = torch.nn.functional.linear(x, w)  # aten.mm, then aten._unsafe_view
        return h.relu_().exp()

    def gradients(context):
        x = torch.arange(6.0).view(2, 1, 3).requires_grad_()
        w = torch.eye(3).sub(0.5).requires_grad_()
        contexts = functools.partial(torchs_own, [torch.ops.aten.mm.default])
        with context:
            out = checkpoint(region, x, w, use_reentrant=False, context_fn=contexts)
            out.sum().backward()
        return x.grad, w.grad

    right = gradients(contextlib.nullcontext())
    for context in (guard_saved_tensors(), Recorder(), Recorder(guard_saved=True)):
        assert all(map(torch.equal, gradients(context), right))
    with pytest.raises(RuntimeError, match="has been mutated"):  # what `track` is for
        gradients(track())


def test_what_a_recompute_does_twice_to_what_is_saved_is_told():
    def region(x, w):
        return torch.nn.functional.linear(x, w).mul_(2).sin()

    contexts = functools.partial(torchs_own, [torch.ops.aten.mm.default])
    with guard_saved_tensors():
        x, w = torch.ones(2, 1, 3, requires_grad=True), torch.eye(3)
        out = checkpoint(region, x, w, use_reentrant=False, context_fn=contexts)
        with pytest.raises(MutatedTensorError) as caught:
            out.sum().backward()
    assert caught.value.writes[0].op == "aten.mul_.Tensor"


def test_a_write_through_an_unsafe_view_of_what_is_saved_is_seen_all_the_same():
    with guard_saved_tensors():
        y = torch.ones(4, requires_grad=True).exp()
        torch.ops.aten._unsafe_view(y.detach(), [2, 2]).mul_(2)
        with pytest.raises(MutatedTensorError) as caught:
            y.sum().backward()
    assert [write.op for write in caught.value.writes] == ["aten.mul_.Tensor"]


@pytest.mark.parametrize("keyword", [{}, {"check": "content"}, {"on_mutation": "copy"}])
def test_forward_mode_with_zero_tensors_inside(keyword):
    def tangent():
        with forward_ad.dual_level():
            x = forward_ad.make_dual(leaf(), torch.ones(4))
            y = torch.nn.functional.linear(torch.tanh(x) * leaf(), torch.eye(4, requires_grad=True))
            return forward_ad.unpack_dual(y).tangent

    with guard_saved_tensors(**keyword):
        guarded = tangent()
    assert torch.equal(guarded, tangent())


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("keyword", [{}, {"check": "content"}, {"on_mutation": "copy"}])
def test_strided_nested_tensors_are_guarded(keyword):
    def gradients(edit):
        parts = [torch.ones(2, 3).requires_grad_(), torch.ones(4, 3).requires_grad_()]
        y = torch.nested.as_nested_tensor(parts).relu()
        if edit:
            y.mul_(2)
        torch.nested.to_padded_tensor(y, 0.0).sum().backward()
        return [part.grad for part in parts]

    with guard_saved_tensors(**keyword):
        assert all(map(torch.equal, gradients(edit=False), gradients(edit=False)))
        with pytest.raises(MutatedTensorError) as caught:
            gradients(edit=True)
    assert caught.value.writes[0].op == "aten.mul_.Tensor"
