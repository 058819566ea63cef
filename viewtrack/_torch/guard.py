"""Private torch that the guard needs: selective checkpointing, saved-tensor hooks, collectives.

Under the rules of the package: every name is checked by
`tests/test_torch_contract.py`, and was tried on torch 2.6.0, 2.9.1, 2.13.0 and 2.14.1.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import checkpoint as _checkpoint

from . import (
    ADINPLACEORVIEW,
    OpOverload,
    QuietMode,
    TensorBase,
    TorchDispatchMode,
    as_view_version_only,
    is_excluded,
    mode_stack_len,
    no_torch_function,
    set_excluded,
    tree_map,
)
from .nested import is_strided_nested

__all__ = [
    "HAS_EFFECTS",
    "HOOKS_ARE_KNOWN",
    "POLICY_IN_FORWARD_ONLY",
    "CachedMode",
    "CachingMode",
    "HandedOut",
    "cache_key",
    "counter_of",
    "enter_mode",
    "exit_mode",
    "is_compiling",
    "is_on_gloo",
    "is_saved_unasked",
    "is_stock_caching",
    "look_at_entries",
    "no_torch_dispatch",
    "top_saved_tensors_hooks",
    "user_saved_tensors_hooks",
    "wait_for",
]

no_torch_dispatch: Callable[[], AbstractContextManager[None]] = torch._C._DisableTorchDispatch
"""Switch off __torch_dispatch__ of modes and subclasses inside, and autograd with it."""

POLICY_IN_FORWARD_ONLY = (
    "op_output" in inspect.signature(_checkpoint.SelectiveCheckpointContext.__init__).parameters
)
"""How torch's selective checkpointing finds an op's entry again.

From 2.13 on the policy is asked in the forward only, after the op, and entries are found by index.
Before, it is asked before the op in both passes, and entries are taken from a queue.
"""


_is_cacheable_effect: Any = getattr(_checkpoint, "_is_cacheable_effect", None)

HAS_EFFECTS = _is_cacheable_effect is not None
"""Whether torch's selective checkpointing saves unasked what has an effect: from 2.15 on."""

_with_effects: dict[str, Any] = torch._library.simple_registry.singleton._data


def is_saved_unasked(op: Any, name: str, is_aten: bool) -> bool:
    """Whether torch saves an op's result where the policy does not insist on a recompute.

    Torch asks its registry, which costs as much as an op. Of ATen's ops, only those that the
    registry knows can have an effect; of others, those that take an object of TorchBind as well.

    Args:
        op: the op.
        name: its name, ``"aten::add_.Tensor"``.
        is_aten: whether it is one of torch's own.
    """
    if not HAS_EFFECTS or (is_aten and name not in _with_effects):
        return False
    return bool(_is_cacheable_effect(op))


class CachingMode(QuietMode, _checkpoint._CachingTorchDispatchMode):
    """The class that torch looks for in a context_fn's pair, to hand it its options."""

    def __init__(self) -> None:
        # Not the parent's own, whose signature differs over versions.
        TorchDispatchMode.__init__(self)


class CachedMode(QuietMode, _checkpoint._CachedTorchDispatchMode):
    """The counterpart of `CachingMode` in recompute."""

    def __init__(self) -> None:
        TorchDispatchMode.__init__(self)
        self.func_counter: dict[Any, int] = {}  # from 2.13 on the parent's __enter__ clears it


# The way to these by super() goes through three classes, which add nothing.
enter_mode: Callable[[Any], Any] = TorchDispatchMode.__enter__
exit_mode: Callable[..., None] = TorchDispatchMode.__exit__


def is_stock_caching(context: Any) -> bool:
    """Whether a context is the first of torch's own pair."""
    return isinstance(context, _checkpoint._CachingTorchDispatchMode)


@dataclass(frozen=True, slots=True)
class HandedOut:
    """A value that came out of the cache of torch's own pair.

    Attributes:
        value: the value.
        moved: what its version was when it was cached, and is now, if torch would have raised.
    """

    value: Any
    moved: tuple[int, int] | None


