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

from .._torch import guard as _torch_guard
from .._torch.guard import POLICY_IN_FORWARD_ONLY
from ..mode import active, track
from ..plan import Plan
from ..site import place_of, user_frame
from ..steps import step_for
from ..watch import note_alias, watched
from .cache import CONSUMED, RECOMPUTE, Cache, hooks_for

if TYPE_CHECKING:
    from typing_extensions import Self

Policy = Callable[..., Any] | list[Any]

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
        self._entries = cache.entries
        self._policy = policy
        # The most frequent case has a way of its own through the handler: it costs half as much.
        plain = POLICY_IN_FORWARD_ONLY and isinstance(policy, list) and cache.inputs is None
        self._listed: Any = policy if plain else None
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
        if types or self._listed is None or func in torch_checkpoint.SAC_IGNORED_OPS:
            return self._run_and_ask(func, types, args, kwargs)
        try:
            step, plan = step_for(func)
        except AttributeError:  # a higher-order operator
            return self._run_and_ask(func, types, args, kwargs)
        op = func._op
        saving = func in self._listed
        # Above autograd a native kernel makes a view of the result; only a kept one needs more.
        if step is None or (plan.views and not saving and not plan.writes):
            out = op(*args, **kwargs) if kwargs else op(*args)
        else:
            out = self._run_step(step, plan, op, args, kwargs)
        entry = self._kept(func, out) if saving and not has_no_result(func) else RECOMPUTE
        try:
            self._entries[op].append(entry)
        except KeyError:
            self._entries[op] = [entry]
        return out

    def _run_and_ask(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        """The same for any policy, any op, and any torch."""
        inputs = self.cache.inputs
        if inputs is not None:
            inputs.note(args, kwargs)
        if func in torch_checkpoint.SAC_IGNORED_OPS:
            return self._run(func, types, args, kwargs)
        saving = not POLICY_IN_FORWARD_ONLY and asks_to_save(
            self._policy, func, args, kwargs, is_recompute=False
        )
        out = self._run(func, types, args, kwargs)
        if POLICY_IN_FORWARD_ONLY:
            saving = asks_to_save(
                self._policy, func, args, kwargs, is_recompute=False, op_output=out
            )
        if saving and not has_no_result(func):
            self._file(func, args, self._kept(func, out))
        elif POLICY_IN_FORWARD_ONLY:
            self._file(func, args, RECOMPUTE)
        if inputs is not None:
            inputs.made(out)
        return out

    def _run(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        if types and not all(cls is torch.Tensor for cls in types):
            return self._run_on_wrappers(func, args, kwargs)
        try:
            op = func._op
        except AttributeError:  # a higher-order operator
            return func(*args, **kwargs)
        step, plan = step_for(func)
        if step is None:
            return op(*args, **kwargs) if kwargs else op(*args)
        return self._run_step(step, plan, op, args, kwargs)

    def _run_step(self, step: Any, plan: Plan, op: Any, args: Any, kwargs: Any) -> Any:
        if self._acts and not active.trackers:
            out = step(active.mode, plan, op, args, kwargs)
        else:
            out = op(*args, **kwargs)
        if watched and plan.may_alias_undeclared:
            note_alias(args, out, plan.name)
        return out

    def _run_on_wrappers(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Let the handlers of wrapper subclasses run tracked: what they write may be kept."""
        if not self._acts or active.trackers:
            return func(*args, **kwargs)
        with track(record="none"):
            return func(*args, **kwargs)

    def _kept(self, func: Any, out: Any) -> Any:
        place = place_of(user_frame(sys._getframe(1)))
        op = step_for(func)[1].name if hasattr(func, "_op") else str(func)
        return self.cache.keep(out, op, place, hooks_for(self.respect_saved_tensors_hooks))

    def _file(self, func: Any, args: Any, entry: Any) -> None:
        key = key_in_cache(func, args)
        try:
            self.cache.entries[key].append(entry)
        except KeyError:
            self.cache.entries[key] = [entry]


class CachedMode(_torch_guard.CachedMode):
    """Runs in the recompute of a region."""

    supports_higher_order_operators = True

    def __init__(self, cache: Cache, policy: Policy) -> None:
        super().__init__()
        self.cache = cache
        self._entries = cache.entries
        self._policy = policy
        self._acts = False

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
        if POLICY_IN_FORWARD_ONLY:
            entry = self._find(func, args)
        else:
            entry = self._find_in_queue(func, args, kwargs)
        if entry is not RECOMPUTE:
            return self.cache.take(entry)
        return self._run(func, types, args, kwargs)

    def _run(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        try:
            step, plan = step_for(func)
        except AttributeError:  # a higher-order operator
            return func(*args, **kwargs)
        if not types and not plan.writes:
            return func._op(*args, **kwargs) if kwargs else func._op(*args)
        if not self._acts or active.trackers:
            return func(*args, **kwargs)
        if watched and not all(cls is torch.Tensor for cls in types):
            with track(record="none"):
                return func(*args, **kwargs)
        if plan.writes and step is not None:
            return step(active.mode, plan, func._op, args, kwargs)
        return func(*args, **kwargs)

    def _find(self, func: Any, args: Any) -> Any:
        try:
            key = func._op
        except AttributeError:
            key = _torch_guard.cache_key(func, args)
        counter = self.func_counter
        index = counter[key] = counter.get(key, -1) + 1
        try:
            entries = self._entries[key]
            entry = entries[index]
        except LookupError:
            raise RuntimeError(self._mismatch(func, key, index)) from None
        if entry is RECOMPUTE:
            return entry
        if entry is CONSUMED:
            raise RuntimeError(_EXTRA_TIME)
        entries[index] = CONSUMED
        return entry

    def _mismatch(self, func: Any, key: Any, index: int) -> str:
        which = f" invocation index {index}" if key in self.cache.entries else ""
        return f"{func}{which} encountered during backward but not found in storage. {_MISMATCH}"

    def _find_in_queue(self, func: Any, args: Any, kwargs: Any) -> Any:
        """As torch before 2.13 does it."""
        saving = asks_to_save(self._policy, func, args, kwargs, is_recompute=True)
        if not saving or has_no_result(func):
            return RECOMPUTE
        entries = self.cache.entries.get(key_in_cache(func, args))
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


def asks_to_save(policy: Policy, func: Any, args: Any, kwargs: Any, **facts: Any) -> bool:
    """Whether a policy, or a list of ops, asks to save the op's result.

    Args:
        policy: the policy.
        func: the op.
        args: its positional arguments.
        kwargs: its keyword arguments.
        **facts: what its SelectiveCheckpointContext says.
    """
    if isinstance(policy, list):
        return func in policy
    answer = policy(_Context(**facts), func, *args, **kwargs)
    return answer is True or answer in _SAVING


def key_in_cache(func: Any, args: Any) -> Any:
    """Under what the results of an op are filed; hashing an OpOverload itself runs Python."""
    try:
        return func._op
    except AttributeError:
        return _torch_guard.cache_key(func, args)
