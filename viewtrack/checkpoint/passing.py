"""How the ops of a region are passed on that are neither kept nor written.

They are most of a region's ops, and what they cost is what a region costs. So it is settled once
for each op, here, and the modes look it up by the builtin in its OpOverload.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils import checkpoint as torch_checkpoint

from .. import _torch
from .._torch import ADINPLACEORVIEW, TensorBase, set_excluded
from .._torch import guard as _torch_guard
from .._torch.bindings import bindings
from .._torch.guard import HAS_EFFECTS
from ..mode import active
from ..operands import is_complex, written
from ..own_saves import OPS
from ..plan import Plan, caches
from ..step_choice import on_real, step_for
from ..watch import note_alias, watched

Pass = Callable[..., Any]

STEP: Any = object()
"""Stands for an op that is not passed on: a step of its own does it."""

in_forward: dict[Any, Any] = {}
"""What passes an op on in the forward, or STEP. It takes positional arguments, and returns
NotImplemented where the op needs its step after all."""

in_recompute: dict[Any, Any] = {}
"""The same in the recompute, where only ops that write need a step."""

when_kept: dict[Any, tuple[Any, str]] = {}
"""What runs an op whose result is kept, and the op's name, for those that need no step."""

without_result: dict[Any, bool] = {}
"""Whether an op gives nothing back that can be kept."""


class _Tables(dict[Any, dict[Any, Any]]):
    """For each list of ops to save, what passes on the ops that are not among them."""

    def pop(self, op: Any, *default: Any) -> None:  # type: ignore[override]
        """Forget an op, as all that is kept for ops can."""
        for table in self.values():
            table.pop(op, None)


_tables = _Tables()
_TABLES_KEPT = 64
caches.extend((in_forward, in_recompute, when_kept, without_result, _tables))

_NO_CONTENT = {
    f"aten::{name}"
    for name in (
        *("empty", "empty_like", "empty_permuted", "empty_strided"),
        *("new_empty", "new_empty_strided"),
    )
}

_view = TensorBase.view
_detach = TensorBase.detach
_mode_stack_len = _torch.mode_stack_len


def settle(func: Any) -> None:
    """Settle how an OpOverload is passed on."""
    step, plan = step_for(func)
    op = func._op
    call = bindings.get(op, op)
    in_recompute[op] = STEP if plan.writes else call
    if op in on_real and not plan.writes:
        in_recompute[op] = _resolving(call, step, plan, op)
    only_writes = bool(plan.writes) and len(plan.written) == plan.returns
    without_result[op] = only_writes or plan.qualified.partition(".")[0] in _NO_CONTENT
    if step is None and not without_result[op]:
        when_kept[op] = (call if plan.returns == 1 else op, plan.name)  # some return named tuples
    if step is None or (plan.views and not plan.writes):
        # Above autograd a native kernel makes a view of the result; only a kept one needs more.
        in_forward[op] = call
    elif plan.qualified == "aten::_unsafe_view":
        in_forward[op] = _unsafe_view(plan)
    elif op in on_real and on_real[op] is None:
        in_forward[op] = _if_real(call)
    else:
        in_forward[op] = STEP


def has_no_result(func: Any) -> bool:
    """Whether an op gives back nothing but what it wrote, or memory without content.

    The first cannot be handed out in place of the op, since its caller has the written tensor
    already and does not look at what comes back. The second is written next. So neither is kept,
    whatever the policy says. Torch keeps both, and then raises, or leaves out the write if its
    check is off.
    """
    op = getattr(func, "_op", None)
    if op is None:
        return False
    if op not in without_result:
        settle(func)
    return without_result[op]


def has_no_content(func: Any) -> bool:
    """Whether an op gives back memory without content, which is written next."""
    plan = step_for(func)[1] if hasattr(func, "_op") else None
    return plan is not None and plan.qualified.partition(".")[0] in _NO_CONTENT


