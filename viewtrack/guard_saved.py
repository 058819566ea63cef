"""`guard_saved_tensors`: the guard over everything that autograd saves.

Autograd compares version counters when it unpacks a tensor that it saved itself, and says only that
something was modified. With saved-tensor hooks (offloading, checkpointing) it takes whatever the
unpack hook returns, and there is no check at all. So the guard is a pair of hooks itself: it lays a
watch on what is saved, which keeps nothing alive, and looks at it when it is unpacked. Other hooks
go on working, those that are there already and those that are entered inside. What they return
counts only if it lies in the memory that was saved: a copy on another device cannot be overwritten.
"""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch

from ._torch import guard as _torch_guard
from .ledger import Write
from .mode import Onlooker
from .mutation_text import Mutation, mutation_error
from .op_names import allowed_names
from .owned_watch import SavedWatch, saving, unpacking
from .site import Place, place_of, user_frame
from .step_aside import exchange, is_step_aside
from .watch import Watch, is_allowed, parts
from .weak_watch import WeakWatch, is_watchable

_SUBJECT = "a tensor that autograd saved for backward"
_ALLOW = "add '{op}' to allow="
_hooks: Any = torch.autograd.graph.saved_tensors_hooks

Pack = Callable[[torch.Tensor], Any]
Unpack = Callable[[Any], torch.Tensor]


@contextmanager
def guard_saved_tensors(
    *,
    check: Literal["storage", "content"] = "storage",
    allow: Mapping[Any, str] | Iterable[Any] | None = None,
    on_mutation: Literal["raise", "copy"] = "raise",
) -> Iterator[None]:
    """Guard what autograd saves inside, until backward uses it.

    Where stock torch raises that a saved tensor was modified, this names the line that did it; and
    it goes on where stock torch stops looking: ``.data``, memory that saved-tensor hooks keep, and
    at the content level numpy and raw pointers. Backward may run inside or after; a write that
    happens outside is told without its line, unless it is under `track`.

    A tensor whose memory is emptied and filled again with the same values (sharded parameters that
    are gathered anew) was written as far as ``"storage"`` can see: use ``"content"`` there.

    Args:
        check: ``"storage"``: a write that reached the saved bytes counts. ``"content"``: changed
            bytes count, and writes of equal bytes do not.
        allow: ops whose writes are right, with or without overload, ``{"aten.relu_": "why"}``.
        on_mutation: ``"raise"``, or ``"copy"``: a saved tensor is copied before an op writes to its
            bytes, through any alias, and backward gets the copy. It costs memory for what is
            written only. What nobody sees in time (numpy, pointers, other threads) still raises.
            As ``torch.autograd.graph.allow_mutation_on_saved_tensors``, which takes some writes
            for harmless (to a slice of what is saved, by a custom op) and is wrong in silence.

    Raises:
        MutatedTensorError: in backward, or wherever else a saved tensor is unpacked.
        ValueError: `check` or `on_mutation` has none of its values.
    """
    if check not in ("storage", "content"):
        raise ValueError(f"`check` must be 'storage' or 'content', got {check!r}")
    if on_mutation not in ("raise", "copy"):
        raise ValueError(f"`on_mutation` must be 'raise' or 'copy', got {on_mutation!r}")
    guard = _SavedTensors(check == "content", allowed_names(allow), copies=on_mutation == "copy")
    with ExitStack() as stack:
        stack.enter_context(Onlooker(record="none"))
        stack.enter_context(exchange.wanted())
        outer = _torch_guard.top_saved_tensors_hooks() or (_identity, _identity)
        stack.enter_context(_hooks(*guard.wrap(*outer, steps_aside=True)))
        stack.enter_context(_inner.guarded_by(guard))
        yield


@dataclass(frozen=True, slots=True)
class _Packed:
    """What a pack hook returned, and the watches on the tensor that it was given."""

    value: Any
    watches: tuple[WeakWatch, ...]


