"""Tensors that saved-tensor hooks kept, and that were written before backward used them.

Autograd compares version counters when it unpacks a tensor that it saved itself. With hooks it
takes whatever the unpack hook returns, so a hook that keeps the tensor, or an alias of it, makes
the check vanish. While `SavedTensors` watches, each pair of hooks that is entered gets a wrapper
that notes how often the storage had been written when the tensor was packed.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from ._torch.dynamo import skip_dynamo
from .ledger import Entry, ledger
from .site import Place, place_of, site_at, user_frame
from .smuggled import Hazard, brief, is_told, name_of, notes_in, through, writes_since

_hooks: Any = torch.autograd.graph.saved_tensors_hooks


@dataclass(frozen=True, slots=True)
class _Packed:
    """What a pack hook returned, and what was known of the tensor when it was called."""

    value: Any
    entry: Entry  # of the packed tensor's storage; it does not keep the storage alive
    count: int  # of the writes to it at that time
    place: Place


class SavedTensors:
    """Finds hazards among what saved-tensor hooks keep.

    Args:
        found: called with each hazard.
        stack: whether the lines of a hazard come with their Python stacks.
    """

    def __init__(self, found: Callable[[Hazard], None], *, stack: bool = False) -> None:
        self._found = found
        self._stack = stack

    @contextmanager
    def watch(self) -> Iterator[None]:
        """Wrap all hooks that are entered inside."""
        enter = _hooks.__enter__

        def enter_wrapped(hooks: Any) -> Any:
            own = hooks.pack_hook, hooks.unpack_hook
            # What the compiler traces, or put there for itself to read, is left alone.
            if torch.compiler.is_compiling() or isinstance(own[0], torch.nn.Module):
                return enter(hooks)
            keeper = name_of(own[0] if type(hooks) is _hooks else type(hooks))
            hooks.pack_hook = _Pack(own[0], self, keeper)
            hooks.unpack_hook = _Unpack(own[1], self, keeper)
            try:
                return enter(hooks)
            finally:
                hooks.pack_hook, hooks.unpack_hook = own

        _hooks.__enter__ = enter_wrapped
        try:
            yield
        finally:
            _hooks.__enter__ = enter

    def judge(self, t: torch.Tensor, packed: _Packed, keeper: str) -> None:
        """Look whether what an unpack hook returned was written since it was packed."""
        entry = packed.entry
        if entry.count == packed.count or ledger.entry(t) is not entry:
            return
        writes = writes_since(entry, packed.count, t)
        if writes and not is_told(entry, writes):
            self._found(
                Hazard(
                    op="",
                    result=brief(t),
                    saved=site_at(packed.place),
                    keeper=keeper,
                    writes=tuple(writes),
                    use="in backward, which does not check what a hook hands out",
                    used=site_at(self.place()),
                    through=through(entry, writes),
                )
            )

    def place(self) -> Place:
        """The user's line that is running."""
        return place_of(user_frame(sys._getframe()), stack=self._stack)


class _Hook:
    """Stands in for a hook. Its attributes are the hook's: torch's own checkpoint marks some."""

    def __init__(self, hook: Any, saved: SavedTensors, keeper: str) -> None:
        self._hook = hook
        self._saved = saved
        self._keeper = keeper

    def __getattr__(self, name: str) -> Any:
        return getattr(self._hook, name)


class _Pack(_Hook):
    @skip_dynamo
    def __call__(self, t: torch.Tensor) -> _Packed:
        entry = ledger.open(t)
        notes_in(entry)  # from here on aliases that no schema tells of are noted
        count = entry.count
        return _Packed(self._hook(t), entry, count, self._saved.place())


class _Unpack(_Hook):
    @skip_dynamo
    def __call__(self, packed: _Packed) -> Any:
        t = self._hook(packed.value)
        if isinstance(t, torch.Tensor):
            self._saved.judge(t, packed, self._keeper)
        return t
