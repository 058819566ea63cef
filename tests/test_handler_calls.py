import gc
import weakref

import pytest
import torch
from caches import aten
from torch.utils._python_dispatch import TorchDispatchMode

from viewtrack.handler_calls import HandlerCalls
from viewtrack.observing import ObservingTracker


class Pass(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


class Double(TorchDispatchMode):
    """Answers `neg` by another op, and `sin` with a number."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is aten.neg.default:
            return args[0] * 2
        if func is aten.sin.default:
            return args[0]
        return func(*args, **(kwargs or {}))


class Watched:
    """Runs a function with brackets on; lists calls that returned, and ops with their issuers."""

    def __init__(self, run):
        self.returned, self.raised, self.issued = [], [], []
        self.calls = HandlerCalls(self._returned, self._raised)
        with ObservingTracker("site", self._observe), self.calls.watch():
            run()

    def _returned(self, call, out):
        self.returned.append((type(call.mode).__name__, str(call.func), call.has_run))

    def _raised(self, call, error):
        self.raised.append((type(call.mode).__name__, str(call.func), type(error).__name__))

    def _observe(self, func, plan, args, kwargs, out):
        issuer = self.calls.issuer(func)
        self.issued.append((plan.name, issuer and type(issuer.mode).__name__))


X = torch.ones(2)


def test_an_op_that_is_passed_on_is_issued_by_no_handler():
    def run():
        with Pass(), Pass():
            X.neg()

    seen = Watched(run)
    assert seen.issued == [("aten.neg.default", None)]
    assert seen.returned == [("Pass", "aten.neg.default", True)] * 2


@pytest.mark.parametrize("above", [0, 1])
@pytest.mark.parametrize("below", [0, 1])
def test_an_op_of_a_handler_is_issued_by_it(above, below):
    def run():
        modes = [Pass()] * below + [Double()] + [Pass() for _ in range(above)]
        for mode in modes:
            mode.__enter__()
        try:
            X.neg()
        finally:
            for mode in reversed(modes):
                mode.__exit__(None, None, None)

    seen = Watched(run)
    assert seen.issued == [("aten.mul.Tensor", "Double")]
    # That `neg` was not run is the doing of `Double`, and not of the mode above it.
    assert [has_run for mode, func, has_run in seen.returned if func == "aten.neg.default"] == [
        False,
        *[True] * above,
    ]


def test_an_answer_without_any_op():
    def run():
        with Double():
            X.sin()

    seen = Watched(run)
    assert (seen.issued, seen.returned) == ([], [("Double", "aten.sin.default", False)])


def test_a_handler_that_raises():
    class Refuse(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            raise ZeroDivisionError

    def run():
        with Pass(), Refuse(), pytest.raises(ZeroDivisionError):
            X.neg()
        with Pass():
            X.neg()

    seen = Watched(run)
    assert seen.raised == [("Refuse", "aten.neg.default", "ZeroDivisionError")]
    assert seen.calls.innermost is None
    assert seen.returned == [("Pass", "aten.neg.default", True)]


def test_a_mode_entered_twice_is_bracketed_until_it_is_left_twice():
    mode = Pass()

    def run():
        with mode:
            with mode:
                X.neg()
            assert "__torch_dispatch__" in vars(mode)
            X.neg()

    seen = Watched(run)
    assert [func for _, func, _ in seen.returned] == ["aten.neg.default"] * 3
    assert "__torch_dispatch__" not in vars(mode)


def test_torch_and_modes_are_left_as_they_were():
    enter, leave = TorchDispatchMode.__enter__, TorchDispatchMode.__exit__
    mode = Pass()

    def run():
        with mode:
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        Watched(run)
    assert TorchDispatchMode.__enter__ is enter
    assert TorchDispatchMode.__exit__ is leave
    assert "__torch_dispatch__" not in vars(mode)


def test_a_mode_that_was_left_is_freed_at_once():
    freed = []

    def run():
        mode = Pass()
        with mode:
            X.neg()
        ref = weakref.ref(mode)
        del mode
        freed.append(ref() is None)

    gc.disable()
    try:
        Watched(run)
    finally:
        gc.enable()
    assert freed == [True]


def test_torchs_own_machinery_is_let_be():
    from torch._subclasses.fake_tensor import FakeTensorMode

    def run():
        with FakeTensorMode() as fake:
            torch.ones(2).neg()
            assert "__torch_dispatch__" not in vars(fake)

    assert Watched(run).returned == []


def test_a_mode_inside_compiled_code():
    @torch.compile(backend="aot_eager")
    def f(x):
        with Pass():
            return x.sin()

    def run():
        assert torch.equal(f(X), X.sin())
        with Pass():
            assert torch.equal(f(X), X.sin())

    Watched(run)
