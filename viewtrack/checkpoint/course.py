"""The ops of a region in their order, and what each of them read.

A tensor that the forward put into an attribute matters only if the recompute does something else
for it: another op, or the same op on that tensor where the forward had another. A module that
notes its last result (``self.aux_loss = loss``) changes nothing.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch

from ..ledger import key_of
from ..operands import tensors
from ..weak_watch import is_watchable

Reads = dict[int, weakref.ref[Any]]

_detach = torch.ops.aten.detach.default


class Course:
    """The course that the forward took, and how far the recompute has followed it.

    Attributes:
        at: how many of the forward's ops the recompute has done.
    """

    def __init__(self) -> None:
        self._ops: list[tuple[Any, str, Reads]] = []
        self.at = 0

    def __len__(self) -> int:
        return len(self._ops)

    def add(self, func: Any, args: Any, kwargs: Any) -> None:
        """The forward does an op."""
        if func is not _detach:
            self._ops.append((func, _numbers(args), _reads(args, kwargs)))

    def begin(self) -> None:
        """The recompute begins."""
        self.at = 0

    def follow(self, func: Any, args: Any, kwargs: Any) -> set[int] | None:
        """The recompute does an op.

        Returns:
            The storages that it reads and the forward did not; None if it is another op, or has
            other numbers.
        """
        if func is _detach:  # checkpoint's own hooks in the recompute do it too
            return set()
        if self.at >= len(self._ops):
            return None
        op, numbers, read = self._ops[self.at]
        if op is not func or numbers != _numbers(args):
            return None
        self.at += 1
        now = {key_of(t) for t in tensors((args, tuple(kwargs.values()))) if is_watchable(t)}
        return {key for key in now if key not in read or read[key]() is None}


def _reads(args: Any, kwargs: Any) -> Reads:
    found = (t for t in tensors((args, tuple(kwargs.values()))) if is_watchable(t))
    return {key_of(t): weakref.ref(t.untyped_storage()) for t in found}


def _numbers(args: Any) -> str:
    return repr([x for x in args if type(x) in (int, float, bool, str)])
