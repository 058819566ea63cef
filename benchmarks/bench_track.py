"""An op under track(), against the same op under a dispatch mode that does nothing.

Where nothing else is active the tracker leaves most ops to the kernels above. So some are measured
beneath another mode too, against two modes that do nothing.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

import viewtrack
from benchmarks.registry import Side, pair


class NoOpMode(TorchDispatchMode):
    """A mode as users write one; ours is held against this, so nothing in it is tuned."""

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        return out  # noqa: RET504


def _sides(call: Callable[..., Any], args: tuple[Any, ...], record: str) -> tuple[Side, Side]:
    ours = Side(call, args, lambda: viewtrack.track(record=record))
    return ours, Side(call, args, NoOpMode)


def _sides_below(call: Callable[..., Any], args: tuple[Any, ...]) -> tuple[Side, Side]:
    @contextlib.contextmanager
    def both(lower: Callable[[], Any]) -> Iterator[None]:
        with lower(), NoOpMode():
            yield

    ours = Side(call, args, lambda: both(lambda: viewtrack.track(record="none")))
    return ours, Side(call, args, lambda: both(NoOpMode))


def _square() -> torch.Tensor:
    return torch.rand(4, 4)


@pair("add, track(record='none')", target=0.95)
def _add() -> tuple[Side, Side]:
    return _sides(torch.add, (_square(), _square()), "none")


@pair("mm, track(record='none')", target=0.95)
def _mm() -> tuple[Side, Side]:
    return _sides(torch.mm, (_square(), _square()), "none")


@pair("view, track(record='none')", target=1.10)
def _view() -> tuple[Side, Side]:
    return _sides(torch.Tensor.view, (_square(), 16), "none")


@pair("add_, track(record='none')", target=1.15)
def _add_() -> tuple[Side, Side]:
    return _sides(torch.Tensor.add_, (_square(), _square()), "none")


@pair("split into 2, track(record='none')", target=1.15)
def _split() -> tuple[Side, Side]:
    return _sides(torch.Tensor.split, (_square(), 2), "none")


@pair("add_, track(record='site')", target=1.45)
def _write_with_site() -> tuple[Side, Side]:
    return _sides(torch.Tensor.add_, (_square(), _square()), "site")


@pair("view, track(record='none') below a mode", target=1.25)
def _view_below() -> tuple[Side, Side]:
    return _sides_below(torch.Tensor.view, (_square(), 16))


@pair("add_, track(record='none') below a mode", target=2.5)
def _add_below() -> tuple[Side, Side]:
    return _sides_below(torch.Tensor.add_, (_square(), _square()))


@pair("split into 2, track(record='none') below a mode", target=1.3)
def _split_below() -> tuple[Side, Side]:
    return _sides_below(torch.Tensor.split, (_square(), 2))
