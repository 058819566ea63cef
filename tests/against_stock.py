"""Runs a program on stock torch and under trackers, and compares what it returns."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from handlers import NoOp

import viewtrack as vt


@contextlib.contextmanager
def _below_a_handler(views: str = "version") -> Iterator[None]:
    with vt.track(views=views), NoOp():
        yield


@contextlib.contextmanager
def _in_a_tracked_handler() -> Iterator[None]:
    @vt.tracked
    class Tracked(NoOp):
        __torch_dispatch__ = NoOp.__torch_dispatch__

    with Tracked():
        yield


#: Ways to be tracked. In the last three a handler that does nothing passes every op on.
WAYS: dict[str, Callable[[], Any]] = {
    "track": vt.track,
    "site off": lambda: vt.track(record="none"),
    "handler": _below_a_handler,
    "full": lambda: _below_a_handler("full"),
    "tracked": _in_a_tracked_handler,
}
ALONE = ("track", "site off")


def each_way(*left_out: str) -> pytest.MarkDecorator:
    """Parametrises a test by `way`."""
    return pytest.mark.parametrize("way", [name for name in WAYS if name not in left_out])


alone = pytest.mark.parametrize("way", ALONE)


def check(way: str, program: Callable[..., Any], *args: Any) -> Any:
    """Fail unless the program returns under `way` what it returns on stock torch."""
    want = _run(contextlib.nullcontext, program, args)
    got = _run(WAYS[way], program, args)
    same(got, want, with_version=way != "tracked")
    return got


def _run(context: Callable[[], Any], program: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    torch.manual_seed(0)
    with context():
        return program(*args)


def same(got: Any, want: Any, with_version: bool = True) -> None:
    """Fail unless two results are alike, in what autograd knows of their tensors too.

    In a tracked handler the counters of new tensors need not begin at 0.
    """
    assert type(got) is type(want), (got, want)
    if isinstance(want, torch.Tensor):
        # `.data`, since a stale view has no grad_fn that could be read.
        torch.testing.assert_close(got.data, want.data, equal_nan=True)
        mine, stock = facts(got, with_version), facts(want, with_version)
        assert mine == stock, (mine, stock)
    elif isinstance(want, dict):
        assert got.keys() == want.keys()
        for key in want:
            same(got[key], want[key], with_version)
    elif isinstance(want, (list, tuple)):
        assert len(got) == len(want)
        for mine, stock in zip(got, want, strict=True):
            same(mine, stock, with_version)
    else:
        assert got == want, (got, want)


def facts(t: torch.Tensor, with_version: bool = True) -> dict[str, Any]:
    """What autograd knows of a tensor."""
    return {
        "requires_grad": t.requires_grad,
        "is_leaf": _read(lambda: t.is_leaf),
        "grad_fn": _read(lambda: type(t.grad_fn).__name__),
        "is_view": t._is_view(),
        "version": vt.version(t) if with_version else None,
        "inference": t.is_inference(),
        "conj": t.is_conj(),
        "neg": t.is_neg(),
    }


def _read(attribute: Callable[[], Any]) -> Any:
    try:
        return attribute()
    except RuntimeError as error:  # a stale view whose history cannot be told
        return str(error)


def attempt(fn: Callable[[], Any]) -> Any:
    """What `fn` returns, or the first line of the error that it raises."""
    try:
        return fn()
    except Exception as error:
        return f"{type(error).__name__}: {str(error).splitlines()[0]}"


def outcome(fn: Callable[[], Any]) -> str:
    """The first line of the error that `fn` raises, or "ok"."""
    result = attempt(lambda: [fn()])
    return result if isinstance(result, str) else "ok"
