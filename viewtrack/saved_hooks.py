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

from .ledger import Entry, ledger
from .site import Place, place_of, site_at, user_frame
from .smuggled import Hazard, brief, is_told, writes_since

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
            if not isinstance(own[0], torch.nn.Module):  # a GraphModule is for the compiler to read
                hooks.pack_hook, hooks.unpack_hook = self._wrap(*own)
            try:
                return enter(hooks)
            finally:
                hooks.pack_hook, hooks.unpack_hook = own

        _hooks.__enter__ = enter_wrapped
        try:
            yield
        finally:
            _hooks.__enter__ = enter

    def _wrap(self, pack: Any, unpack: Any) -> tuple[Any, Any]:
        def pack_noting(t: torch.Tensor) -> _Packed:
            entry = ledger.open(t)
            count = entry.count
            return _Packed(pack(t), entry, count, self._place())

        def unpack_judging(packed: _Packed) -> Any:
            t = unpack(packed.value)
            if isinstance(t, torch.Tensor):
                self._judge(t, packed, pack, unpack)
            return t

        return pack_noting, unpack_judging

    def _judge(self, t: torch.Tensor, packed: _Packed, pack: Any, unpack: Any) -> None:
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
                    keeper=_name(pack),
                    writes=tuple(writes),
                    use=f"by {_name(unpack)} for backward",
                    used=site_at(self._place()),
                )
            )

    def _place(self) -> Place:
        return place_of(user_frame(sys._getframe()), stack=self._stack)


def _name(hook: Any) -> str:
    return str(getattr(hook, "__qualname__", type(hook).__qualname__)).replace(".<locals>", "")
