"""One write to each argument that an op writes is counted by the kernel above its handler.

Which of the handler's own writes that is cannot be told before the end, and need not be: the first
one to the argument, or to an alias of it that shares its counter, is left to the kernel above, and
all others are counted where they happen. That the first has been is noted among the variables of
the handler's frame, where it ends when the call does.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from . import _torch
from .info import version
from .plan import Plan
from .sharing import share_a_counter

#: What is to be done about the one write: ask only, take it, or give it back where the op raised.
ASK, TAKE, GIVE_BACK = 0, 1, 2

#: How a write is counted: here, by a kernel above in any case, or as the one that a handler has.
HERE, ABOVE, AS_THE_ONE, AS_THE_ONE_BY_ALIAS = 0, 1, 2, 3

_TAKEN = "viewtrack: counted above"


def settle(variables: Any, tensors: Sequence[Any], what: int) -> int:
    """Take the one write to each of `tensors`, arguments of a handler's op, or give it back.

    Args:
        variables: those of the handler's frame.
        tensors: what is written.
        what: one of the above.

    Returns:
        How the write is counted. If that is above for some of the tensors only, the others are
        counted now.
    """
    taken = variables.get(_TAKEN)
    if taken is None:
        variables[_TAKEN] = {*map(id, tensors)}
        return AS_THE_ONE
    if what == GIVE_BACK:
        taken.difference_update(map(id, tensors))
        return AS_THE_ONE
    again = [t for t in tensors if id(t) in taken]
    if len(again) == len(tensors):
        return HERE
    count(again)
    taken.update(map(id, tensors))
    return AS_THE_ONE


def count(tensors: Sequence[Any]) -> None:
    """Move the counters of tensors that have one."""
    for t in tensors:
        if version(t) is not None:
            torch.autograd.graph.increment_version(t)


def originals(
    written: Sequence[Any], plan: Plan, args: Any, kwargs: Any
) -> tuple[list[Any], list[Any]]:
    """The arguments of a handler's op that a write to `written` counts as a write to.

    Args:
        written: what is written.
        plan: the plan of the handler's op.
        args: its positional arguments.
        kwargs: its keyword arguments.

    Returns:
        The arguments, and those written that alias none.
    """
    declared = plan.tensors_written(args, kwargs)
    found = [(t, next((d for d in declared if _is_or_aliases(t, d)), None)) for t in written]
    return [d for _, d in found if d is not None], [t for t, d in found if d is None]


def _is_or_aliases(t: Any, declared: Any) -> bool:
    if t is declared:
        return True
    if type(declared).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
        return False  # of a wrapper and what is inside, `tracking.count_once` sees to it
    if not (_torch.has_storage(t) and _torch.has_storage(declared)):
        return False
    return _torch.is_alias_of(t, declared) and share_a_counter(declared, t)
