"""Custom ops where the handlers of subclasses and of modes stand between user and body."""

import contextlib

import pytest
import torch
from handlers import Wrapper
from library_ops import HEADS, PassThrough, axpy_, formula_zero_, fresh, head, raw_zero_

import viewtrack as vt
from viewtrack import ViewTrackError, library

heads = pytest.mark.parametrize("head", HEADS.values(), ids=HEADS)


def wrapped(n, requires_grad=True):
    return Wrapper(torch.ones(n), requires_grad=requires_grad)


def tracked(n, requires_grad=True):
    return vt.TrackedTensor(torch.ones(n)).requires_grad_(requires_grad)


wrappers = pytest.mark.parametrize("make", [wrapped, tracked])


def values(t):
    return (t.inner if isinstance(t, Wrapper) else t._inner).tolist()


@wrappers
@heads
def test_views_of_wrappers(make, head):
    leaf = make(4)
    base = leaf * 1
    view = head(base, 2)
    assert type(view) is type(base)
    assert view._base is base
    view.mul_(3)
    assert base._version == 1
    base.mul_(2)
    base.sum().backward()
    assert values(leaf.grad) == [6, 6, 2, 2]


@wrappers
@pytest.mark.parametrize(
    ("op", "rest", "grad"),
    [(axpy_, (torch.ones(4), 3), [1] * 4), (formula_zero_, (), [0] * 4)],
    ids=str,
)
def test_writes_of_wrappers(make, op, rest, grad):
    leaf = make(4)
    base = leaf * 1
    assert op(base, *rest) is base
    assert base._version == 1
    base.sum().backward()
    assert values(leaf.grad) == grad


@wrappers
def test_raw_writes_of_wrappers(make):
    x = make(4, requires_grad=False)
    raw_zero_(x)
    assert values(x) == [0] * 4
    assert x._version == 1
    base = make(4) * 1
    raw_zero_(base)
    with pytest.raises(ViewTrackError, match="register_autograd"):
        base.sum().backward()


@wrappers
def test_new_tensors_from_wrappers(make):
    op = library.op(
        fresh("(Tensor(a) x, float k) -> (Tensor(a), Tensor)"), lambda x, k: (x[:2], x * k)
    )
    leaf = make(4)
    view, scaled = op(leaf * 1, 3.0)
    (view.sum() + scaled.sum()).backward()
    assert values(leaf.grad) == [4, 4, 3, 3]


class Caching(PassThrough):
    """Answers an op from what an earlier call of it returned, as selective checkpointing does."""

    def __init__(self, op):
        super().__init__()
        self.op = op
        self.kept = []
        self.answers = False

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is self.op and self.answers:
            return torch.utils._pytree.tree_map(lambda t: t.detach(), self.kept[0])
        out = super().__torch_dispatch__(func, types, args, kwargs)
        if func is self.op:
            self.kept.append(torch.utils._pytree.tree_map(lambda t: t.detach(), out))
        return out


def test_a_handler_that_answers_from_a_cache_leaves_the_gradient():
    op = library.op(fresh("(Tensor x, float k) -> Tensor"), lambda x, k: x.exp() * k)
    leaf = torch.tensor([0.0, 1.0], requires_grad=True)
    with Caching(op.op) as mode:
        first = op(leaf, 2.0)
        mode.answers = True
        second = op(leaf, 2.0)
    torch.testing.assert_close(second, first)
    second.sum().backward()
    torch.testing.assert_close(leaf.grad, 2 * leaf.detach().exp())


@heads
def test_a_cached_view_is_marked_again(head):
    leaf = torch.ones(4, requires_grad=True)
    base = leaf * 1
    with Caching(head.op) as mode:
        head(base, 2)
        mode.answers = True
        view = head(base, 2)
    assert view._base is base
    view.mul_(3)
    base.sum().backward()
    assert leaf.grad.tolist() == [3, 3, 1, 1]


def test_handlers_get_outputs_without_metadata():
    class Looking(PassThrough):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = super().__torch_dispatch__(func, types, args, kwargs)
            if func is head.op:
                seen.append((out._is_view(), out.requires_grad, out._version))
            return out

    seen = []
    base = torch.ones(4, requires_grad=True) * 1
    base.add_(1)
    with Looking():
        view = head(base, 2)
    assert seen == [(False, False, 1)]
    assert view._is_view()


def test_selective_checkpointing():
    op = library.op(fresh("(Tensor x, float k) -> Tensor"), lambda x, k: x.exp() * k)

    def block(x):
        hidden = op(x, 2.0)
        base = hidden * 1
        head(base, 1).mul_(3)
        return (base * hidden).sum()

    def policy(ctx, func, *args, **kwargs):
        policies = torch.utils.checkpoint.CheckpointPolicy
        return policies.MUST_SAVE if func is op.op else policies.PREFER_RECOMPUTE

    x = torch.tensor([0.5, 1.0], requires_grad=True)
    block(x).backward()
    expected, x.grad = x.grad, None
    torch.utils.checkpoint.checkpoint(
        block,
        x,
        use_reentrant=False,
        context_fn=lambda: torch.utils.checkpoint.create_selective_checkpoint_contexts(policy),
    ).backward()
    torch.testing.assert_close(x.grad, expected)