class _SavedTensors:
    def __init__(self, content: bool, allowed: frozenset[str], *, copies: bool) -> None:
        self._content = content
        self._copies = copies
        self._allowed = allowed
        self._thread = threading.get_ident()

    def is_mine(self) -> bool:
        """Whether hooks that are entered now are entered inside of the guard."""
        return threading.get_ident() == self._thread

    def wrap(self, pack: Pack, unpack: Unpack, *, steps_aside: bool = False) -> tuple[Pack, Unpack]:
        """The same hooks, guarded."""

        def unpack_checking(packed: _Packed) -> torch.Tensor:
            with unpacking:
                t = unpack(packed.value)
            copy = self._copy(t, packed.watches)
            if copy is not None:
                return copy
            self._check(t, packed.watches)
            return t

        packing = _PackWatching(pack, unpack, self._content, self._copies)
        packing.steps_aside = steps_aside
        return packing, unpack_checking

    def _copy(self, t: Any, watches: Iterable[WeakWatch]) -> torch.Tensor | None:
        """The copy that was made of t before something wrote to it, if t was saved in its place."""
        for weak in watches:
            if is_watchable(t) and (weak.is_on(t) or weak.watch.is_of(t)):
                return weak.watch.copy if isinstance(weak.watch, SavedWatch) else None
        return None

    def _check(self, t: Any, watches: Iterable[WeakWatch]) -> None:
        unpacked = list(parts(t))
        for weak in watches:
            for part in unpacked:
                if is_watchable(part) and (weak.is_on(part) or weak.watch.is_of(part)):
                    found, more = _writes(weak.watch, part)
                    writes = [write for write in found if not is_allowed(write, self._allowed)]
                    if writes:
                        mutation = Mutation(weak.watch, writes, more)
                        raise mutation_error(_SUBJECT, [mutation], _ALLOW)


def _writes(watch: Watch, t: torch.Tensor) -> tuple[list[Write], int]:
    found, more = watch.writes(t)
    if not (isinstance(watch, SavedWatch) and watch.is_of(t) and watch.is_exchanged(t)):
        return found, more
    # Autograd sees `set_` and `t_` of an input that it saved itself, and takes what `.data =` put
    # there for the input: parameters are gathered and given away so.
    return ([watch.exchange()] if found or watch.changed else []), 0


class _PackWatching:
    """A pack hook that watches what it is given.

    It tells torch what hooks of the user's are behind it, in the way of checkpoint's own hooks from
    2.14 on, so that they are found where selective checkpointing looks for them.

    Attributes:
        steps_aside: whether it is the guard's own, and nobody's hook is guarded with it that was
            entered inside.
    """

    _checkpoint_internal = True
    steps_aside = False

    def __init__(self, pack: Pack, unpack: Unpack, content: bool, copies: bool) -> None:
        self._pack = pack
        self._unpack = unpack
        self._content = content
        self._copies = copies

    @property
    def _user_hooks(self) -> tuple[Pack, Unpack] | None:
        if getattr(self._pack, "_checkpoint_internal", False):
            return getattr(self._pack, "_user_hooks", None)
        return None if self._pack is _identity else (self._pack, self._unpack)

    def __call__(self, t: torch.Tensor) -> _Packed:
        place = place_of(user_frame(sys._getframe(1)))
        with saving as which:
            value = self._pack(t)  # what the hook does to the tensor is its own affair
        make = functools.partial(self._watch, t, value, place, which)
        return _Packed(value, tuple(make(part) for part in parts(t) if is_watchable(part)))

    def _watch(
        self, t: torch.Tensor, value: Any, place: Place, which: tuple[int, int], part: torch.Tensor
    ) -> WeakWatch:
        owner = part if value is part else None
        # A wrapper cannot be given other parts, and a nested tensor is none that could be set.
        copies = self._copies and part is t and not part.is_nested
        make = functools.partial(SavedWatch, owner, saving=which, copies=copies)
        return WeakWatch(part, "a tensor", place, content=self._content, make=make)


def _identity(value: Any) -> Any:
    return value


class _Inner:
    """Guards the hooks that are entered inside too: only the innermost pair is ever called.

    Guards of several threads share the one exchange, in whatever order they end.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._is_exchanged = False
        self.guards: tuple[_SavedTensors, ...] = ()
        self.enter = _hooks.__enter__

    @contextmanager
    def guarded_by(self, guard: _SavedTensors) -> Iterator[None]:
        """Have a guard wrap the hooks that its thread enters inside."""
        with self._lock:
            self.guards = (*self.guards, guard)
            if not self._is_exchanged:
                self.enter, _hooks.__enter__ = _hooks.__enter__, _enter_guarded
                self._is_exchanged = True
        try:
            yield
        finally:
            with self._lock:
                self.guards = tuple(other for other in self.guards if other is not guard)
                if not self.guards and _hooks.__enter__ is _enter_guarded:
                    _hooks.__enter__ = self.enter
                    self._is_exchanged = False


_inner = _Inner()


def _enter_guarded(hooks: Any) -> Any:
    own = hooks.pack_hook, hooks.unpack_hook
    # A GraphModule is for the compiler to read.
    if not isinstance(own[0], torch.nn.Module):
        aside = is_step_aside(own[0])  # those of a guard inside of others
        for guard in reversed(_inner.guards):
            if guard.is_mine():
                pair = hooks.pack_hook, hooks.unpack_hook
                hooks.pack_hook, hooks.unpack_hook = guard.wrap(*pair, steps_aside=aside)
    try:
        return _inner.enter(hooks)
    finally:
        hooks.pack_hook, hooks.unpack_hook = own
