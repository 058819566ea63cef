"""What the modules of a region held when its forward entered them, and hold in its recompute.

A module is looked at when it is entered: what is put into it for one call, as
`torch.func.functional_call` does, is there no sooner, and is gone afterwards.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from ..aliasing import shape_of
from ..ledger import key_of
from ..mutation_text import brief
from ..overlap import region_of
from ..weak_watch import is_watchable

_ABSENT = "absent"
_MADE: Any = object()  # a tensor that the region had made: the recompute makes another


@dataclass(frozen=True, slots=True)
class Change:
    """An attribute that is not what it was when the forward entered its module.

    Attributes:
        label: its name, ``"Gate.load"``.
        note: what it was and is.
        tensor: what holds the tensor that it is now; None if it is another value.
        was_tensor: whether it was a tensor.
    """

    label: str
    note: str
    tensor: _Held | None
    was_tensor: bool


class _Held:
    """A tensor, kept alive by nobody here: known by itself, and by the bytes that it shows."""

    __slots__ = ("_dtype", "_ref", "_region", "_storage", "key", "text")

    def __init__(self, t: torch.Tensor) -> None:
        self._ref = weakref.ref(t)
        self._dtype = t.dtype
        self._storage: Any = None
        self.text = brief(t.dtype, shape_of(t))
        if is_watchable(t):
            self.key, self._region = key_of(t), region_of(t)
            self._storage = weakref.ref(t.untyped_storage())

    def get(self) -> torch.Tensor | None:
        """The tensor, if it lives."""
        return self._ref()

    def is_on(self, key: int) -> bool:
        """Whether it lies in the storage of this key, which is one that lives."""
        return self._storage is not None and self._storage() is not None and self.key == key

    def is_same(self, now: Any) -> bool:
        """Whether a value is the tensor, or another on the same bytes (a view made anew)."""
        if self._ref() is now:
            return True
        if not is_watchable(now) or not self.is_on(key_of(now)):
            return False
        return bool(now.dtype == self._dtype and region_of(now) == self._region)


class Attributes:
    """The attributes of the modules that a region enters.

    Args:
        is_made: whether the region made a tensor.
        origin: where it made it, in words; empty if it did not.

    Attributes:
        entered_at: after how many ops the forward entered a module, by the id of the module.
    """

    def __init__(
        self, is_made: Callable[[torch.Tensor], bool], origin: Callable[[Any], str]
    ) -> None:
        self._is_made = is_made
        self._origin = origin
        self._modules: dict[int, tuple[torch.nn.Module, dict[str, Any]]] = {}
        self.entered_at: dict[int, int] = {}

    def note(self, module: torch.nn.Module, after: int) -> None:
        """The forward enters a module, after so many ops; the first time counts."""
        if id(module) not in self._modules:
            values = {name: self._kept(value) for name, value in _attributes(module)}
            self._modules[id(module)] = module, values
            self.entered_at[id(module)] = after

    def named(self, key: int) -> tuple[str, torch.Tensor | None]:
        """The label of an attribute on a storage, and its tensor."""
        for module, before in self._modules.values():
            for name, value in _attributes(module):
                if is_watchable(value) and key_of(value) == key:
                    return f"{type(module).__name__}.{name}", value
            for name, old in before.items():
                if isinstance(old, _Held) and old.is_on(key):
                    return f"{type(module).__name__}.{name}", old.get()
        return "an input", None

    def all_changes(self, allowed: Collection[str]) -> dict[int, list[Change]]:
        """The changes before any module is entered again, by the id of the module.

        A tensor that was put in for the call is out by now, and no change.
        """
        found: dict[int, list[Change]] = {}
        for key, (module, _) in self._modules.items():
            changes = self.changes(module, allowed)
            found[key] = [
                c
                for c in changes
                if not c.was_tensor or (c.tensor is not None and self._by_region(c))
            ]
        return found

    def changes(self, module: torch.nn.Module, allowed: Collection[str]) -> list[Change]:
        """What is not as it was when the forward entered the module."""
        _, before = self._modules.get(id(module), (None, None))
        if before is None:
            return []
        now = dict(_attributes(module))
        found = (self._change(module, name, before, now) for name in {**before, **now})
        return [c for c in found if c is not None and c.label not in allowed]

    def _change(
        self, module: torch.nn.Module, name: str, before: dict[str, Any], now: dict[str, Any]
    ) -> Change | None:
        value = now.get(name, _ABSENT)
        # What the class says holds until the module itself has the attribute.
        old = before[name] if name in before else self._kept(getattr(type(module), name, _ABSENT))
        if _is_same(old, value):
            return None
        label = f"{type(module).__name__}.{name}"
        note = (
            f"`{label}` was {_shown(old)} when the forward began and is {_shown(value)} now"
            f"{self._origin(value)}; if it may, add {label!r} to allow="
        )
        tensor = _Held(value) if isinstance(value, torch.Tensor) else None
        return Change(label, note, tensor, old is _MADE or isinstance(old, _Held))

    def _by_region(self, change: Change) -> bool:
        t = change.tensor.get() if change.tensor is not None else None
        return t is not None and self._is_made(t)

    def _kept(self, value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        return _MADE if self._is_made(value) else _Held(value)


def _attributes(module: torch.nn.Module) -> Iterator[tuple[str, Any]]:
    """What a module holds by value: its tensors, numbers, strings, and None."""
    for values in (module._parameters, module._buffers, vars(module)):
        for name, value in values.items():
            if value is None or isinstance(value, (torch.Tensor, int, float, str)):
                yield name, value


def _is_same(old: Any, now: Any) -> bool:
    if old is _MADE:
        return isinstance(now, torch.Tensor)
    if isinstance(old, _Held):
        return old.is_same(now)
    return type(old) is type(now) and bool(old == now)


def _shown(value: Any) -> str:
    if value is _MADE:
        return "a tensor that the forward made"
    if isinstance(value, _Held):
        return value.text if value.get() is not None else "another tensor"
    if isinstance(value, torch.Tensor):
        return brief(value.dtype, shape_of(value))
    return value if value is _ABSENT else repr(value)
