"""Whether two tensors share one version counter.

Nothing in PyTorch tells whose counter it is but moving it, and back. A write of another thread
between the two would be lost, so this is done once for a pair, and what was found is kept.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch

from . import _torch
from .info import version

_Ref = weakref.ref[torch.Tensor]

_shared: dict[tuple[int, int], tuple[_Ref, _Ref]] = {}
"""Pairs that were found to share a counter, by the ids of two tensors that are still there."""


def share_a_counter(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether moving the counter of one of them moves the other's; False if they have none."""
    base = a._base if a._is_view() else None
    a = a if base is None else base  # views come and go, and have the counter of their base
    key = id(a), id(b)
    if key in _shared:
        return True
    was, other = version(a), version(b)
    while version(a) != was:  # another thread writes; equal numbers must be of one moment
        was, other = version(a), version(b)
    if was is None or was != other:
        return False
    torch.autograd.graph.increment_version(a)
    shared = version(b) != was
    _torch.set_version(a, a._version - 1)
    if shared:
        _keep(key, a, b)
    return shared


def _keep(key: tuple[int, int], a: torch.Tensor, b: torch.Tensor) -> None:
    def forget(_: Any) -> None:
        _shared.pop(key, None)

    _shared[key] = weakref.ref(a, forget), weakref.ref(b, forget)
