"""``track(views="full")``: what a handler keeps is a real view once its op has returned."""

from __future__ import annotations

import copy
import gc
import pickle
import threading
import time
import weakref

import pytest
import torch
from handlers import On, Wrapper
from torch.utils._python_dispatch import TorchDispatchMode

import viewtrack as vt
from viewtrack import CreationMeta, full
from viewtrack._torch import creation_meta

EXP = torch.ops.aten.exp.default
MUL = torch.ops.aten.mul.Tensor

VIEWS = [
    ("slice", lambda t: t[1:]),
    ("select", lambda t: t[0]),
    ("view", lambda t: t.view(-1)),
    ("transpose", lambda t: t.t()),
    ("unsqueeze", lambda t: t.unsqueeze(0)),
    ("diagonal", lambda t: t.diagonal()),
    ("unfold", lambda t: t.unfold(0, 2, 1)),
    ("as_strided", lambda t: t.as_strided((2, 2), (2, 1), 1)),
    ("alias", lambda t: torch.ops.aten.alias(t)),
    ("chain", lambda t: t[1:].t()[0:2]),
    ("reshape", lambda t: torch.ops.aten.reshape(t, [-1])),
    ("narrow", lambda t: torch.ops.aten.narrow(t, 0, 0, 2)),
]


@pytest.fixture(params=[False, True], ids=["leaf_free", "requires_grad"])
def x(request):
    return torch.arange(9.0).view(3, 3).add(1).requires_grad_(request.param)


@pytest.mark.parametrize(("name", "view"), VIEWS, ids=[name for name, _ in VIEWS])
def test_kept_view_is_the_view_that_is_made_above(x, name, view):
    with vt.track(views="full"), On(MUL, view) as mode:
        y = x * 2
        kept = mode.kept[0]
        assert kept._is_view()
        assert kept._base is y
    native = view(y)
    assert type(kept) is torch.Tensor
    assert kept.requires_grad == native.requires_grad
    assert creation_meta(kept) is creation_meta(native)
    if name not in ("reshape", "narrow"):  # composite ops are marked by as_strided
        assert type(kept.grad_fn) is type(native.grad_fn)
    assert torch.equal(kept, native)


@pytest.mark.parametrize(("name", "view"), VIEWS, ids=[name for name, _ in VIEWS])
def test_gradients_after_writes_on_either_side(name, view):
    def run(keep):
        x = torch.arange(9.0).view(3, 3).requires_grad_()
        w = torch.full((3, 3), 5.0, requires_grad=True)
        y, kept = keep(x)
        kept.mul_(3)
        y.mul_(w)
        (kept.sin().sum() + y.sum()).backward()
        return y.detach(), x.grad, w.grad

    def keep(x):
        with vt.track(views="full"), On(MUL, view) as mode:
            return x * 2, mode.kept[0]

    def native(x):
        y = x * 2
        return y, view(y)

    if name == "unfold":
        pytest.skip("an in-place op on a view that overlaps itself is refused")
    for got, want in zip(run(keep), run(native), strict=True):
        torch.testing.assert_close(got, want)


def test_in_place_op_may_come_first(x):
    """No op of ours runs between the kept view's making and autograd's look at it."""
    with vt.track(views="full"), On(MUL, lambda t: t[1:]) as mode:
        y = x * 2
        mode.kept[0].add_(1)
        assert y._version == 1
        assert y.requires_grad == x.requires_grad
        if x.requires_grad:
            assert type(y.grad_fn).__name__ == "CopySlices"


def test_inside_the_handler_it_has_no_metadata(x):
    seen = []
    with vt.track(views="full"), On(MUL, lambda t: seen.append((t[1:]._is_view(), type(t[1:])))):
        x * 2
    assert seen == [(False, torch.Tensor)]


def test_pieces_of_a_split(x):
    with vt.track(views="full"), On(MUL, lambda t: t.split(2)[1]) as mode:
        y = x * 2
    kept = mode.kept[0]
    assert kept._base is y
    assert creation_meta(kept) is CreationMeta.MULTI_OUTPUT_NODE
    if x.requires_grad:
        assert kept.grad_fn.name() == "SplitBackward0"
        with pytest.raises(RuntimeError, match="multiple views"):
            kept.add_(1)


def test_made_under_no_grad(x):
    with vt.track(views="full"), On(torch.ops.aten.add.Tensor, lambda t: t[1:]) as mode:
        with torch.no_grad():
            x + 1
        kept = mode.kept[0]
        assert creation_meta(kept) is CreationMeta.NO_GRAD_MODE


