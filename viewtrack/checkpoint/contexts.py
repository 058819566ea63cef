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
from collections import Counter
from collections.abc import Callable
from itertools import repeat
from typing import TYPE_CHECKING, Any

import torch
from torch.utils import checkpoint as torch_checkpoint

from .._torch import guard as _torch_guard
from .._torch.guard import HAS_EFFECTS, HOOKS_ARE_KNOWN, POLICY_IN_FORWARD_ONLY
from ..mode import active, track
from ..operands import is_complex
from ..plan import Plan
from ..site import place_of, user_frame
from ..step_choice import on_real, step_for
from ..watch import note_alias, watched
from .cache import CONSUMED, RECOMPUTE, Besides, Cache, hooks_for
from .inputs import hinted
from .passing import (
    STEP,
    builtin,
    enter,
    has_effect,
    has_no_result,
    ignored_builtins,
    in_recompute,
    saved_and_table,
    settle,
    when_kept,
    without_result,
    written_besides,
)

if TYPE_CHECKING:
    from typing_extensions import Self

Policy = Callable[..., Any] | list[Any]

_Context: Any = torch_checkpoint.SelectiveCheckpointContext
_CheckpointPolicy = torch_checkpoint.CheckpointPolicy
_SAVING = (_CheckpointPolicy.MUST_SAVE, _CheckpointPolicy.PREFER_SAVE)

_MISMATCH = (
    "This can happen if the operations in the checkpointed region are nondeterministic or depend "
    "on global state that changed between forward and backward."
)
_EXTRA_TIME = (
    "Trying to backward an extra time. You are only allowed to backward once on any region "
    "computed under selective activation checkpoint."
)


