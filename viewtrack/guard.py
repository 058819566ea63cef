"""Guard tensors by hand: `MutationGuard` finds a write afterwards, `protect` refuses it at once.

Both see the writes of the thread that they were entered in, with their lines. Of other threads, and
of a guard that was not entered, the version counter still tells that something wrote.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Literal

import torch

from . import _torch
from .before_write import values_of
from .ledger import key_of
from .mode import Tracker, track
from .mutation_text import Mutation, mutation_error
from .op_names import allowed_names
from .owned_watch import OwnedWatch
from .site import Place, place_of, user_frame
from .watch import UNSEEN, is_allowed, parts

_SUBJECT = "a guarded tensor"
_ALLOW = "add '{op}' to allow="


class GuardedTensor:
    """A tensor that a `MutationGuard` keeps.

    Args:
        t: the tensor.
        watches: what watches over it, and over its parts.
        allowed: the names of ops that may write to it.
    """

    def __init__(self, t: torch.Tensor, watches: list[OwnedWatch], allowed: frozenset[str]) -> None:
        self._tensor: torch.Tensor | None = t
        self._watches = watches
        self._allowed = allowed

    def get(self) -> torch.Tensor:
        """The tensor, if it is as it was when it was saved.

        Returns:
            The very tensor that was saved.

        Raises:
            MutatedTensorError: something wrote to its bytes since.
            ValueError: it was released.
        """
        if self._tensor is None:
            raise ValueError("this tensor was released; `get()` it before `release()`")
        if (mutation := self.mutation()) is not None:
            raise mutation_error(_SUBJECT, [mutation], _ALLOW)
        return self._tensor

    def release(self) -> None:
        """Let go of the tensor and stop watching it."""
        for watch in self._watches:
            watch.release()
        self._tensor, self._watches = None, []

    def mutation(self) -> Mutation | None:
        """What reached the tensor since it was saved; None if nothing did, or it was released."""
        if self._tensor is not None and self._watches[0].is_exchanged(self._tensor):
            change = self._watches[0].exchange()
            if not is_allowed(change, self._allowed):
                return Mutation(self._watches[0], [change])
        found = None
        for watch in self._watches:
            all_writes, more = watch.writes()
            writes = [write for write in all_writes if not is_allowed(write, self._allowed)]
            # One part may have seen who wrote, where of another the counter tells that one did.
            if writes and (found is None or found.writes[0].op == UNSEEN != writes[0].op):
                found = Mutation(watch, writes, more)
        return found


class MutationGuard:
    """Guards any number of tensors.

    Use it as a context manager around the code that must not write to them, which then is tracked;
    leaving it checks and releases all that were saved in it. Or use it without, between any two
    points of a program; then it knows that a tensor was written, and mostly not where.

    Args:
        check: ``"storage"``: a write that reached the bytes counts. ``"content"``: changed bytes
            count, also by numpy or a raw pointer, and writes of equal bytes do not.
        allow: ops whose writes are right, with or without overload, ``{"aten.relu_": "why"}``.

    Raises:
        ValueError: `check` has none of its values.
    """

    def __init__(
        self,
        *,
        check: Literal["storage", "content"] = "storage",
        allow: Mapping[Any, str] | Iterable[Any] | None = None,
    ) -> None:
        if check not in ("storage", "content"):
            raise ValueError(f"`check` must be 'storage' or 'content', got {check!r}")
        self._content = check == "content"
        self._allowed = allowed_names(allow)
        self._saved: list[GuardedTensor] = []
        self._trackers: list[Tracker] = []

    def __enter__(self) -> MutationGuard:
        self._trackers.append(track(record="none"))
        self._trackers[-1].__enter__()
        return self

    def __exit__(self, kind: object, *exc: object) -> None:
        self._trackers.pop().__exit__()
        try:
            if kind is None:
                self.check()
        finally:
            for entry in self._saved:
                entry.release()
            self._saved.clear()

    def save(self, t: torch.Tensor, label: str | None = None) -> GuardedTensor:
        """Guard a tensor from here on.

        Args:
            t: any tensor. It is kept alive until it is released.
            label: what to call it in a report.

        Returns:
            An entry, whose `get` gives the tensor back.

        Raises:
            TypeError: `t` is no tensor.
        """
        place = place_of(user_frame(sys._getframe(1)))
        watches = watches_for(t, label or "tensor", place, content=self._content)
        entry = GuardedTensor(t, watches, self._allowed)
        self._saved.append(entry)
        return entry

    def check(self) -> None:
        """Look at all tensors that are not released.

        Raises:
            MutatedTensorError: some were written; the error lists them all.
        """
        found = [m for entry in self._saved if (m := entry.mutation()) is not None]
        if found:
            raise mutation_error(_SUBJECT, found, _ALLOW)


@contextmanager
def protect(*tensors: torch.Tensor) -> Iterator[None]:
    """Refuse every write to some tensors, through any alias, at the line that would do it.

    The write is not done. A change of the tensor's own sizes, strides or storage (``resize_``,
    ``t_``, ``set_``) is refused too. Writes of other threads, and those that no dispatcher sees
    (numpy, pointers, ``.data =``), are not refused; `MutationGuard` finds them afterwards.

    Args:
        *tensors: any tensors.

    Raises:
        MutatedTensorError: by the line that would write.
        TypeError: one of them is no tensor.
    """
    place = place_of(user_frame(sys._getframe(2)))
    watches = [w for t in tensors for w in watches_for(t, "a tensor", place, content=False)]
    for watch in watches:
        watch.forbidden = True
    try:
        with track(record="none"):
            yield
    finally:
        for watch in watches:
            watch.release()


def watches_for(t: torch.Tensor, label: str, place: Place, *, content: bool) -> list[OwnedWatch]:
    """Watches on aliases of a tensor, and of its parts if it is a wrapper, or sparse."""
    if not isinstance(t, torch.Tensor):
        raise TypeError(f"expected a tensor to guard, got {type(t).__name__}")
    found = []
    for part in parts(t):
        # An alias keeps the storage from dying, whatever becomes of t, so that no address is
        # reused. What has no storage is known by itself, and is kept itself.
        kept = part if key_of(part) == id(part) else _alias(part)
        found.append(OwnedWatch(part, kept, label, place, content=content))
        values = values_of(part)
        if values is not None:
            found.append(OwnedWatch(None, _alias(values), label, place, content=content))
    return found


def _alias(t: torch.Tensor) -> torch.Tensor:
    with _torch.inplace_or_view(), torch.no_grad():
        return t.detach()