@heads
def test_under_track_a_view_shares_its_counter_already_in_the_handler(head):
    class Counting(PassThrough):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = super().__torch_dispatch__(func, types, args, kwargs)
            if func is head.op:
                torch.autograd.graph.increment_version(args[0])
                seen.append((out._version, args[0]._version))
            return out

    seen = []
    base = torch.ones(4, requires_grad=True) * 1
    with vt.track(), Counting():
        view = head(base, 2)
    assert seen == [(1, 1)]
    assert view._base is base


class Changing(PassThrough):
    """Passes an op its first tensor, and other arguments than the user after it."""

    def __init__(self, op, *rest, **named):
        super().__init__()
        self.op = op
        self.rest = rest
        self.named = named

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is self.op:
            return func(args[0], *self.rest, **self.named)
        return func(*args, **(kwargs or {}))


def _add_():
    return library.inplace_op(
        fresh("(Tensor(a!) x, float n) -> Tensor(a!)"), lambda x, n: x.add_(n)
    )


def _mul_():
    return library.inplace_op(
        fresh("(Tensor(a!) x, float n) -> Tensor(a!)"), lambda x, n: x.mul_(n)
    )


contexts = pytest.mark.parametrize("track", [False, True], ids=["plain", "track"])


def changed(op, *rest, track=False, **named):
    stack = contextlib.ExitStack()
    if track:
        stack.enter_context(vt.track())
    stack.enter_context(Changing(op.op, *rest, **named))
    return stack


@contexts
def test_a_handler_changes_a_number_of_a_write(track):
    op = _add_()
    x = torch.zeros(1)
    with changed(op, 100.0, track=track):
        assert op(x, 1.0) is x
    assert (x.item(), x._version) == (100, 1)


@contexts
def test_the_gradient_of_a_changed_write_is_of_what_ran(track):
    op = _mul_()
    leaf = torch.ones(1, requires_grad=True)
    base = leaf * 1
    with changed(op, 100.0, track=track):
        op(base, 2.0)
    base.sum().backward()
    assert (base.item(), base._version, leaf.grad.item()) == (100, 1, 100)


@contexts
@heads
def test_a_handler_changes_a_number_of_a_view(head, track):
    leaf = torch.ones(4, requires_grad=True)
    base = leaf * 1
    with changed(head, 3, track=track):
        view = head(base, 1)
    assert view._base is base
    assert view.shape == (3,)
    view.mul_(5)
    base.sum().backward()
    assert leaf.grad.tolist() == [5, 5, 5, 1]


@contexts
def test_a_handler_changes_a_number_by_name(track):
    op = library.op(fresh("(Tensor x, *, float k=1.0) -> Tensor"), lambda x, k=1.0: x.exp() * k)
    leaf = torch.zeros(1, requires_grad=True)
    with changed(op, k=7.0, track=track):
        out = op(leaf)
    out.sum().backward()
    assert (out.item(), leaf.grad.item()) == (7, 7)


def test_a_formula_is_told_of_the_number_that_ran():
    op = _mul_()

    def save(ctx, inputs, output):
        ctx.n = inputs[1]

    op.register_autograd(lambda ctx, grad: (grad * ctx.n, None), setup_context=save)
    leaf = torch.ones(1, requires_grad=True)
    base = leaf * 1
    with changed(op, 100.0):
        op(base, 2.0)
    base.sum().backward()
    assert (base.item(), leaf.grad.item()) == (100, 100)


def test_a_handler_that_gives_a_tensor_another_place_makes_a_call_of_its_own():
    def body(x, y):
        if y is not None:
            y.add_(1)

    op = library.inplace_op(fresh("(Tensor? x, Tensor(a!)? y) -> ()"), body)

    class Moving(PassThrough):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            return func(None, args[0]) if func is op.op else func(*args, **(kwargs or {}))

    base = torch.ones(1, requires_grad=True) * 1
    with Moving():
        op(base, None)
    assert (base.item(), base._version) == (2, 1)


def test_a_formula_is_of_the_tensors_in_the_places_of_the_user():
    op = library.op(
        fresh("(Tensor x, Tensor? plus, Tensor? times) -> Tensor"),
        lambda x, plus, times: x + plus if times is None else x * times,
    )

    def save(ctx, inputs, output):
        ctx.places = [t is not None for t in inputs]

    op.register_autograd(
        lambda ctx, grad: tuple(grad * 3 if there else None for there in ctx.places),
        setup_context=save,
    )
    x = torch.tensor([2.0], requires_grad=True)
    y = torch.tensor([5.0], requires_grad=True)
    with changed(op, None, y):
        out = op(x, y, None)
    out.sum().backward()
    assert (out.item(), x.grad.item(), y.grad.item()) == (10, 3, 3)
