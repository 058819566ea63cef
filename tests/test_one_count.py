"""What a handler writes to the arguments of its op, and to their aliases, counts as it would above.

The kernel above counts one write to each argument that the op writes, whatever the handler does. So
the handler's own writes count all but one, and where it does none, that of the kernel is left.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from handlers import NoOp, moves
from torch.utils._python_dispatch import TorchDispatchMode

import viewtrack as vt
from viewtrack.ledger import ledger
from viewtrack.one_count import _TAKEN

aten = torch.ops.aten


def op(func, args):
    return func(*args)


def other_op(func, args):
    return args[0].copy_(args[0] + args[1])


def alias(func, args):
    func(args[0].detach(), *args[1:])
    return args[0]


def view(func, args):
    args[0].view(-1)[:1].add_(1)
    return args[0]


def alias_of_an_alias(func, args):
    torch._foreach_add_([args[0].detach().view(-1)], 1)
    return args[0]


def listed(func, args):
    torch._foreach_add_([args[0]], [args[1]])
    return args[0]


def data(func, args):
    args[0].data.add_(1)
    return args[0]


def unrelated(func, args):
    torch.zeros(2).add_(1)
    return args[0]


def failing(func, args):
    for wrong in (args[0], args[0].detach()):
        with pytest.raises((RuntimeError, TypeError)):
            wrong.add_(torch.ones(7))
    return args[0]


#: What a handler may do for `add_`, in that order, and how many writes that is to the argument.
WAYS: dict[str, tuple[list[Any], int]] = {
    "passes on": ([op], 1),
    "twice": ([op, op], 2),
    "three times": ([op, op, op], 3),
    "another op": ([other_op], 1),
    "another op and passes on": ([other_op, op], 2),
    "passes on and another op": ([op, other_op], 2),
    "an alias": ([alias], 1),
    "an alias twice": ([alias, alias], 2),
    "an alias and passes on": ([alias, op], 2),
    "passes on and an alias": ([op, alias], 2),
    "a view": ([view], 1),
    "a view, an alias and passes on": ([view, alias, op], 3),
    "a list of an alias": ([alias_of_an_alias], 1),
    "a list of an alias and passes on": ([alias_of_an_alias, op], 2),
    "a list": ([listed], 1),
    "passes on and a list": ([op, listed], 2),
    "data": ([data], 1),
    "data and passes on": ([data, op], 1),
    "something else": ([unrelated], 1),
    "something else and passes on": ([unrelated, op], 1),
    "nothing": ([], 1),
    "fails": ([failing], 1),
    "fails and passes on": ([failing, op], 1),
    "fails and does an alias": ([failing, alias], 1),
    "fails, passes on and fails, twice": ([failing, op, failing, op, failing], 2),
}


class Doing(TorchDispatchMode):
    """Does some things for `add_`, and passes on all else."""

    def __init__(self, way: str = "passes on") -> None:
        super().__init__()
        self.things = WAYS[way][0]

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is not aten.add_.Tensor:
            return func(*args, **(kwargs or {}))
        for thing in self.things:
            thing(func, args)
        return args[0]


class OtherName(Doing):
    def handle(self, func, types, args=(), kwargs=None):
        return super().__torch_dispatch__(func, types, args, kwargs)

    __torch_dispatch__ = handle


@vt.tracked
class Tracked(Doing):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return super().__torch_dispatch__(func, types, args, kwargs)


each_way = pytest.mark.parametrize("way", WAYS)
each_tracker = pytest.mark.parametrize("how", ["none", "site", "full"])
TRACKERS = {
    "none": lambda: vt.track(record="none"),
    "site": vt.track,
    "full": lambda: vt.track(views="full"),
}


@each_tracker
@each_way
@pytest.mark.parametrize("kind", [Doing, OtherName, Tracked])
def test_it_counts_as_often_as_it_writes(way, kind, how):
    x = torch.zeros(2)
    with TRACKERS[how](), kind(way):
        for _ in range(2):
            assert moves([x], lambda: x.add_(torch.ones(2))) == [WAYS[way][1]]


@each_way
@pytest.mark.parametrize("above", [NoOp, OtherName, Tracked])
@pytest.mark.parametrize("below", [NoOp, OtherName, Tracked])
def test_it_does_among_other_modes(way, above, below):
    if below is Tracked and way.startswith("a list"):
        pytest.skip("see test_known_limits.py")
    x = torch.zeros(2)
    with vt.track(), below(), Doing(way), above():
        assert moves([x], lambda: x.add_(torch.ones(2))) == [WAYS[way][1]]


@pytest.mark.parametrize("outer", ["passes on", "twice", "an alias", "passes on and an alias"])
@pytest.mark.parametrize("inner", ["passes on", "twice", "an alias", "another op and passes on"])
@pytest.mark.parametrize("kind", [Doing, Tracked])
def test_writes_of_one_mode_go_through_another(outer, inner, kind):
    x = torch.zeros(2)
    with vt.track(), kind(inner), Doing(outer):
        assert moves([x], lambda: x.add_(torch.ones(2))) == [WAYS[outer][1] * WAYS[inner][1]]


@each_way
def test_what_another_handler_issues_is_counted_there(way):
    """Nothing above counts then."""
    kept = torch.zeros(2)

    class Issuing(NoOp):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if func is aten.sin.default:
                kept.add_(torch.ones(2))
            return func(*args, **(kwargs or {}))

    things, count = WAYS[way]
    swallowed = not things or things in ([data], [unrelated], [failing])
    with vt.track(), Doing(way), Issuing():
        assert moves([kept], lambda: torch.ones(1).sin()) == [0 if swallowed else count]


class Sorting(TorchDispatchMode):
    """Writes outputs of its op one by one, and some of them again."""

    def __init__(self, *extra: str) -> None:
        super().__init__()
        self.extra = extra
        self.own = torch.zeros(3)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is not aten.sort.values_stable:
            return func(*args, **(kwargs or {}))
        values, indices = kwargs["values"], kwargs["indices"]
        sorted_, order = torch.sort(args[0])
        for what in self.extra:
            if what == "values":
                values.copy_(sorted_)
            elif what == "indices":
                indices.copy_(order)
            elif what == "alias":
                values.detach().copy_(sorted_)
            elif what == "own":
                torch.sort(args[0], stable=True, out=(self.own, indices))
            else:
                func(*args, **kwargs)
        return values, indices


@pytest.mark.parametrize(
    ("extra", "values", "indices", "own"),
    [
        (("op",), 1, 1, 0),
        (("values", "indices"), 1, 1, 0),
        (("values", "op"), 2, 1, 0),
        (("op", "indices"), 1, 2, 0),
        (("alias", "indices"), 1, 1, 0),
        (("alias", "values", "op"), 3, 1, 0),
        (("own", "values"), 1, 1, 1),
        (("own", "op"), 1, 2, 1),
        (("op", "op"), 2, 2, 0),
    ],
)
def test_each_argument_has_one(extra, values, indices, own):
    out = torch.zeros(3), torch.zeros(3, dtype=torch.long)
    x = torch.tensor([2.0, 1.0, 3.0])
    with vt.track(), Sorting(*extra) as mode:
        assert moves([*out, mode.own], lambda: torch.sort(x, stable=True, out=out)) == [
            values,
            indices,
            own,
        ]
    assert out[0].tolist() == [1, 2, 3]


def test_a_handler_that_was_left_by_an_error_has_it_again():
    class Once(Doing):
        raises = True

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = super().__torch_dispatch__(func, types, args, kwargs)
            if self.raises and func is aten.add_.Tensor:
                self.raises = False
                raise ZeroDivisionError
            return out

    x = torch.zeros(2)
    with vt.track(), Once():
        with pytest.raises(ZeroDivisionError):
            x.add_(torch.ones(2))
        assert moves([x], lambda: x.add_(torch.ones(2))) == [1]


def test_a_fallback_after_an_error_of_the_op():
    class Falling(NoOp):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if func is not aten.add_.Tensor:
                return func(*args, **(kwargs or {}))
            try:
                return func(args[0], torch.ones(7))
            except RuntimeError:
                return args[0].copy_(args[0] + args[1])

    x = torch.zeros(2)
    with vt.track(), Falling():
        assert moves([x], lambda: x.add_(torch.ones(2))) == [1]


def test_a_mode_that_calls_itself_again():
    class Again(Doing):
        depth = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if func is aten.add_.Tensor and self.depth < 2:
                self.depth += 1
                with self:
                    func(*args)
                return func(*args)
            return func(*args, **(kwargs or {}))

    x = torch.zeros(2)
    with vt.track(), Again():
        assert moves([x], lambda: x.add_(torch.ones(2))) == [3]


def test_a_helper_and_a_generator_of_the_handler():
    def steps(func, args):
        yield func(*args)
        yield func(*args)

    class Stepping(NoOp):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if func is aten.add_.Tensor:
                return [*steps(func, args)][-1]
            return func(*args, **(kwargs or {}))

    x = torch.zeros(2)
    with vt.track(), Stepping():
        assert moves([x], lambda: x.add_(torch.ones(2))) == [2]


@each_way
def test_gradients_are_refused_or_right_as_on_stock_torch(way):
    """A moved counter may make backward raise: only where the saved tensor was written."""
    x = torch.zeros(2, requires_grad=True)
    with vt.track(), Doing(way):
        saved = x.exp()
        other = saved.detach().clone()
        other.add_(torch.ones(2))
        saved.sum().backward()
    assert x.grad.tolist() == [1, 1]


@each_way
def test_an_inference_tensor_has_no_count(way):
    with torch.inference_mode(), vt.track(), Doing(way):
        assert vt.version(torch.zeros(2).add_(torch.ones(2))) is None


@each_way
def test_the_ledger_has_each_write(way):
    x = torch.zeros(2)
    with vt.track(), Doing(way):
        x.add_(torch.ones(2))
    writes = ledger.writes(x)
    done = [thing for thing in WAYS[way][0] if thing not in (unrelated, failing)]
    assert len(writes) == len(done)
    for write, thing in zip(writes, done, strict=True):
        assert write.site.in_handler is (thing not in (op, other_op, listed)), write


def test_a_write_by_a_custom_op_to_an_alias():
    inc_ = vt.library.op("vt_one_count::inc_(Tensor(a!) x) -> ()", lambda x: None, opaque=True)
    func = torch.ops.vt_one_count.inc_.default

    class Handler(NoOp):
        def __torch_dispatch__(self, op, types, args=(), kwargs=None):
            if op is aten.add_.Tensor:
                func(args[0].detach())
                return args[0]
            return op(args[0].detach()) if op is func else op(*args, **(kwargs or {}))

    x = torch.zeros(2)
    with vt.track():
        assert moves([x], lambda: inc_(x)) == [1]
        with Handler():
            assert moves([x], lambda: inc_(x)) == [1]
            assert moves([x], lambda: x.add_(1)) == [1]


def test_nothing_of_it_stays_among_the_variables():
    seen = []

    class Looking(NoOp):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.append(_TAKEN in locals())
            return func(*args, **(kwargs or {}))

    x = torch.zeros(2)
    with vt.track(), Looking():
        for _ in range(3):
            x.add_(torch.ones(2))
    assert not any(seen)