def test_made_in_inference_mode():
    with vt.track(views="full"), On(MUL, lambda t: t[1:]) as mode, torch.inference_mode():
        torch.ones(3) * 2
    assert mode.kept[0].is_inference()
    assert not mode.kept[0]._is_view()


def test_detach_stays_a_view_that_is_not_differentiable(x):
    with vt.track(views="full"), On(MUL, lambda t: t.detach()) as mode:
        y = x * 2
    y.detach().mul_(1)
    assert not mode.kept[0]._is_view()
    assert mode.kept[0]._version == y._version == 1


def test_base_is_the_root_where_the_op_is_a_view_itself(x):
    with vt.track(views="full"), On(torch.ops.aten.view.default, lambda t: t[1:]) as mode:
        y = (x * 1).view(9)
    kept = mode.kept[0]
    assert kept._base is y._base
    assert kept._base is not y


def test_returned_view_is_marked_by_the_kernel_above_alone(x):
    with vt.track(views="full"), On(torch.ops.aten.view.default, lambda t: t) as mode:
        y = x.view(9)
    assert y is mode.kept[0]
    assert y._base is x
    if x.requires_grad:
        assert y.grad_fn.name() == "ViewBackward0"


class Cache(TorchDispatchMode):
    """Keeps a view of the first exp's result, and answers `op` with it."""

    def __init__(self, op, view):
        super().__init__()
        self.op = op
        self.view = view
        self.kept = None

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is self.op and self.kept is not None:
            return self.kept
        out = func(*args, **(kwargs or {}))
        if func is EXP:
            self.kept = self.view(out)
        return out


@pytest.mark.parametrize("asked", [False, True])
@pytest.mark.parametrize(
    ("op", "call"),
    [
        (torch.ops.aten.slice.Tensor, lambda y: y[1:]),
        (torch.ops.aten.alias.default, torch.ops.aten.alias),
        (torch.ops.aten.neg.default, torch.neg),
    ],
    ids=["slice", "alias", "neg"],
)
def test_cache_may_hand_out_what_it_kept(x, op, call, asked):
    with vt.track(views="full"), Cache(op, lambda t: t[1:]) as mode:
        y = x.exp()
        if asked:
            assert mode.kept._base is y
        z = call(y)
        assert z._is_view() == (call is not torch.neg)
        assert torch.equal(z, y[1:])
        before = y._version
        with torch.no_grad():
            mode.kept.add_(1)
        assert y._version == before + 1


def test_cache_may_hand_out_what_was_returned_before(x):
    """Stock torch refuses the second result: its ADInplaceOrView kernel has marked it already."""

    class Memo(TorchDispatchMode):
        made = None

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if func is not torch.ops.aten.view.default:
                return func(*args, **(kwargs or {}))
            if self.made is None:
                self.made = func(*args, **(kwargs or {}))
            return self.made

    with vt.track(views="full"), Memo():
        first, second = x.view(9), x.view(9)
    assert first._base is second._base is x
    assert first is not second


def test_wrapper_keeps_real_views():
    w = Wrapper(torch.zeros(4))
    with vt.track(views="full"):
        part = w[1:]
    assert part.inner._base is w.inner
    part.inner.add_(1)
    assert w.inner._version == 1
    assert w.inner.tolist() == [0, 1, 1, 1]


def test_view_op_on_a_wrapper_in_a_handler():
    w = Wrapper(torch.zeros(4))
    with vt.track(views="full"), On(MUL, lambda t: t[1:]) as mode:
        y = w * 2
    assert mode.kept[0]._base is y


@pytest.mark.parametrize("kept_longer", ["base", "view"])
def test_nothing_is_held_but_what_a_view_holds(kept_longer):
    gc.disable()
    try:
        with vt.track(views="full"), On(MUL, lambda t: t[1:]) as mode:
            y = torch.ones(4) * 2
            base, view = weakref.ref(y.untyped_storage()), weakref.ref(mode.kept[0])
            if kept_longer == "base":
                mode.kept.clear()
                assert view() is None
                del y
            else:
                del y
                assert base() is not None
                mode.kept.clear()
            assert base() is None
    finally:
        gc.enable()


def test_cache_that_the_output_does_not_own_makes_no_cycle(x):
    gc.disable()
    try:
        with vt.track(views="full"):
            with On(MUL, lambda t: t[1:]) as mode:
                y = (x * 2) * 3
            storages = [weakref.ref(kept.untyped_storage()) for kept in mode.kept]
            assert all(kept._is_view() for kept in mode.kept)
            del mode, y
            assert [ref() for ref in storages] == [None, None]
    finally:
        gc.enable()


