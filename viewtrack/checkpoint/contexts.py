"""Selective checkpointing by a pair of modes of our own.

The first runs in the forward: one pass over an op tracks it as `track` does, asks the policy, and
keeps what is to be kept under a watch. The second runs in the recompute and hands out what was
kept, once it is sure that nothing wrote to it. Policies, the order of entries and errors are those
of the installed torch, whose classes the modes inherit from, since torch looks for them.

Of regions around one another only the outermost tracks, and none does under `track`: what is done
twice is counted twice.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch.utils import checkpoint as torch_checkpoint

from .. import _torch_guard
from .._torch_guard import POLICY_IN_FORWARD_ONLY
from ..mode import active, track
from ..site import place_of, user_frame
from ..tracking import step_for
from ..watch import note_alias, watched
from .cache import CONSUMED, RECOMPUTE, Cache, hooks_for

if TYPE_CHECKING:
    from typing_extensions import Self

Policy = Callable[..., Any]

_Context: Any = torch_checkpoint.SelectiveCheckpointContext
_CheckpointPolicy = torch_checkpoint.CheckpointPolicy
_SAVING = (_CheckpointPolicy.MUST_SAVE, _CheckpointPolicy.PREFER_SAVE)

_NO_CONTENT = {
    f"aten::{name}"
    for name in (
        *("empty", "empty_like", "empty_permuted", "empty_strided"),
        *("new_empty", "new_empty_strided"),
    )
}

_MISMATCH = (
    "This can happen if the operations in the checkpointed region are nondeterministic or depend "
    "on global state that changed between forward and backward."
)
_EXTRA_TIME = (
    "Trying to backward an extra time. You are only allowed to backward once on any region "
    "computed under selective activation checkpoint."
)


class _Regions(threading.local):
    """How many regions' modes are entered in this thread."""

    depth = 0


_regions = _Regions()