class _Entry:
    """Stands for one value in the cache of torch's own pair: its check reports, and lets pass."""

    def __init__(self, entry: Any, report: Callable[[HandedOut], None]) -> None:
        self._entry = entry
        self._report = report

    def get_val(self, allow_cache_entry_mutation: bool) -> Any:
        moved = None
        if self._entry.version is not None and not allow_cache_entry_mutation:
            versions = self._entry.version, self._entry.val._version
            moved = versions if versions[0] != versions[1] else None
        value = self._entry.get_val(True)
        self._report(HandedOut(value, moved))
        return value


def look_at_entries(below: int, report: Callable[[HandedOut], None]) -> None:
    """Have it told what the recompute's contexts of torch hand out, in place of their own check.

    Relies on the entries in their cache being asked by ``get_val(allow_cache_entry_mutation)``.

    Args:
        below: how many modes of the stack not to look at.
        report: called with each value.
    """
    for index in range(below, mode_stack_len()):
        mode: Any = torch._C._get_dispatch_stack_at(index)
        storage = getattr(mode, "storage", None)
        if isinstance(mode, _checkpoint._CachedTorchDispatchMode) and isinstance(storage, dict):
            for entries in storage.values():
                places = entries if isinstance(entries, dict) else range(len(entries))
                for place in places:
                    entries[place] = tree_map(lambda x: _entry(x, report), entries[place])


def _entry(x: Any, report: Callable[[HandedOut], None]) -> Any:
    return _Entry(x, report) if type(x) is _checkpoint._VersionWrapper else x


_TRACING = tuple(
    getattr(torch._C._TorchDispatchModeKey, name) for name in ("PROXY", "FUNCTIONAL", "FAKE")
)


def is_compiling() -> bool:
    """Whether torch.compile or torch.export is at work here, or tensors are fake.

    Torch's own checkpoint asks for PROXY alone; a trace has a first run without it.
    """
    if not mode_stack_len():  # nearly always; it counts these too
        return False
    return any(torch._C._get_dispatch_mode(key) is not None for key in _TRACING)


def cache_key(func: Any, args: Any) -> Any:
    """Under what torch's selective checkpointing files the result of a higher-order op.

    From 2.13 on each compiled region has a queue of its own; see pytorch issue 175258.
    """
    key = getattr(_checkpoint, "_sac_storage_key", None)
    return func if key is None or isinstance(func, OpOverload) else key(func, args)


def top_saved_tensors_hooks() -> tuple[Any, Any] | None:
    """The pair of saved-tensor hooks that a tensor saved now would meet; None before 2.7."""
    top = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)
    return None if top is None else top(False)


_user_hooks: Any = getattr(_checkpoint, "_current_user_saved_tensors_hooks", None)

HOOKS_ARE_KNOWN = _user_hooks is not None
"""Whether torch's selective checkpointing minds the user's saved-tensor hooks, as from 2.14 on."""


def user_saved_tensors_hooks() -> tuple[Any, Any] | None:
    """The same without checkpoint's own; None where nothing asks for it."""
    return _user_hooks() if HOOKS_ARE_KNOWN else None


def counter_of(t: torch.Tensor) -> torch.Tensor:
    """An empty tensor that shares t's version counter and keeps none of its memory alive.

    No mode sees it made. Relies on the ADInplaceOrView kernel of detach, and on ``set_`` moving no
    counter where that key is excluded.
    """
    with no_torch_dispatch(), no_torch_function(), torch.no_grad():
        if is_strided_nested(t):  # it has no `set_`
            counter = torch.empty(0)
            as_view_version_only(counter, t)
            return counter
        was = is_excluded(ADINPLACEORVIEW)
        try:
            set_excluded(ADINPLACEORVIEW, False)
            counter = TensorBase.detach(t)
            set_excluded(ADINPLACEORVIEW, True)
            counter.set_()  # type: ignore[call-overload]
        finally:
            set_excluded(ADINPLACEORVIEW, was)
    return counter


def is_on_gloo(boxed_group: Any, t: torch.Tensor) -> bool:
    """Whether gloo does what a group, as ``c10d`` ops are passed it, is asked to do with `t`."""
    group: Any = torch.distributed.ProcessGroup.unbox(boxed_group)
    return bool(group._get_backend(t.device).name() == "gloo")


def wait_for(t: torch.Tensor) -> None:
    """Wait until the functional collective that returned `t` has written it, if one has to.

    Relies on ``wait_tensor`` doing nothing for any other tensor. torch may be built without
    torch.distributed.
    """
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        torch.ops._c10d_functional.wait_tensor.default(t)
