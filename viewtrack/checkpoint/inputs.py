"""What a checkpointed region starts from: tensors that it did not make, and attributes of modules.

The recompute starts from what they are by then. If the forward itself has changed them (a counter,
a running statistic, a buffer made at the first call), the recompute computes something else, or
meets ops that the forward did not. Plain checkpointing has the same hole.

Tensors are looked at when the recompute begins, the attributes of a module when it is entered
again. Numbers and the like that have changed are told there. A tensor that has taken the place of
another, or of None, is told where the recompute reads it and the forward did not, or does another
op. So is what has changed of a module that is passed by, because it was entered once. A module that
comes after the end of the recompute (early stop) is not looked at: nothing that was computed came
from it.
"""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch.nn.modules.module import register_module_forward_pre_hook

from ..ledger import key_of
from ..mutation_text import Mutation, mutation_error
from ..operands import tensors
from ..site import Place, place_of, site_at, user_frame
from ..weak_watch import WeakWatch, is_watchable
from .attributes import Attributes, Change
from .course import Course
from .options import Options

_SUBJECT = "what a checkpointed region starts from"
_ALLOW = "add '{op}' to allow="


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
    """The inputs of one region, from the start of its forward to the end of its recompute."""

    def __init__(self, options: Options) -> None:
        self._options = options
        self._watches: dict[int, WeakWatch] = {}
        self._tensors: dict[int, weakref.ref[torch.Tensor]] = {}
        self._made: dict[int, tuple[weakref.ref[Any], Place]] = {}
        self._attributes = Attributes(self._is_made, self._origin)
        self._course = Course()
        self._suspects: dict[int, list[Change]] = {}
        self._entered_again: set[int] = set()
        self._hooks: list[Any] = []
        self._thread = 0

    def begin(self) -> None:
        """The forward begins: look at modules as they are entered."""
        self._thread = threading.get_ident()
        self._hooks.append(register_module_forward_pre_hook(self._enter))

    def end(self) -> None:
        """The forward or the recompute has ended, or raised."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    def note(self, func: Any, args: Any, kwargs: Any) -> None:
        """Watch the tensors that an op is about to read, unless the region made them."""
        self._course.add(func, args, kwargs)
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
        self._thread = threading.get_ident()
        self._course.begin()
        self._entered_again.clear()
        mutations = [m for key in self._watches if (m := self._mutation(key)) is not None]
        self._suspects = self._attributes.all_changes(self._options.allow)
        if mutations:
            self._tell([c for c in self._all_suspects() if c.tensor], mutations)
        self._hooks.append(register_module_forward_pre_hook(self._enter_again))

    def follow(self, func: Any, args: Any, kwargs: Any) -> None:
        """The recompute is about to do an op.

        Raises:
            MutatedTensorError: it does something else than the forward, for what has changed.
        """
        if not any(self._suspects.values()):
            self._course.follow(func, args, {})  # all the same it is to be known how far it is
            return
        keys = self._course.follow(func, args, kwargs)
        changes = self._all_suspects()
        if keys is not None:
            changes = [c for c in changes if c.tensor and any(c.tensor.is_on(key) for key in keys)]
        self._tell(changes)

    def finish(self, stopped: bool) -> None:
        """The recompute has ended.

        Args:
            stopped: whether by an exception, as early stop ends it.

        Raises:
            MutatedTensorError: it left out what the forward did, for what has changed.
        """
        self.end()
        at = self._course.at
        missed = not stopped and at < len(self._course)
        changes: list[Change] = []
        for key, found in self._suspects.items():
            passed = key not in self._entered_again and self._attributes.entered_at[key] <= at
            changes += found if missed or passed else []
        self._tell(changes)

    def _enter(self, module: torch.nn.Module, args: Any) -> None:
        if threading.get_ident() == self._thread:
            self._attributes.note(module, len(self._course))

    def _enter_again(self, module: torch.nn.Module, args: Any) -> None:
        if threading.get_ident() != self._thread or id(module) in self._entered_again:
            return
        self._entered_again.add(id(module))
        changes = self._attributes.changes(module, self._options.allow)
        self._suspects[id(module)] = changes
        if any(change.tensor is None for change in changes):
            self._tell(changes)

    def _all_suspects(self) -> list[Change]:
        return [change for found in self._suspects.values() for change in found]

    def _tell(self, changes: list[Change], mutations: Sequence[Mutation] = ()) -> None:
        if not changes and not mutations:
            return
        for key, found in self._suspects.items():
            self._suspects[key] = [c for c in found if c not in changes]  # told once
        notes = [change.note for change in changes]
        self._options.react(mutation_error(_SUBJECT, mutations, _ALLOW, notes=notes))

    def _mutation(self, key: int) -> Mutation | None:
        watch, (name, t) = self._watches[key].watch, self._attributes.named(key)
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

    def _is_made(self, t: torch.Tensor) -> bool:
        """Whether the region made a tensor."""
        if not is_watchable(t) or key_of(t) not in self._made:
            return False
        return self._made[key_of(t)][0]() is not None

    def _origin(self, value: Any) -> str:
        """Where the region made a tensor, if it did."""
        return f", made at {site_at(self._made[key_of(value)][1])}" if self._is_made(value) else ""
