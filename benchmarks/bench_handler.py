"""An op under a mode whose handler is `tracked`, against the same mode undecorated."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

import viewtrack
from benchmarks.bench_track import NoOpMode
from benchmarks.registry import Side, pair


def tracked_mode() -> type[NoOpMode]:
    """A mode that does nothing, with a `tracked` handler."""

    @viewtrack.tracked
    class TrackedMode(NoOpMode):
        __torch_dispatch__ = NoOpMode.__torch_dispatch__

    return TrackedMode


def _sides(call: Callable[..., Any], *args: Any) -> tuple[Side, Side]:
    return Side(call, args, tracked_mode()), Side(call, args, NoOpMode)


def _square() -> torch.Tensor:
    return torch.rand(4, 4)


@pair("add, tracked handler", target=1.10)
def _add() -> tuple[Side, Side]:
    return _sides(torch.add, _square(), _square())


@pair("view, tracked handler", target=1.10)
def _view() -> tuple[Side, Side]:
    return _sides(torch.Tensor.view, _square(), 16)


@pair("add_, tracked handler", target=1.10)
def _add_() -> tuple[Side, Side]:
    return _sides(torch.Tensor.add_, _square(), _square())


@pair("split into 2, tracked handler", target=1.10)
def _split() -> tuple[Side, Side]:
    return _sides(torch.Tensor.split, _square(), 2)
