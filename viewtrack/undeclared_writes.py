"""ATen ops that update running statistics in place, without a word of it in their schema.

Autograd saves the statistics before such an op updates them, and its backward does not read them:
that is why their counters may not move. Who guards them minds all the same.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from .before_write import before_write
from .info import version
from .own_saves import of_this_call
from .plan import Plan
from .site import Place
from .watch import Watch, note_write, watches_on


@dataclass(frozen=True, slots=True)
class Updates:
    """What an op updates.

    Attributes:
        positions: of the statistics among the arguments.
        training: the position of the flag that says whether it does; None if it always does.
    """

    positions: tuple[int, ...]
    training: int | None = None


_BATCH_NORM = Updates((3, 4), training=5)

UPDATES = {
    "aten::native_batch_norm": _BATCH_NORM,
    "aten::cudnn_batch_norm": _BATCH_NORM,
    "aten::miopen_batch_norm": _BATCH_NORM,
    "aten::batch_norm_gather_stats": Updates((3, 4)),
    "aten::batch_norm_gather_stats_with_counts": Updates((3, 4)),
    "aten::batch_norm_update_stats": Updates((1, 2)),
}

Updated = list[tuple[str, torch.Tensor, list[Watch]]]


def updated(plan: Plan, args: Any) -> Updated:
    """The statistics that a call is about to update and somebody watches.

    Raises:
        MutatedTensorError: some of them are protected.
    """
    updates = UPDATES[plan.qualified]
    if updates.training is not None and not args[updates.training]:
        return []
    found = []
    for index, name in zip(updates.positions, ("running_mean", "running_var"), strict=True):
        t = args[index]
        watches = [] if t is None else watches_on(t)
        if watches:
            found.append((name, t, watches))
            before_write(t, watches, plan, name)
    return found


def note_updates(plan: Plan, args: Any, found: Updated, place: Place, thread: str) -> None:
    """Note that they have been updated, for all but the backward of this very call."""
    for name, t, watches in found:
        own = of_this_call(args, watches)
        for watch in own:
            watch.ignore()
        others = [watch for watch in watches if watch not in own]
        now = version(t)
        note_write(t, others, plan, (plan.name, name, place, thread, now, now), False)
