"""Watches that keep nothing alive: for tensors that somebody else may keep, or may not.

The watch ends when the storage dies. It is known by the storage's Python object, which lives as
long as the storage, so a new storage at the same address is not taken for the old one.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch

from ._torch import guard as _torch_guard
from ._torch.dynamo import skip_dynamo
from .ledger import key_of
from .site import Place
from .watch import Watch


class WeakWatch:
    """Watches a tensor's bytes without keeping the tensor.

    Args:
        t: a plain tensor with storage.
        op: the op that made it, or a label.
        place: the line that saved it.
        content: whether bytes decide, and not writes.
        make: what makes the watch.
        died: called with the watch when the storage dies.

    Attributes:
        watch: the watch.
    """

    __slots__ = ("__weakref__", "_anchor", "watch")

    def __init__(
        self,
        t: torch.Tensor,
        op: str,
        place: Place,
        *,
        content: bool = False,
        make: Callable[..., Watch] = Watch,
        died: Callable[[WeakWatch], None] | None = None,
    ) -> None:
        self.watch = make(t, op, place, content=content, counter=_torch_guard.counter_of(t))
        self._anchor = weakref.ref(t.untyped_storage(), _StorageDied(self, died))

    def is_on(self, t: torch.Tensor) -> bool:
        """Whether t lies in the storage that is watched."""
        storage = self._anchor()
        return storage is not None and key_of(t) == self.watch.key

    def release(self) -> None:
        """Stop watching."""
        self.watch.release()


class _StorageDied:
    """Called when a storage dies. It must not keep the watch, nor what the watch is in."""

    __slots__ = ("_died", "_weak")

    def __init__(self, weak: WeakWatch, died: Callable[[WeakWatch], None] | None) -> None:
        self._weak = weakref.ref(weak)
        self._died = died

    @skip_dynamo
    def __call__(self, _: Any) -> None:
        if (weak := self._weak()) is not None:
            weak.watch.release()
            if self._died is not None:
                self._died(weak)


def is_watchable(t: Any) -> bool:
    """Whether a value is a plain tensor with a storage of its own.

    The zero tensors of forward mode have none, and can be neither written nor set.
    """
    is_plain = type(t) in (torch.Tensor, torch.nn.Parameter) and t.layout is torch.strided
    return is_plain and not t._is_zerotensor()
