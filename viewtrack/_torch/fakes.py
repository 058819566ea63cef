"""Fake tensors beside real ones, for bodies of custom ops that use a tensor they were not given.

Under the rules of the package; tried on torch 2.6.0, 2.9.1, 2.13.0, 2.14.1 and 2.15.0.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from . import aten


def is_fake(t: torch.Tensor) -> bool:
    """Whether t is a FakeTensor."""
    return isinstance(t, torch._subclasses.FakeTensor)


@contextmanager
def real_allowed(mode: Any) -> Iterator[None]:
    """Let a FakeTensorMode take real tensors for fake ones inside. None is no mode."""
    before = mode is None or mode.allow_non_fake_inputs
    if not before:
        mode.allow_non_fake_inputs = True
    try:
        yield
    finally:
        if not before:
            mode.allow_non_fake_inputs = False


def fake_mode_of(tensors: list[torch.Tensor]) -> Any:
    """The FakeTensorMode of the first of them that is fake; None if none is."""
    return next((t.fake_mode for t in tensors if is_fake(t)), None)  # type: ignore[attr-defined]


def is_lift(func: Any) -> bool:
    """Whether an op is how ``torch.tensor`` and its like hand a new tensor to the modes."""
    return func in _LIFTS


_LIFTS = (aten.lift.default, aten.lift_fresh.default, aten.lift_fresh_copy.default)
