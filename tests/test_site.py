"""The line that a write is from: the user's, and beyond the handlers that only pass the op on."""

from __future__ import annotations

import contextlib
import sys
import warnings
from pathlib import Path

import pytest
import torch
import typing_extensions
from handlers import NoOp, On, Wrapper
from torch.utils._python_dispatch import TorchDispatchMode

import viewtrack as vt
from viewtrack.ledger import ledger
from viewtrack.site import UNKNOWN, Site, caller, is_user_file, place_of, site_at

aten = torch.ops.aten


def here(offset=0):
    """The caller's line, for comparison."""
    return sys._getframe(1).f_lineno + offset


def only_write(x):
    (write,) = ledger.writes(x)
    return write


def test_user_files_are_those_outside_of_torch_and_viewtrack():
    assert is_user_file(__file__)
    assert is_user_file("<stdin>")
    assert is_user_file("/some/where/model.py")
    assert not is_user_file(torch.__file__)
    assert not is_user_file(torch.nn.functional.__file__)
    assert not is_user_file(vt.mode.__file__)
    assert not is_user_file(str(Path(vt.__file__).parent / "cli" / "made_up.py"))
    assert not is_user_file("<eval_with_key>.7 from /some/where/model.py:3 in forward")
    assert not is_user_file("/tmp/torchinductor_me/ab/cabc.py")


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_of_a_write_in_compiled_code_the_compiled_function_is_told(backend):
    """And not a line of what the compiler wrote."""

    @torch.compile(backend=backend)
    def compiled(x):
        x.mul_(3)

    x = torch.ones(3)
    for _ in range(2):
        with vt.track():
            compiled(x)
        write = ledger.writes(x)[-1]
        assert (write.filename, write.function) == (__file__, "compiled")
    assert not is_user_file("<frozen importlib._bootstrap>")


def test_the_line_is_beyond_a_wrapper_of_the_standard_library():
    @contextlib.contextmanager
    def around():
        yield

    x = torch.ones(3)
    functions = [
        around()(torch.nn.functional.relu),
        typing_extensions.deprecated("old")(torch.nn.functional.relu),
    ]
    for relu in functions:
        with vt.track(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            relu(x, inplace=True); line = here()  # fmt: skip # noqa: E702
        write = ledger.writes(x)[-1]
        assert (write.filename, write.lineno) == (__file__, line)
    beside_the_user = Path(__file__).with_name("functools.py")
    assert is_user_file(str(beside_the_user))


def test_a_library_beside_torch_is_user_code():
    """`torchvision` must not pass for a part of `torch`."""
    beside = Path(torch.__file__).parent.with_name("torchvision") / "models.py"
    assert is_user_file(str(beside))


def test_a_site_reads_as_file_line_function():
    site = Site("model.py", 41, "forward")
    assert str(site) == "model.py:41 in forward"


def test_no_frame_is_an_unknown_site():
    assert site_at(place_of(None)) == UNKNOWN


def test_a_place_is_the_line_of_its_moment():
    place, line = place_of(sys._getframe()), here()
    later = here()
    site = site_at(place)
    assert (site.filename, site.lineno) == (__file__, line)
    assert site.function == "test_a_place_is_the_line_of_its_moment"
    assert site.lineno < later


def test_caller_skips_frames_that_are_not_user_code():
    assert caller(0) == Site(__file__, here(), "test_caller_skips_frames_that_are_not_user_code")


def test_the_line_inside_a_torch_function_is_the_users():
    x = torch.ones(3)
    with vt.track():
        torch.nn.functional.relu(x, inplace=True); line = here()  # fmt: skip # noqa: E702
    write = only_write(x)
    assert (write.filename, write.lineno) == (__file__, line)


@pytest.mark.parametrize("handlers", [0, 1, 2])
def test_the_line_is_beyond_handlers_that_pass_on(handlers):
    x = torch.ones(3)
    modes = [NoOp() for _ in range(handlers)]
    with vt.track():
        for mode in modes:
            mode.__enter__()
        try:
            x.add_(1); line = here()  # fmt: skip # noqa: E702
        finally:
            for mode in reversed(modes):
                mode.__exit__(None, None, None)
    write = only_write(x)
    assert (write.filename, write.lineno, write.site.in_handler) == (__file__, line, False)


def test_the_line_is_in_the_handler_that_issued_the_op():
    x = torch.ones(3)

    def scribble(out):
        x.add_(1)

    with vt.track(), NoOp(), On(aten.sin.default, scribble):
        torch.ones(1).sin()
    write = only_write(x)
    assert write.function == "scribble"
    assert write.lineno == scribble.__code__.co_firstlineno + 1
    assert write.site.in_handler


def test_the_line_is_the_users_when_a_handler_writes_by_another_op():
    class ByCopy(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if func is aten.add_.Tensor:
                return args[0].copy_(args[0] + args[1])
            return func(*args, **(kwargs or {}))

    x = torch.ones(3)
    with vt.track(), ByCopy():
        x.add_(1); line = here()  # fmt: skip # noqa: E702
    write = only_write(x)
    assert (write.op, write.lineno, write.site.in_handler) == ("aten.copy_.default", line, False)


def test_a_wrappers_inner_write_is_in_its_handler():
    w = Wrapper(torch.ones(3))
    with vt.track():
        w.add_(1)
    assert only_write(w.inner).site.in_handler


def test_a_wrappers_inner_write_is_in_its_handler_whatever_that_does_to_its_arguments():
    class Exchanging(Wrapper):
        @classmethod
        def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
            wrapper, args = args[0], (args[0].inner, *args[1:])
            func(*args)
            return wrapper

    w = Exchanging(torch.ones(3))
    with vt.track():
        w.add_(1)
    write = only_write(w.inner)
    assert (write.function, write.site.in_handler) == ("__torch_dispatch__", True)


def test_handlers_under_other_argument_names():
    class Renamed(TorchDispatchMode):
        def __torch_dispatch__(this, op, _, inputs=(), named=None):
            return op(*inputs, **(named or {}))

    x = torch.ones(3)
    with vt.track(), Renamed():
        x.add_(1)
    assert x._version == 1
    assert not only_write(x).site.in_handler


@pytest.mark.parametrize("static", [True, False])
def test_a_wrappers_handler_that_is_static_or_a_classmethod(static):
    def handle(func, types, args=(), kwargs=None):
        return func(*[a.inner if isinstance(a, Odd) else a for a in args], **(kwargs or {}))

    class Odd(torch.Tensor):
        @staticmethod
        def __new__(cls, inner):
            return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)

        def __init__(self, inner):
            self.inner = inner

        if static:

            @staticmethod
            def __torch_dispatch__(func, types, args=(), kwargs=None):
                handle(func, types, args, kwargs)
                return args[0]

        else:

            @classmethod
            def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
                handle(func, types, args, kwargs)
                return args[0]

    odd = Odd(torch.ones(3))
    with vt.track():
        odd.add_(1)
    assert odd._version == 1
    assert odd.inner._version == 1
    assert odd.inner.tolist() == [2, 2, 2]


def test_the_whole_stack_where_it_is_asked_for():
    def inner(x):
        x.add_(1)

    def outer(x):
        inner(x)

    x = torch.ones(3)
    with vt.track(record="stack"):
        outer(x)
    stack = only_write(x).site.stack
    assert [function for _, _, function in stack[:3]] == [
        "inner",
        "outer",
        "test_the_whole_stack_where_it_is_asked_for",
    ]
