"""ATen ops that write an argument which autograd has saved for their own backward before.

Such a write is no mutation for the call at hand: its backward reads what was written (the noise of
``rrelu_with_noise``), or reads nothing of it (running statistics). For every other call it is one.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch

from .operands import tensors
from .owned_watch import SavedWatch
from .plan import Plan
from .watch import Watch, watched, watches_on


@dataclass(frozen=True, slots=True)
class Saves:
    """What an op saves and then writes.

    Attributes:
        positions: of it among the arguments.
        is_read: whether backward reads it.
        training: the position of the flag without which nothing is written, whatever the schema
            says; None if there is none.
    """

    positions: tuple[int, ...]
    is_read: bool
    training: int | None = None


OPS = {
    "aten::rrelu_with_noise": Saves((1,), is_read=True, training=4),
    "aten::rrelu_with_noise_": Saves((1,), is_read=True),
    "aten::_native_batch_norm_legit": Saves((3, 4), is_read=False, training=5),
    "aten::_batch_norm_with_update": Saves((3, 4), is_read=False),
}


def of_this_call(args: Any, watches: Iterable[Watch]) -> list[SavedWatch]:
    """The watches that were laid when autograd saved a tensor for the call: one a guard.

    Args:
        args: the arguments of the call.
        watches: those on the storage of one of them.
    """
    if not torch.is_grad_enabled() or not any(t.requires_grad for t in tensors(args)):
        return []
    thread = threading.get_ident()
    saved = [w for w in watches if isinstance(w, SavedWatch) and w.saving[0] == thread]
    return [watch for watch in saved if watch.saving == saved[-1].saving]


def unseen_by_own(step: Callable[..., Any]) -> Callable[..., Any]:
    """The step of one of `OPS`, so that what was saved for the call does not see its write."""

    def unseen(mode: Any, plan: Plan, op: Any, args: Any, kwargs: Any) -> Any:
        saves = OPS[plan.qualified]
        index = saves.training
        # The flag is left out where it has its default, which is False.
        if index is not None and not (len(args) > index and args[index]):
            return op(*args, **kwargs)
        own = _own(saves, args) if watched else []
        for watch, _ in own:
            watch.release()
        out = step(mode, plan, op, args, kwargs)
        for watch, t in own:
            if saves.is_read:
                watch.lay_again(t)
            else:
                watch.ignore()
        return out

    return unseen


def _own(saves: Saves, args: Any) -> list[tuple[SavedWatch, torch.Tensor]]:
    written = [args[i] for i in saves.positions if isinstance(args[i], torch.Tensor)]
    return [(watch, t) for t in written for watch in of_this_call(args, watches_on(t))]