def written_besides(plan: Plan | None, args: Any, kwargs: Any) -> list[torch.Tensor]:
    """The tensors that an op writes, and backward may read, besides what it returns."""
    if plan is None:
        return []
    undeclared = OPS.get(plan.qualified)  # before 2.13 the schema of rrelu does not tell
    if not plan.writes and undeclared is not None and undeclared.is_read:
        return [args[i] for i in undeclared.positions]
    return [t for _, t in written(plan, args, kwargs)]


def has_effect(func: Any) -> bool:
    """Whether torch keeps what an op returns unasked, since it must not be done twice."""
    plan = step_for(func)[1] if hasattr(func, "_op") else None
    name, is_aten = (plan.qualified, plan.is_aten) if plan is not None else ("", False)
    return _torch_guard.is_saved_unasked(func, name, is_aten)


def _if_real(call: Pass) -> Pass:
    """For an op whose kernel must not meet a lazy conjugate, and needs nothing else."""

    def passed(*args: Any) -> Any:
        return NotImplemented if is_complex(args) else call(*args)

    return passed


def _resolving(call: Pass, step: Any, plan: Plan, op: Any) -> Pass:
    """For the same in the recompute."""

    def passed(*args: Any) -> Any:
        if is_complex(args) and not _mode_stack_len():
            return step(active.mode, plan, op, args, {})
        return call(*args)

    return passed


def _unsafe_view(plan: Plan) -> Pass:
    """As its step does it at the bottom of the stack, where no other mode or tracker acts."""
    name = plan.name

    def passed(t: Any, size: Any) -> Any:
        if _mode_stack_len() or type(t) is not torch.Tensor or t.is_complex():
            return NotImplemented
        set_excluded(ADINPLACEORVIEW, False)
        try:
            out = _detach(_view(t, size))
        finally:
            set_excluded(ADINPLACEORVIEW, True)
        if watched:
            note_alias((t,), out, name)
        return out

    return passed


def builtin(op: Any) -> Any:
    """By what an op is filed: hashing an OpOverload itself runs Python."""
    return getattr(op, "_op", op)


class _Last:
    """What was made of the ignored ops, and of a list, the last time that somebody asked."""

    ignored: frozenset[Any] = frozenset()
    builtins: frozenset[Any] = frozenset()
    lists: tuple[Any, Any, Any] = (None, None, None)


def ignored_builtins() -> frozenset[Any]:
    """The builtins in SAC_IGNORED_OPS, which people add to."""
    if _Last.ignored != torch_checkpoint.SAC_IGNORED_OPS:
        ignored = frozenset(torch_checkpoint.SAC_IGNORED_OPS)
        _Last.builtins = frozenset(map(builtin, ignored))
        _Last.ignored = ignored
    return _Last.builtins


def saved_and_table(ops: list[Any]) -> tuple[frozenset[Any], dict[Any, Any]]:
    """The builtins in a list of ops to save, and what passes on all ops but those and ignored ones.

    The table is empty at first; `enter` fills it.
    """
    ignored = ignored_builtins()
    known, with_ignored, found = _Last.lists
    if known != ops or with_ignored is not ignored:
        saved = frozenset(map(builtin, ops))
        if len(_tables) >= _TABLES_KEPT:
            _tables.clear()
        found = saved, _tables.setdefault((saved, ignored), {})
        _Last.lists = (list(ops), ignored, found)
    saved, table = found
    return saved, table


def enter(table: dict[Any, Any], func: Any, saved: frozenset[Any]) -> None:
    """Enter an OpOverload into the table for a list of ops to save; None if it is not passed on."""
    op = func._op
    if op not in in_forward:
        settle(func)
    kept = op in saved or op in ignored_builtins() or (HAS_EFFECTS and has_effect(func))
    passes = in_forward[op] is not STEP and not kept
    table[op] = in_forward[op] if passes else None
