"""What a checkpointed region starts from: tensors that it did not make, and attributes of modules.

The recompute starts from what they are by then. If the forward itself has changed them (a counter,
a running statistic, a buffer made at the first call), the recompute computes something else, or
meets ops that the forward did not. Plain checkpointing has the same hole.
"""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch.nn.modules.module import register_module_forward_pre_hook

from ..aliasing import shape_of
from ..ledger import key_of
from ..mutation_text import Mutation, brief, mutation_error
from ..operands import tensors
from ..site import Place, place_of, site_at, user_frame
from ..weak_watch import WeakWatch, is_watchable
from .options import Options

_SUBJECT = "what a checkpointed region starts from"
_ALLOW = "add '{op}' to allow="
_ABSENT = "absent"


_HINT = (
    "viewtrack: if the forward changes what the recompute starts from (an attribute of a module, a "
    "buffer, a captured tensor), `check_inputs=True` names what changed, and the line"
)


def hinted(error: RuntimeError, inputs: Inputs | None) -> RuntimeError:
    """An error that the recompute went another way than the forward, with a hint to the cause.

    Python 3.10 has no notes; there nothing happens.
    """
    unknown = inputs is None and "encountered during backward" in str(error)
    if unknown and hasattr(error, "add_note") and _HINT not in getattr(error, "__notes__", ()):
        error.add_note(_HINT)
    return error


class Inputs:
    """The inputs of one region, from the start of its forward to the start of its recompute."""

    def __init__(self, options: Options) -> None:
        self._options = options
        self._watches: dict[int, WeakWatch] = {}
        self._tensors: dict[int, weakref.ref[torch.Tensor]] = {}
        self._made: dict[int, tuple[weakref.ref[Any], Place]] = {}
        self._modules: list[tuple[torch.nn.Module, dict[str, Any]]] = []
        self._hooks: list[Any] = []
        self._thread = 0

    def begin(self) -> None:
        """The forward begins: look at modules as they are entered."""
        self._thread = threading.get_ident()
        self._hooks.append(register_module_forward_pre_hook(self._entered))

    def end(self) -> None:
        """The forward has ended, or raised."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    def note(self, args: Any, kwargs: Any) -> None:
        """Watch the tensors that an op is about to read, unless the region made them."""
        for t in tensors((args, tuple(kwargs.values()))):
            if is_watchable(t) and key_of(t) not in self._made and key_of(t) not in self._watches:
                place = place_of(user_frame(sys._getframe(2)))
                weak = WeakWatch(t, "an input", place, content=self._options.content)
                weak.watch.ignore_size()  # sharded parameters are away between the passes
                self._watches[key_of(t)] = weak
                self._tensors[key_of(t)] = weakref.ref(t)

    def made(self, out: Any) -> None:
        """Note that the region made these."""
        for t in tensors(out):
            if is_watchable(t) and key_of(t) not in self._watches:
                place = place_of(user_frame(sys._getframe(2)))
                self._made[key_of(t)] = weakref.ref(t.untyped_storage()), place

    def check(self) -> None:
        """The recompute begins.

        Raises:
            MutatedTensorError: something that the forward read has changed since.
        """
        self.end()
        attributes = list(self._changed_attributes())
        mutations = [m for key in self._watches if (m := self._mutation(key)) is not None]
        if not attributes and not mutations:
            return
        error = mutation_error(_SUBJECT, mutations, _ALLOW, notes=attributes)
        self._options.react(error)

    def _entered(self, module: torch.nn.Module, args: Any) -> None:
        if threading.get_ident() == self._thread and all(m is not module for m, _ in self._modules):
            self._modules.append((module, {k: _kept(v) for k, v in _attributes(module)}))

    def _mutation(self, key: int) -> Mutation | None:
        watch, (name, t) = self._watches[key].watch, self._named(key)
        if name in self._options.allow:
            return None
        t = self._tensors[key]() if t is None else t
        if t is None and watch.has_fingerprint:
            found = self._options.noted_on(watch)  # there are no bytes to look at any more
        else:
            found = self._options.mutation_of((watch,), t)
        if found is not None:
            watch.rename(name)
        return found

    def _named(self, key: int) -> tuple[str, torch.Tensor | None]:
        for module, _ in self._modules:
            for name, value in _attributes(module):
                if is_watchable(value) and key_of(value) == key:
                    return f"{type(module).__name__}.{name}", value
        return "an input", None

    def _changed_attributes(self) -> Iterator[str]:
        for module, before in self._modules:
            now = dict(_attributes(module))
            for name in {**before, **now}:
                label = f"{type(module).__name__}.{name}"
                if name in before:
                    old = before[name]
                else:
                    old = _kept(getattr(type(module), name, _ABSENT))
                if label not in self._options.allow and not _is_same(old, now.get(name, _ABSENT)):
                    value = now.get(name, _ABSENT)
                    yield (
                        f"`{label}` was {_shown(old)} when the forward began and is "
                        f"{_shown(value)} now{self._origin(value)}; "
                        f"if it may, add {label!r} to allow="
                    )

    def _origin(self, value: Any) -> str:
        """Where the region made a tensor, if it did."""
        if not is_watchable(value) or key_of(value) not in self._made:
            return ""
        storage, place = self._made[key_of(value)]
        return f", made at {site_at(place)}" if storage() is not None else ""


def _attributes(module: torch.nn.Module) -> Iterator[tuple[str, Any]]:
    """What a module holds by value: its tensors, numbers, strings, and None."""
    for values in (module._parameters, module._buffers, vars(module)):
        for name, value in values.items():
            if value is None or isinstance(value, (torch.Tensor, int, float, str)):
                yield name, value


def _kept(value: Any) -> Any:
    return weakref.ref(value) if isinstance(value, torch.Tensor) else value


def _is_same(old: Any, now: Any) -> bool:
    if isinstance(old, weakref.ref):
        return old() is now
    return type(old) is type(now) and bool(old == now)


def _shown(value: Any) -> str:
    if isinstance(value, weakref.ref):
        t = value()
        return "another tensor" if t is None else brief(t.dtype, shape_of(t))
    if isinstance(value, torch.Tensor):
        return brief(value.dtype, shape_of(value))
    return value if value is _ABSENT else repr(value)