class CachingMode(_torch_guard.CachingMode):
    """Runs in the forward of a region.

    Attributes:
        respect_saved_tensors_hooks: what checkpoint() of torch 2.14 was called with.
    """

    supports_higher_order_operators = True
    respect_saved_tensors_hooks: bool | None = None

    def __init__(self, cache: Cache, policy: Policy) -> None:
        super().__init__()
        self.cache = cache
        self._policy = policy
        self._acts = False

    def __enter__(self) -> Self:
        self._acts = _regions.depth == 0
        _regions.depth += 1
        if self.cache.inputs is not None:
            self.cache.inputs.begin()
        return super().__enter__()

    def __exit__(self, *exc: object) -> None:
        _regions.depth -= 1
        if self.cache.inputs is not None:
            self.cache.inputs.end()
        super().__exit__(*exc)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        inputs = self.cache.inputs
        if inputs is not None:
            inputs.note(args, kwargs)
        if func in torch_checkpoint.SAC_IGNORED_OPS:
            return self._run(func, types, args, kwargs)
        saving = not POLICY_IN_FORWARD_ONLY and is_saving(
            self._policy(_Context(is_recompute=False), func, *args, **kwargs)
        )
        out = self._run(func, types, args, kwargs)
        if POLICY_IN_FORWARD_ONLY:
            context = _Context(is_recompute=False, op_output=out)
            saving = is_saving(self._policy(context, func, *args, **kwargs))
        if saving and not has_no_result(func):
            self._file(func, args, self._kept(func, out))
        elif POLICY_IN_FORWARD_ONLY:
            self._file(func, args, RECOMPUTE)
        if inputs is not None:
            inputs.made(out)
        return out

    def _run(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        if not hasattr(func, "_op"):
            return func(*args, **kwargs)
        step, plan = step_for(func)
        if not self._acts or active.trackers:
            out = func._op(*args, **kwargs)
        elif types and not all(cls is torch.Tensor for cls in types):
            with track(record="none"):  # the handlers of wrapper subclasses write as well
                return func(*args, **kwargs)
        elif step is None:
            return func._op(*args, **kwargs)
        else:
            out = step(active.mode, plan, func._op, args, kwargs)
        if watched and (plan.views or plan.may_alias_undeclared):
            note_alias(args, out, plan.name)
        return out

    def _kept(self, func: Any, out: Any) -> Any:
        place = place_of(user_frame(sys._getframe(2)))
        return self.cache.keep(out, str(func), place, hooks_for(self.respect_saved_tensors_hooks))

    def _file(self, func: Any, args: Any, entry: Any) -> None:
        key = _torch_guard.cache_key(func, args)
        entries = self.cache.entries.get(key)
        if entries is None:
            entries = self.cache.entries[key] = []
        entries.append(entry)


class CachedMode(_torch_guard.CachedMode):
    """Runs in the recompute of a region."""

    supports_higher_order_operators = True

    def __init__(self, cache: Cache, policy: Policy) -> None:
        super().__init__()
        self.cache = cache
        self._policy = policy
        self._acts = False
        self.func_counter: dict[Any, int] = {}  # torch's own name: its __enter__ clears it

    def __enter__(self) -> Self:
        if self.cache.inputs is not None:
            self.cache.inputs.check()
        # From the start, so that a second backward is told that it is one too many.
        self.func_counter.clear()
        self._acts = _regions.depth == 0
        _regions.depth += 1
        return super().__enter__()

    def __exit__(self, *exc: object) -> None:
        _regions.depth -= 1
        super().__exit__(*exc)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in torch_checkpoint.SAC_IGNORED_OPS:
            return func(*args, **kwargs)
        find = self._find if POLICY_IN_FORWARD_ONLY else self._find_in_queue
        entry = find(func, args, kwargs)
        return (
            self._run(func, types, args, kwargs) if entry is RECOMPUTE else self.cache.take(entry)
        )

    def _run(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        if not self._acts or active.trackers or not hasattr(func, "_op"):
            return func(*args, **kwargs)
        if types and watched and not all(cls is torch.Tensor for cls in types):
            with track(record="none"):
                return func(*args, **kwargs)
        step, plan = step_for(func)
        if plan.writes and step is not None:
            return step(active.mode, plan, func._op, args, kwargs)
        return func._op(*args, **kwargs)

    def _find(self, func: Any, args: Any, kwargs: Any) -> Any:
        key = _torch_guard.cache_key(func, args)
        index = self.func_counter.get(key, 0)
        self.func_counter[key] = index + 1
        entries = self.cache.entries.get(key)
        if entries is None:
            raise RuntimeError(
                f"{func} encountered during backward but not found in storage. {_MISMATCH}"
            )
        if index >= len(entries):
            raise RuntimeError(
                f"{func} invocation index {index} encountered during backward but not found in "
                f"storage. {_MISMATCH}"
            )
        entry = entries[index]
        if entry is CONSUMED:
            raise RuntimeError(_EXTRA_TIME)
        if entry is not RECOMPUTE:
            entries[index] = CONSUMED
        return entry

    def _find_in_queue(self, func: Any, args: Any, kwargs: Any) -> Any:
        """As torch before 2.13 does it."""
        context = _Context(is_recompute=True)
        if not is_saving(self._policy(context, func, *args, **kwargs)) or has_no_result(func):
            return RECOMPUTE
        entries = self.cache.entries.get(func)
        if entries is None:
            raise RuntimeError(f"{func} encountered during backward, but not found in storage")
        if not entries:
            raise RuntimeError(_EXTRA_TIME)
        return entries.pop(0)


def has_no_result(func: Any) -> bool:
    """Whether an op gives back nothing but what it wrote, or memory without content.

    The first cannot be handed out in place of the op, since its caller has the written tensor
    already and does not look at what comes back. The second is written next. So neither is kept,
    whatever the policy says. Torch keeps both, and then raises, or leaves out the write if its
    check is off.
    """
    if not hasattr(func, "_op"):
        return False
    plan = step_for(func)[1]
    if plan.qualified.partition(".")[0] in _NO_CONTENT:
        return True
    return bool(plan.writes) and len(plan.written) == plan.returns


def is_saving(answer: Any) -> bool:
    """Whether a policy's answer asks to save the op's result."""
    return answer is True or answer in _SAVING
