"""`compare`: what a call does otherwise in a mode than on stock torch."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from ..mode import track
from .call import Call, Variant
from .observation import Observation, Under, observe, same

_MISSING = "(nothing)"


@dataclass(frozen=True)
class Difference:
    """Something that is otherwise than it ought to be.

    Attributes:
        call: the name of the call.
        what: what differs, ``out[0]._version``.
        expected: as stock torch has it.
        found: as it was found.
    """

    call: str
    what: str
    expected: Any
    found: Any

    def __str__(self) -> str:
        return f"{self.call}: {self.what} is {self.found!r}, on stock torch {self.expected!r}"


def compare(
    fn: Callable[..., Any],
    args: tuple[Any, ...] = (),
    kwargs: dict[str, Any] | None = None,
    *,
    under: Under = track,
    name: str = "",
    variant: Variant = "function",
) -> list[Difference]:
    """Call `fn` on stock torch and in a mode, and list what differs.

    Compared are output values, gradients, ``_is_view``, the identity of ``_base``, the kind of
    ``grad_fn``, creation_meta, ``_version`` of every input and output, who shares memory and
    counters with whom, and the errors raised. This is promise 1 of `track`: there is no difference.

    Args:
        fn: a callable that takes tensors; it is called several times, each time on fresh copies.
        args: positional arguments; tensors in them must be leaves, of any shape and dtype.
        kwargs: keyword arguments.
        under: makes the context manager to call it in: `track`, a dispatch mode, or both nested.
        name: how the differences name the call.
        variant: ``"in-place"`` for an `fn` that writes its first argument, ``"in-place on a view"``
            to hand it a view there.

    Returns:
        The differences; empty if there are none.
    """
    call = Call(fn, args, kwargs or {}, name or _name(fn), variant)
    return differences(call.name, observe(call), lambda: observe(call, under))


def differences(
    name: str, expected: Observation, find: Callable[[], Observation]
) -> list[Difference]:
    """Compare what `find` sees with what is expected."""
    found = find()
    return [
        Difference(name, what, expected.get(what, _MISSING), found.get(what, _MISSING))
        for what in {**expected, **found}
        if not same(expected.get(what, _MISSING), found.get(what, _MISSING))
    ]


def is_steady(call: Call, difference: Difference, runs: int = 6) -> bool:
    """Whether stock torch itself always gives what was expected here.

    What it does not (uninitialised memory; the last bits that LAPACK gives for the same input at
    another address) tells nothing.
    """
    kept: list[Any] = []  # so that each run finds its memory at other addresses
    for run in range(runs):
        found = observe(call, nullcontext)
        kept += [found, torch.empty(1000 * run % 4096 + 1, dtype=torch.uint8)]
        if not same(found.get(difference.what, _MISSING), difference.expected):
            return False
    return True


def _name(fn: Any) -> str:
    return str(getattr(fn, "__qualname__", None) or getattr(fn, "__name__", None) or fn)
