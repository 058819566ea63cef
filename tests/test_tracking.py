"""What the tracker does with each kind of op, above autograd and in other modes' handlers.

Above, the judge is stock torch without any mode. Below, a write moves what the same call moves
above autograd without any mode, and a view shares its base's counter.
"""

from __future__ import annotations

import gc
import itertools
import weakref
from contextlib import ExitStack

import pytest
import torch
from handlers import NoOp, On, Wrapper, moves
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint
from view_makers import below_autograd, share_a_counter

import viewtrack as vt

aten = torch.ops.aten

LIB = torch.library.Library("vt_tracking", "DEF")
LIB.define("inc_(Tensor(a!) x) -> ()")
LIB.define("bump(Tensor(a!)[] xs, Tensor(b!)? y, *, Tensor(c!)?[] zs) -> ()")
LIB.define("raw_(Tensor(a!) x) -> Tensor(a!)")
LIB.define("head(Tensor(a) x, int n) -> Tensor(a)")
LIB.define("heads(Tensor(a) x) -> Tensor(a)[]")
LIB.define("secret(Tensor x) -> Tensor")


def define(name, key="CompositeExplicitAutograd"):
    def register(body):
        LIB.impl(name, body, key)
        return body

    return register


@define("inc_")
def inc_(x):
    x.add_(1)


@define("bump")
def bump(xs, y, *, zs):
    for t in (*xs, y, *zs):
        if t is not None:
            t.mul_(2)


@define("raw_", "CPU")
def raw_(x):
    x.detach().numpy()[:] += 1
    return x


@define("head")
def head(x, n):
    return x[:n]


@define("heads")
def heads(x):
    return [x[:1], x[1:]]


@define("secret")
def secret(x):
    return x.view(-1)


ours = torch.ops.vt_tracking

# Writes, by what is special about them. Each is called with three tensors of four elements.
WRITES = {
    "in-place": lambda x, y, z: x.add_(1),
    "in-place, composite": lambda x, y, z: torch.dropout_(x, 0.5, True),
    "in-place through a view": lambda x, y, z: x.view(2, 2)[0].mul_(3),
    "in-place, two arguments of one storage": lambda x, y, z: x[:2].copy_(x[2:]),
    "setitem": lambda x, y, z: x.__setitem__(0, 3.0),
    "out=": lambda x, y, z: torch.add(y, 1, out=x),
    "out=, two outputs": lambda x, y, z: torch.frexp(y, out=(x, torch.zeros(4, dtype=torch.int))),
    "out=, a list without an ADInplaceOrView kernel": lambda x, y, z: aten.split_copy.Tensor_out(
        torch.ones(8), 4, out=[x, y]
    ),
    "foreach": lambda x, y, z: torch._foreach_add_([x, y], 1),
    "foreach, the same tensor twice": lambda x, y, z: torch._foreach_add_([x, x], 1),
    "foreach copy": lambda x, y, z: torch._foreach_copy_([x, y], [z, z]),
    "fused": lambda x, y, z: torch._fused_sgd_(
        [x],
        [y],
        [z],
        weight_decay=0.0,
        momentum=0.9,
        lr=0.1,
        dampening=0.0,
        nesterov=False,
        maximize=False,
        is_first_step=True,
    ),
    "running statistics": lambda x, y, z: torch.batch_norm(
        torch.ones(4, 4), None, None, x, y, True, 0.1, 1e-5, False
    ),
    "resize_": lambda x, y, z: torch.zeros(0).set_(x).resize_(2),
    "a library's op that returns nothing": lambda x, y, z: ours.inc_(x),
    "a library's op, list and optional": lambda x, y, z: ours.bump([x, y], z, zs=[x, None]),
    "a library's op, optionals left out": lambda x, y, z: ours.bump([x], None, zs=[]),
    "a library's raw kernel": lambda x, y, z: ours.raw_(x),
}

write = pytest.mark.parametrize("write", WRITES.values(), ids=WRITES.keys())


def three():
    return [torch.ones(4) for _ in range(3)]


def stock_moves(body):
    tensors = three()
    return moves(tensors, lambda: body(*tensors))


