"""`correct_aliasing` counts what no kernel counts: foreach and custom ops, each write once."""

import contextlib

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only
from wrappers import make_wrapper

import viewtrack as vt
from viewtrack import TrackedTensor

aten = torch.ops.aten


class Correcting(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return vt.correct_aliasing(func, args, kwargs, func(*args, **(kwargs or {})))


class Other(Correcting):
    """Calls it from a helper."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return self.helped(func, args, kwargs)

    def helped(self, func, args, kwargs):
        return vt.correct_aliasing(func, args, kwargs, func(*args, **(kwargs or {})))


class NoOp(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


@vt.tracked
class TrackedMode(Correcting):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return vt.correct_aliasing(func, args, kwargs, func(*args, **(kwargs or {})))


@contextlib.contextmanager
def stacked(*contexts):
    with contextlib.ExitStack() as stack:
        for context in contexts:
            stack.enter_context(context())
        yield


STACKS = {
    "one": (Correcting,),
    "two of a kind": (Correcting, Correcting),
    "two": (Correcting, Other),
    "three": (Other, Correcting, Other),
    "none above": (Correcting, NoOp),
    "none below": (NoOp, Correcting),
    "none between": (Correcting, NoOp, Other),
    "track below": (vt.track, Correcting),
    "track below two": (vt.track, Correcting, Other),
    "tracked": (TrackedMode,),
}


@pytest.fixture
def twice_():
    with torch.library._scoped_library("viewtrackonce", "FRAGMENT") as lib:
        lib.define("twice_(Tensor(a!) x) -> ()")
        lib.impl("twice_", lambda x: (x.mul_(2), None)[1], "CPU")
        yield torch.ops.viewtrackonce.twice_.default


@pytest.mark.parametrize("name", STACKS)
def test_a_write_to_plain_tensors_is_counted_once(name, twice_):
    def run(y, z, one):
        counts = []
        v = z[1:]
        for _ in range(2):
            torch._foreach_add_([y, v], 1.0)
            counts.append((y._version, z._version))
            twice_(y)
            torch._foreach_mul_([y, y], 2.0)
            torch.unbind_copy(one, out=[y])
            counts.append((y._version, z._version))
        return counts, y.tolist(), z.tolist()

    given = [torch.ones(4), torch.ones(4), torch.ones(1, 4)]
    expected = run(*(t.clone() for t in given))
    with stacked(*STACKS[name]):
        assert run(*given) == expected


@pytest.mark.parametrize("name", STACKS)
@pytest.mark.parametrize("flattens", [False, True])
def test_a_write_to_a_wrapper_is_counted_once(flattens, name, twice_):
    x, tracked = make_wrapper(flattens=flattens)(torch.ones(4)), TrackedTensor(torch.ones(4))
    with stacked(*STACKS[name]):
        for count in range(1, 3):
            torch._foreach_add_([x], 1.0)
            torch._foreach_add_([tracked], 1.0)
            assert (x._version, tracked._version) == (2 * count - 1, 2 * count - 1)
            twice_(x)
            twice_(tracked)
            assert x._version == x.e._version == 2 * count
            assert tracked._version == tracked.unwrap()._version == 2 * count


def test_plain_tensors_among_wrappers_are_counted_once():
    for wrap in (make_wrapper(), make_wrapper(flattens=True), TrackedTensor):
        for context in (contextlib.nullcontext, Correcting, vt.track):
            x, plain, read = wrap(torch.ones(2)), torch.ones(2), wrap(torch.ones(2))
            with context():
                torch._foreach_add_([x, plain], [read, read])
                torch._foreach_add_([plain], [read])
            assert (x._version, plain._version, read._version) == (1, 2, 0)


def test_what_autograd_saved_is_noticed(twice_):
    for write in (lambda y: torch._foreach_add_([y], 1.0), twice_):
        with Correcting():
            x = torch.ones(3, requires_grad=True)
            y = x.exp()
            with torch.no_grad():
                write(y)
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                y.sum().backward()


def test_a_write_that_a_kernel_above_counts_is_not_counted_again():
    class ByForeach(Correcting):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if func is aten.add_.Tensor:
                torch._foreach_add_([args[0]], args[1])
                return args[0]
            return super().__torch_dispatch__(func, types, args, kwargs)

    y = torch.ones(2)
    with Correcting(), ByForeach():
        y.add_(1)
    assert y._version == 1


@pytest.mark.parametrize("error", [False, True])
def test_a_handler_that_does_not_get_to_its_end_leaves_nothing_behind(error):
    class Raising(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            func(*args, **(kwargs or {}))
            if error and func is aten._foreach_add_.Scalar:
                raise ZeroDivisionError

    y = torch.ones(2)
    for count in range(1, 4):
        with Correcting(), contextlib.suppress(ZeroDivisionError), Raising():
            torch._foreach_add_([y], 1.0)
        assert y._version == 2 * count - 1
        with Correcting(), Other():
            torch._foreach_add_([y], 1.0)
        assert y._version == 2 * count


@pytest.mark.parametrize("flattens", [False, True])
def test_a_handler_may_return_what_a_foreach_op_was_given(flattens):
    def wrap(cls, func, args, inner):
        return (
            args[0]
            if func.__name__.startswith("_foreach")
            else tree_map_only(torch.Tensor, cls, inner)
        )

    x = make_wrapper(flattens=flattens, wrap=wrap)(torch.ones(2))
    assert torch._foreach_add_([x], 1.0) in (None, [x])
    torch._foreach_mul_([x], [x])
    assert x._version == 2
    assert x.e.tolist() == [4, 4]