def test_handler_that_raises_leaves_nothing_behind(x):
    class Fails(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            self.kept = args[0][1:]
            raise KeyError("planted")

    with vt.track(views="full"):
        with pytest.raises(KeyError, match="planted"), Fails() as mode:
            x * 2
        assert mode.kept._base is x
        with On(MUL, lambda t: t[1:]) as after:
            y = x * 2
        assert after.kept[0]._base is y


def test_all_is_as_it_was_after_the_last_tracker():
    before = TorchDispatchMode.__enter__, TorchDispatchMode.__exit__
    with vt.track(views="full"), vt.track(views="full"), On(MUL, lambda t: t[1:]) as mode:
        torch.ones(3) * 2
        assert TorchDispatchMode.__enter__ is not before[0]
    assert (TorchDispatchMode.__enter__, TorchDispatchMode.__exit__) == before
    assert "__torch_dispatch__" not in vars(mode)
    with vt.track(), On(MUL, lambda t: t[1:]) as mode:
        torch.ones(3) * 2
    assert not mode.kept[0]._is_view()


def test_inner_tracker_may_ask_for_it():
    with vt.track():
        with On(MUL, lambda t: t[1:]) as mode:
            torch.ones(3) * 2
        with vt.track(views="full"), On(MUL, lambda t: t[1:]) as full:
            torch.ones(3) * 2
        with On(MUL, lambda t: t[1:]) as after:
            torch.ones(3) * 2
    assert [m.kept[0]._is_view() for m in (mode, full, after)] == [False, True, False]


def test_only_in_the_thread_of_the_tracker():
    with vt.track(views="full"):

        def work():
            with On(MUL, lambda t: t[1:]) as mode:
                torch.ones(3) * 2
            found.append(mode.kept[0]._is_view())

        found: list[bool] = []
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    assert found == [False]


def test_kept_view_may_be_asked_in_another_thread(x):
    with vt.track(views="full"), On(torch.ops.aten.add.Tensor, lambda t: t[1:]) as mode:
        y = x + 1
        found = []
        thread = threading.Thread(target=lambda: found.append(mode.kept[0]._base))
        thread.start()
        thread.join()
    assert found[0] is y


def test_thread_that_asks_while_another_marks_waits_for_it(x, monkeypatch):
    found, asking = [], threading.Event()

    def ask():
        asking.set()
        found.append(mode.kept[0]._base)

    def slow(*args, **kwargs):
        if not asking.is_set():
            thread.start()
            asking.wait(60)
            time.sleep(0.2)  # enough for who does not wait
        mark(*args, **kwargs)

    mark, thread = full.mark, threading.Thread(target=ask)
    monkeypatch.setattr(full, "mark", slow)
    with vt.track(views="full"), On(MUL, lambda t: t[1:]) as mode:
        y = x * 2
        assert mode.kept[0]._base is y
    thread.join(60)
    assert found[0] is y


@pytest.mark.parametrize("dup", [copy.deepcopy, lambda t: pickle.loads(pickle.dumps(t))])
def test_copies_are_plain_tensors(dup):
    with vt.track(views="full"), On(MUL, lambda t: t[1:]) as mode:
        torch.ones(3) * 2
        twin = dup(mode.kept[0])
    assert type(twin) is torch.Tensor
    assert twin.tolist() == [2, 2]


def test_mode_entered_twice_and_left():
    mode = On(MUL, lambda t: t[1:])
    with vt.track(views="full"):
        with mode, mode:
            y = torch.ones(3) * 2
        z = torch.ones(3) * 2
        assert len(mode.kept) == 2
        assert all(kept._base is y for kept in mode.kept)
        assert z._version == 0
    assert "__torch_dispatch__" not in vars(mode)


def test_views_of_what_was_kept_before(x):
    mode = Cache(None, lambda t: t[1:])

    class Again(TorchDispatchMode):
        kept = None

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if func is MUL:
                self.kept = mode.kept[1:]
            return func(*args, **(kwargs or {}))

    with vt.track(views="full"), mode, Again() as again:
        y = x.exp()
        x * 2
    assert again.kept._base is y


def test_storage_that_was_exchanged_meanwhile_is_no_base():
    other = torch.zeros(3)
    with vt.track(views="full"), On(MUL, lambda t: t[1:]) as mode:
        y = torch.ones(3) * 2
        y.data = other
        assert not mode.kept[0]._is_view()


def test_refuses_other_words():
    with pytest.raises(ValueError, match="'version' or 'full'"):
        vt.track(views="none")


def test_handler_that_torch_refuses_is_refused():
    class Mode(TorchDispatchMode):
        @classmethod
        def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
            return func(*args, **(kwargs or {}))

    with vt.track(views="full"), Mode(), pytest.raises(RuntimeError, match="classmethod"):
        torch.ones(2) + 1