@write
@pytest.mark.parametrize("record", ["none", "site", "stack"])
def test_a_write_moves_what_it_moves_without_a_mode(write, record):
    tensors = three()
    with vt.track(record=record):
        assert moves(tensors, lambda: write(*tensors)) == stock_moves(write)


@write
@pytest.mark.parametrize("record", ["none", "site"])
@pytest.mark.parametrize("depth", [1, 2])
def test_a_write_that_modes_pass_on_moves_as_much(write, record, depth):
    tensors = three()
    with vt.track(record=record), ExitStack() as modes:
        for _ in range(depth):
            modes.enter_context(NoOp())
        assert moves(tensors, lambda: write(*tensors)) == stock_moves(write)


@write
@pytest.mark.parametrize("record", ["none", "site"])
@pytest.mark.parametrize("passed_on", [False, True])
def test_a_write_that_a_handler_issues_moves_as_much(write, record, passed_on):
    tensors = three()

    def issue():
        if not passed_on:
            return write(*tensors)
        with NoOp():
            return write(*tensors)

    with vt.track(record=record):
        assert moves(tensors, lambda: below_autograd(issue)) == stock_moves(write)


def test_the_writes_can_be_missed():
    """The tests above can fail: a mode that only passes ops on loses some of the moves."""
    lost = []
    for name, write in WRITES.items():
        tensors = three()
        with NoOp():
            seen = moves(tensors, lambda write=write, t=tensors: write(*t))
        if seen != stock_moves(write):
            lost.append(name)
    assert "foreach" in lost
    assert "a library's op that returns nothing" in lost
    x = torch.ones(4)
    assert moves([x], lambda: below_autograd(lambda: x.add_(1))) == [0]


# Handlers that do not pass on what they were given, and write all the same.


