"""Tensors whose counters a kernel above moves for what is now being done to them.

A wrapper and its inner tensor may share one counter. The kernel above the wrapper moves it for a
write to the wrapper, and whoever sees the wrapper's handler write the inner tensor must not move it
again. No frame tells that: the handler issues the inner write itself.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from .plan import Plan


class _State(threading.local):
    ids: frozenset[int] = frozenset()


state = _State()
"""`ids`: of the tensors; mostly there are none."""


@contextmanager
def counting(tensors: Iterable[Any]) -> Iterator[None]:
    """Say of what is written inside to any of `tensors` that it is counted above."""
    was = state.ids
    state.ids = frozenset(map(id, tensors))
    try:
        yield
    finally:
        state.ids = was


def is_counted(plan: Plan, args: Any, kwargs: Any) -> bool:
    """Whether all that an op writes is counted above."""
    written = plan.tensors_written(args, kwargs)
    return bool(written) and all(id(t) in state.ids for t in written)