_NONE: dict[Any, Any] = {}
_NO_OPS: frozenset[Any] = frozenset()


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
        self._log = cache.log.append
        self._policy = policy
        # A list has a way of its own through the handler, since nobody need be asked.
        plain = POLICY_IN_FORWARD_ONLY and type(policy) is list and cache.inputs is None
        self._listed: Any = policy if plain else None
        self._passing = _NONE
        self._saved = _NO_OPS
        self._acts = False

    def __enter__(self) -> Self:
        self._acts = _regions.depth == 0
        _regions.depth += 1
        if self._listed is not None:
            # What the list says now holds for the whole region: entries are found by their order.
            self._saved, self._passing = saved_and_table(self._listed)
        if self.cache.inputs is not None:
            self.cache.inputs.begin()
        _torch_guard.enter_mode(self)
        return self

    def __exit__(self, *exc: object) -> None:
        _regions.depth -= 1
        if self.cache.inputs is not None:
            self.cache.inputs.end()
        _torch_guard.exit_mode(self, *exc)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        try:
            op = func._op
            run = self._passing[op]
        except (AttributeError, KeyError):
            run = None
        if run is None or types or kwargs:
            return self._look_closer(func, types, args, kwargs or {})
        out = run(*args)
        if out is NotImplemented:
            return self._look_closer(func, types, args, {})
        self._log(op)
        return out

    def _look_closer(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        op = getattr(func, "_op", None)  # a higher-order operator has none
        if op is None or types or self._listed is None or func in torch_checkpoint.SAC_IGNORED_OPS:
            return self._run_and_ask(func, types, args, kwargs)
        if op in self._saved and op in when_kept:
            call, name = when_kept[op]
            out = op(*args, **kwargs) if kwargs else call(*args)
            self._entries[op].append(self._kept(name, out))
            return out
        if op not in self._passing:
            enter(self._passing, func, self._saved)
        step, plan = step_for(func)
        saving = self._saves(func, op) and not without_result[op]
        if step is None or (plan.views and not saving and not plan.writes):
            out = op(*args, **kwargs) if kwargs else op(*args)
        else:
            out = self._run_step(step, plan, op, args, kwargs)
        if saving:
            self._entries[op].append(self._entry(op, plan, args, kwargs, out))
        else:
            self._log(op)
        return out

    def _run_and_ask(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        """The same for any policy, any op, and any torch."""
        inputs = self.cache.inputs
        if inputs is not None:
            inputs.note(func, args, kwargs)
        if func in torch_checkpoint.SAC_IGNORED_OPS:
            return self._run(func, types, args, kwargs)
        saving = not POLICY_IN_FORWARD_ONLY and asks_to_save(
            self._policy, func, args, kwargs, is_recompute=False
        )
        out = self._run(func, types, args, kwargs)
        if self._listed is not None:
            saving = self._saves(func, builtin(func))
        elif POLICY_IN_FORWARD_ONLY:
            saving = asks_to_save(
                self._policy, func, args, kwargs, is_recompute=False, op_output=out
            )
        if saving and not has_no_result(func):
            plan = step_for(func)[1] if hasattr(func, "_op") else None
            self._file(func, args, self._entry(func, plan, args, kwargs, out))
        elif POLICY_IN_FORWARD_ONLY:
            self._file(func, args, RECOMPUTE)
        if inputs is not None:
            inputs.made(out)
        return out

    def _saves(self, func: Any, op: Any) -> bool:
        """Whether the result of an op is kept, where the policy is a list."""
        return op in self._saved or (HAS_EFFECTS and has_effect(func))

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

    def _entry(self, func: Any, plan: Plan | None, args: Any, kwargs: Any, out: Any) -> Any:
        kept = self._kept(plan.name if plan is not None else str(func), out)
        written = written_besides(plan, args, kwargs)
        return Besides(kept, written) if written else kept

    def _kept(self, op: str, out: Any) -> Any:
        place = place_of(user_frame(sys._getframe(1)))
        hooks = hooks_for(self.respect_saved_tensors_hooks) if HOOKS_ARE_KNOWN else None
        return self.cache.keep(out, op, place, hooks)

    def _file(self, func: Any, args: Any, entry: Any) -> None:
        self._entries[key_in_cache(func, args)].append(entry)


class CachedMode(_torch_guard.CachedMode):
    """Runs in the recompute of a region."""

    supports_higher_order_operators = True

    def __init__(self, cache: Cache, policy: Policy) -> None:
        super().__init__()
        self.cache = cache
        self._entries = cache.entries
        self._policy = policy
        self._next: dict[Any, Any] = {}
        self._acts = False

    def __enter__(self) -> Self:
        # From the start, so that a second backward is told that it is one too many.
        self.func_counter.clear()
        self._acts = _regions.depth == 0
        _regions.depth += 1
        if self.cache.log:
            self._expect()
        _torch_guard.enter_mode(self)
        return self

    def __exit__(self, *exc: object) -> None:
        _regions.depth -= 1
        _torch_guard.exit_mode(self, *exc)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        try:
            op = func._op
            run = self._next[op]()
        except (AttributeError, KeyError, StopIteration):
            run = None
        if run is None:
            return self._look_closer(func, types, args, kwargs or {})
        if types or kwargs or run is STEP:
            return self._run(func, types, args, kwargs or {})
        return run(*args)

    def _expect(self) -> None:
        """For each op that was not kept, what passes it on as often as the forward did."""
        count = Counter(self.cache.log)
        self._next = {op: repeat(in_recompute.get(op, STEP), n).__next__ for op, n in count.items()}
        for op in ignored_builtins():
            if op in in_recompute:
                self._next[op] = repeat(in_recompute[op]).__next__

    def _look_closer(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        if func in torch_checkpoint.SAC_IGNORED_OPS:
            return func(*args, **kwargs) if types else self._run(func, types, args, kwargs)
        if POLICY_IN_FORWARD_ONLY:
            entry = self._find(func, key_in_cache(func, args))
        else:
            entry = self._find_in_queue(func, args, kwargs)
        if type(entry) is Besides:
            written = written_besides(step_for(func)[1], args, kwargs)
            entry = entry.kept if entry.is_written(written) else RECOMPUTE
        if entry is not RECOMPUTE:
            return self.cache.take(entry)
        return self._run(func, types, args, kwargs)

    def _run(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        try:
            step, plan = step_for(func)
        except AttributeError:  # a higher-order operator
            return func(*args, **kwargs)
        if not types and not plan.writes:
            op = func._op
            if op not in in_recompute:
                settle(func)
            acts = self._acts and not active.trackers
            if acts and step is not None and op in on_real and is_complex(args):
                return step(active.mode, plan, op, args, kwargs)
            return op(*args, **kwargs) if kwargs else op(*args)
        if not self._acts or active.trackers:
            return func(*args, **kwargs)
        if watched and not all(cls is torch.Tensor for cls in types):
            with track(record="none"):
                return func(*args, **kwargs)
        if plan.writes and step is not None:
            return step(active.mode, plan, func._op, args, kwargs)
        return func(*args, **kwargs)

    def _find(self, func: Any, key: Any) -> Any:
        counter = self.func_counter
        index = counter[key] = counter.get(key, -1) + 1
        try:
            entries = self._entries[key]
            entry = entries[index]
        except IndexError:
            error = RuntimeError(self._mismatch(func, key, index))
            raise hinted(error, self.cache.inputs) from None
        if entry is RECOMPUTE:
            return entry
        if entry is CONSUMED:
            raise RuntimeError(_EXTRA_TIME)
        entries[index] = CONSUMED
        return entry

    def _mismatch(self, func: Any, key: Any, index: int) -> str:
        passed = self.cache.log.count(key)
        which = f" invocation index {index + passed}" if passed or self._entries[key] else ""
        return f"{func}{which} encountered during backward but not found in storage. {_MISMATCH}"

    def _find_in_queue(self, func: Any, args: Any, kwargs: Any) -> Any:
        """As torch before 2.13 does it."""
        saving = asks_to_save(self._policy, func, args, kwargs, is_recompute=True)
        if not saving or has_no_result(func):
            return RECOMPUTE
        entries = self.cache.entries.get(key_in_cache(func, args))
        if entries is None:
            error = RuntimeError(f"{func} encountered during backward, but not found in storage")
            raise hinted(error, self.cache.inputs)
        if not entries:
            raise RuntimeError(_EXTRA_TIME)
        return entries.pop(0)


class CheckedCachedMode(CachedMode):
    """The same where what the region starts from is watched too; its cache has `inputs`."""

    def __enter__(self) -> Self:
        if self.cache.inputs is not None:
            self.cache.inputs.check()
        return super().__enter__()

    def __exit__(self, *exc: object) -> None:
        try:
            super().__exit__(*exc)
        finally:
            if self.cache.inputs is not None:
                self.cache.inputs.finish(exc[0] is not None)

    def _look_closer(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        if self.cache.inputs is not None:
            self.cache.inputs.follow(func, args, kwargs)
        return super()._look_closer(func, types, args, kwargs)


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
        answer: Any = func in policy
    else:
        answer = policy(_Context(**facts), func, *args, **kwargs)
    if answer is True or answer in _SAVING:
        return True
    insists = answer is _CheckpointPolicy.MUST_RECOMPUTE
    return HAS_EFFECTS and not insists and has_effect(func)


def key_in_cache(func: Any, args: Any) -> Any:
    """Under what the results of an op are filed; hashing an OpOverload itself runs Python."""
    try:
        return func._op
    except AttributeError:
        return _torch_guard.cache_key(func, args)