class AddByCopy(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is aten.add_.Tensor:
            return args[0].copy_(args[0] + args[1])
        return func(*args, **(kwargs or {}))


class AddByForeach(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is aten.add_.Tensor:
            torch._foreach_add_([args[0]], [args[1]])
            return args[0]
        return func(*args, **(kwargs or {}))


class ForeachByAdd(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is aten._foreach_add_.Scalar:
            for t in args[0]:
                t.add_(args[1])
            return None
        return func(*args, **(kwargs or {}))


class LogsElsewhere(TorchDispatchMode):
    """Writes another tensor than the one it was given."""

    def __init__(self):
        super().__init__()
        self.log = torch.zeros(())

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        self.log.add_(1)
        return out


@pytest.mark.parametrize("mode", [AddByCopy, AddByForeach])
def test_a_write_done_by_another_op_is_one_write(mode):
    x = torch.zeros(2)
    with vt.track(), mode():
        assert moves([x], lambda: x.add_(torch.ones(2))) == [1]
    assert x.tolist() == [1, 1]


def test_a_foreach_op_done_tensor_by_tensor_is_one_write_each():
    x, y = torch.zeros(2), torch.zeros(2)
    with vt.track(), ForeachByAdd():
        assert moves([x, y], lambda: torch._foreach_add_([x, y], 1)) == [1, 1]
    assert x.tolist() == y.tolist() == [1, 1]


@vt.tracked
class Tracked(NoOp):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


CONTEXTS = {
    "none": lambda: vt.track(record="none"),
    "site": vt.track,
    "full": lambda: vt.track(views="full"),
    "tracked": Tracked,
    "protected": lambda: vt.protect(torch.zeros(2)),
}


@pytest.mark.parametrize("below", [ExitStack, NoOp])
@pytest.mark.parametrize("context", CONTEXTS.values(), ids=CONTEXTS)
@pytest.mark.parametrize("number", [2, 2.5])
def test_a_number_may_be_written_of_which_cpp_makes_a_tensor(number, context, below):
    with NoOp():
        expected = aten.mul_.Tensor(number, torch.tensor(3))
    with context(), below():
        assert aten.mul_.Tensor(number, torch.tensor(3)) == expected


def test_a_write_to_another_tensor_is_counted_beside():
    x = torch.zeros(2)
    mode = LogsElsewhere()
    with vt.track(), mode:
        assert moves([x, mode.log], lambda: x.add_(1)) == [1, 1]
        assert moves([x, mode.log], lambda: x.sin()) == [0, 1]


def test_a_saved_tensor_that_a_handler_wrote_is_refused_by_backward():
    x = torch.ones(3, requires_grad=True)
    with vt.track(), On(aten.exp.default, lambda out: out.view(3).zero_()):
        y = x.exp()
    y.sum().backward()  # written before it was saved: exp saves its result after the call
    assert x.grad.tolist() == [0, 0, 0]

    kept = On(aten.exp.default, lambda out: out.view(3))
    with vt.track(), kept:
        y = x.exp()
    with vt.track(), On(aten.neg.default, lambda out: kept.kept[0].zero_()):
        torch.zeros(1).neg()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


# Views.

VIEWS = {
    "view": lambda x: x.view(4),
    "select": lambda x: x[0],
    "a chain": lambda x: x.t()[1:].unsqueeze(0),
    "split": lambda x: x.split(1),
    "unbind": lambda x: x.unbind(),
    "chunk": lambda x: x.chunk(2),
    "detach": lambda x: x.detach(),
    "view(dtype)": lambda x: x.view(torch.int32),
    "as_strided": lambda x: x.as_strided((2,), (1,), 1),
    "real": lambda x: torch.view_as_complex(x).real,
    "conj": lambda x: torch.view_as_complex(x).conj(),
    "composite": lambda x: x.flatten(),
    "composite, the argument itself": lambda x: x.contiguous(),
    "_unsafe_view": lambda x: aten._unsafe_view(x, [4]),
    "a library's view": lambda x: ours.head(x, 1),
    "a library's undeclared view": lambda x: ours.secret(x),
}

view = pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS.keys())


def one_of(out):
    return out[-1] if isinstance(out, (list, tuple)) else out


@view
@pytest.mark.parametrize("record", ["none", "site"])
def test_a_view_that_a_handler_makes_shares_its_bases_counter(view, record):
    base = torch.zeros(2, 2)
    base.add_(1)
    with vt.track(record=record):
        made = one_of(below_autograd(lambda: view(base)))
    assert made is base or share_a_counter(made, base)
    assert base._version == made._version
    assert made.untyped_storage()._cdata == base.untyped_storage()._cdata


@view
def test_a_view_of_an_op_result_shares_its_counter_when_it_is_kept(view):
    mode = On(aten.exp.default, lambda out: one_of(view(out)))
    with vt.track(), mode:
        y = torch.zeros(2, 2).exp()
    (kept,) = mode.kept
    assert kept is y or share_a_counter(kept, y)


@view
def test_stock_leaves_such_views_apart(view):
    """The tests above can fail."""
    base = torch.zeros(2, 2)
    made = one_of(below_autograd(lambda: view(base)))
    assert made is base or not share_a_counter(made, base)


def test_unsafe_split_keeps_counters_apart_and_is_known_by_storage():
    base = torch.zeros(4)
    with vt.track() as tracker:
        made = below_autograd(lambda: torch.unsafe_split(base, 2))
        assert moves([base, *made], lambda: made[0].add_(1)) == [0, 1, 0]
        assert vt.storage_version(base) == 1
    assert "aten.unsafe_split.Tensor" in tracker.undeclared_aliases


def test_undeclared_aliases_are_found_once_per_op_and_with_their_line():
    x = torch.zeros(2, 2)
    with vt.track() as tracker:
        for _ in range(2):
            ours.secret(x)
        aten._unsafe_view(x, [4])
        ours.head(x, 1)
    assert set(tracker.undeclared_aliases) == {
        "vt_tracking.secret.default",
        "aten._unsafe_view.default",
    }
    assert all(site.filename == __file__ for site in tracker.undeclared_aliases.values())


def test_counters_of_undeclared_aliases_are_joined_whatever_made_them():
    lib = torch.library.Library("vt_tracking_raw", "DEF")
    lib.define("raw(Tensor x) -> Tensor")
    lib.impl("raw", lambda x: torch.from_numpy(x.detach().numpy()), "CPU")
    lib.define("apart(Tensor x) -> Tensor")
    lib.impl("apart", lambda x: torch.zeros(0).set_(x), "CPU")
    x = torch.zeros(2, 2)
    with vt.track():
        assert share_a_counter(below_autograd(lambda: torch.ops.vt_tracking_raw.apart(x)), x)
        raw = torch.ops.vt_tracking_raw.raw(x)  # another storage over the same bytes
        assert not share_a_counter(raw, x)


def test_an_unsafe_view_shares_with_a_mode_below_the_tracker_too():
    x = torch.zeros(2, 2)
    with NoOp(), vt.track() as tracker:
        assert share_a_counter(aten._unsafe_view(x, [4]), x)
    assert "aten._unsafe_view.default" in tracker.undeclared_aliases


def test_a_library_view_that_returns_a_list_shares_every_counter():
    x = torch.zeros(3)
    with vt.track():
        first, rest = below_autograd(lambda: ours.heads(x))
        assert share_a_counter(first, x)
        assert share_a_counter(rest, x)
        one, two = ours.heads(x)
        assert share_a_counter(one, x)
        assert share_a_counter(two, x)


def test_views_above_autograd_are_differentiable_views_of_the_same_base():
    base = torch.ones(4, requires_grad=True).clone()
    with vt.track(), NoOp():
        v = base.view(2, 2)[0]
    assert v._is_view()
    assert v._base is base
    v.mul_(2)
    base.sum().backward()
    assert v.grad_fn.name() == "AsStridedBackward0"


def test_what_a_handler_returns_is_acceptable_to_the_kernel_above():
    class Answers(TorchDispatchMode):
        """Answers a view op by other view ops."""

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if func is aten.view.default:
                return args[0].flatten().unflatten(0, (2, 2)).view(args[1])
            return func(*args, **(kwargs or {}))

    leaf = torch.ones(4, requires_grad=True)
    base = leaf.clone()
    with vt.track(), Answers():
        v = base.view(2, 2)
    assert v._base is base
    v.mul_(3)
    base.sum().backward()
    assert leaf.grad.tolist() == [3, 3, 3, 3]


@pytest.mark.parametrize("views_of", [lambda t: t[1:], lambda t: t.view(2, 2)])
def test_nothing_that_a_handler_kept_is_held_by_the_tracker(views_of):
    mode = On(aten.exp.default, views_of)
    with vt.track(), mode:
        y = torch.zeros(4).exp()
        refs = [weakref.ref(y), weakref.ref(mode.kept[0])]
        y.add_(1)
        mode.kept[0].add_(1)
        del y
        mode.kept.clear()
        gc.collect()
        assert [ref() for ref in refs] == [None, None]


# Multi-output views and the mark that forbids in-place ops on what comes of them.


def refused(t):
    try:
        t.mul_(2)
    except RuntimeError:
        return True
    return False


@pytest.mark.parametrize("modes", [(), (NoOp,), (NoOp, NoOp)], ids=len)
def test_creation_meta_goes_down_a_chain(modes):
    with vt.track(), ExitStack() as entered:
        for mode in modes:
            entered.enter_context(mode())
        part = torch.rand(4, 2, requires_grad=True).sqrt().split(2)[1]
        below_part = part.diagonal()
        with torch.no_grad():
            leaf = torch.rand(4, requires_grad=True)
            quiet = leaf.view(2, 2).view(4)
    meta = torch._C._autograd._get_creation_meta
    assert meta(below_part) == vt.CreationMeta.MULTI_OUTPUT_NODE
    assert meta(quiet) == vt.CreationMeta.NO_GRAD_MODE
    assert refused(below_part)
    assert refused(quiet)


def test_creation_meta_goes_through_a_link_that_was_marked_below():
    part = torch.rand(4, 2, requires_grad=True).sqrt().split(2)[1]
    with vt.track():
        link = below_autograd(lambda: part.diagonal())
    vt.mark_as_view(link, part)
    assert refused(link)
    assert refused(link[:1])


# A cache of one's own, as selective checkpointing was first written.


class Cache(TorchDispatchMode):
    def __init__(self, store):
        super().__init__()
        self.store = store

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if func is aten.mm.default:
            alias = out.view_as(out)
            self.store.append((alias, alias._version))
        return out


class Cached(TorchDispatchMode):
    def __init__(self, store):
        super().__init__()
        self.store = store

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is aten.mm.default:
            alias, was = self.store.pop(0)
            if alias._version != was:
                raise RuntimeError("the cached tensor was written")
            return alias
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("write", [True, False], ids=["written", "clean"])
def test_a_home_made_cache_sees_that_its_alias_was_written(write):
    def block(x):
        h = x @ x
        if write:
            h.mul_(3)
        return h.sin().sum()

    def grad(**how):
        torch.manual_seed(0)
        x = torch.randn(3, 3, requires_grad=True)
        (checkpoint(block, x, use_reentrant=False, **how) if how else block(x)).backward()
        return x.grad

    store = []
    with vt.track():
        if write:
            with pytest.raises(RuntimeError, match="the cached tensor was written"):
                grad(context_fn=lambda: (Cache(store), Cached(store)))
        else:
            assert torch.equal(grad(context_fn=lambda: (Cache(store), Cached(store))), grad())


# Wrapper subclasses.


def test_a_foreach_op_on_wrappers_moves_their_counters_once():
    p = Wrapper(torch.tensor([3.0]), requires_grad=True)
    y = p * p
    with vt.track(), torch.no_grad():
        assert moves([p], lambda: torch._foreach_add_([p], [Wrapper(torch.ones(1))])) == [1]
        q = Wrapper(torch.tensor([3.0]))
        assert moves([q], lambda: q.add_(1)) == [1]
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_what_a_wrappers_handler_does_is_tracked():
    kept = []

    class Keeps(Wrapper):
        @classmethod
        def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
            if func is aten.exp.default:
                inner = args[0].inner.exp()
                kept.append((inner, inner.view(2)))
                return Wrapper(inner)
            return super().__torch_dispatch__(func, types, args, kwargs)

    with vt.track():
        Keeps(torch.zeros(2)).exp()
    ((inner, alias),) = kept
    assert share_a_counter(inner, alias)


# Whatever the ops do, errors come through and leave things as they were.


@pytest.mark.parametrize("below", [False, True])
@pytest.mark.parametrize(
    "wrong",
    [
        lambda x: x.view(3),
        lambda x: x.add_(torch.ones(5)),
        lambda x: x.split(-1),
        lambda x: torch._foreach_add_([x], [torch.ones(5)]),
        lambda x: ours.head(x, "one"),
        lambda x: torch.add(x, torch.ones(5), out=x),
    ],
    ids=["view", "in-place", "several views", "foreach", "library", "out="],
)
def test_an_error_of_an_op_leaves_dispatch_as_it_was(wrong, below):
    x = torch.zeros(4)
    excluded = str(torch._C._dispatch_tls_local_exclude_set())
    try:
        wrong(torch.zeros(4))
    except Exception as error:
        stock = type(error), str(error)
    with vt.track():
        with pytest.raises(stock[0]) as caught:
            below_autograd(lambda: wrong(x)) if below else wrong(x)
        assert str(caught.value) == stock[1]
        assert str(torch._C._dispatch_tls_local_exclude_set()) == excluded
        assert moves([x], lambda: x.view(2, 2).add_(1)) == [1]
    assert torch._C._len_torch_dispatch_stack() == 0


def test_a_functional_op_leaves_every_counter_alone():
    x = torch.ones(3)
    with vt.track(), NoOp():
        for op in (torch.add, torch.mul, torch.maximum):
            assert moves([x], lambda op=op: op(x, x)) == [0]


def test_inference_tensors_pass_through():
    with torch.inference_mode():
        x = torch.zeros(4)
        with vt.track():
            v = below_autograd(lambda: x.view(2, 2))
            x.add_(1)
            torch._foreach_add_([x], 1)
    assert v.is_inference()
    assert v.tolist() == [[2, 2], [2, 2]]


def test_every_order_of_modes_counts_once():
    modes = (NoOp, LogsElsewhere, AddByCopy)
    for order in itertools.permutations(modes):
        x = torch.zeros(2)
        with vt.track(), order[0](), order[1](), order[2]():
            assert moves([x], lambda x=x: x.add_(torch.ones(2))) == [1]
