"""What a checkpointed region keeps from its forward to its recompute."""

from __future__ import annotations

import warnings
import weakref
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import torch

from .. import _torch
from .._torch import ADINPLACEORVIEW, TensorBase, set_excluded
from .._torch import guard as _torch_guard
from ..site import Place
from ..watch import Watch, parts
from ..weak_watch import WeakWatch, is_watchable
from .inputs import Inputs
from .options import Options

RECOMPUTE: Any = object()
"""Stands for an op's result that is not kept."""

CONSUMED: Any = object()
"""Stands for one that was kept and has been used."""

_detach = TensorBase.detach

# What checkpoint() of torch 2.14 says, too, before the tensors that it keeps pass by the hooks.
_BYPASSED = (
    "a saved_tensors_hooks context (save_on_cpu, say) is active around a selectively checkpointed "
    "region, and the tensors that the region keeps bypass its hooks; choose by passing "
    "respect_saved_tensors_hooks=True or False to torch.utils.checkpoint.checkpoint"
)


class Kept:
    """A kept tensor that is more than one plain tensor: a wrapper with parts, or a packed one.

    Of what a hook has packed nothing is known until it is unpacked: it may be a copy, or the very
    memory again, as with `save_on_cpu` for a tensor that is there already.
    """

    __slots__ = ("packed_from", "unpack", "value", "watches")

    def __init__(
        self, value: Any, watches: list[Watch], packed_from: list[WeakWatch], unpack: Any
    ) -> None:
        self.value = value
        self.watches = watches
        self.packed_from = packed_from
        self.unpack = unpack

    def watches_for(self, t: Any) -> Iterator[tuple[Watch, torch.Tensor]]:
        """The watches on the memory that what was unpacked lies in, with the part of it."""
        for part in parts(t):
            for weak in self.packed_from:
                if is_watchable(part) and weak.is_on(part):
                    yield weak.watch, part


class Besides:
    """What was kept of an op that writes an argument besides what it returns.

    Handing that out leaves out the write. So it is handed out only where what was written is still
    there; what the recompute has made anew (the noise of `rrelu_with_noise`) is to be written too.
    """

    __slots__ = ("_storages", "kept")

    def __init__(self, kept: Any, written: list[torch.Tensor]) -> None:
        self.kept = kept
        self._storages = [weakref.ref(t.untyped_storage()) for t in written if is_watchable(t)]

    def is_written(self, tensors: list[torch.Tensor]) -> bool:
        """Whether these are what the forward has written."""
        given = [t.untyped_storage() for t in tensors if is_watchable(t)]
        return len(given) == len(self._storages) and all(
            (was := ref()) is not None and was._cdata == now._cdata
            for ref, now in zip(self._storages, given, strict=True)
        )


class Cache:
    """The kept results of a region's ops.

    Attributes:
        entries: for each op its results, in order: a `Watch`, a `Kept` or a tensor, or a tree of
            these, or that in a `Besides`; or RECOMPUTE, or CONSUMED.
        log: the ops that ran whose results a list of ops leaves out; they have no entries.
        inputs: what the region starts from, where that is watched.
    """

    def __init__(self, options: Options) -> None:
        self.options = options
        self.inputs = Inputs(options) if options.check_inputs else None
        self.entries: defaultdict[Any, list[Any]] = defaultdict(list)
        self.log: list[Any] = []

    def keep(self, out: Any, op: str, place: Place, hooks: Any) -> Any:
        """Make an entry of what an op returned. Run it in a handler."""
        if type(out) is torch.Tensor and hooks is None:
            set_excluded(ADINPLACEORVIEW, False)  # as `detached`
            try:
                t = _detach(out)
            finally:
                set_excluded(ADINPLACEORVIEW, True)
            check = self.options.check
            return t if check == "off" else Watch(t, op, place, content=check == "content")
        return _torch.tree_map(lambda x: self._keep_one(x, op, place, hooks), out)

    def _keep_one(self, x: Any, op: str, place: Place, hooks: Any) -> Any:
        if not isinstance(x, torch.Tensor):
            return x
        value: Any = detached(x)
        unpack = None
        watches: list[Watch] = []
        packed_from: list[WeakWatch] = []
        watching, content = self.options.check != "off", self.options.content
        if hooks is not None:
            if watching:
                plain = [part for part in parts(value) if is_watchable(part)]
                packed_from = [WeakWatch(part, op, place, content=content) for part in plain]
            value, unpack = hooks[0](value), hooks[1]
        if watching:
            watches = [Watch(part, op, place, content=content) for part in parts(value)]
        return Kept(value, watches, packed_from, unpack)

    def take(self, entry: Any) -> Any:
        """What was kept, once it is sure that it is as it was."""
        if type(entry) is Watch:
            if entry.is_clean():
                return entry.tensor
            if (found := self.options.mutation_of((entry,))) is not None:
                self._report(found)
            return entry.tensor
        return _torch.tree_map(self._take_one, entry)

    def _take_one(self, x: Any) -> Any:
        if not isinstance(x, Kept):
            return x.tensor if isinstance(x, Watch) else x
        if (found := self.options.mutation_of(x.watches)) is not None:
            self._report(found)
        if x.unpack is None:
            return x.value
        t = x.unpack(x.value)
        for watch, part in x.watches_for(t):
            if found is None and (found := self.options.mutation_of((watch,), part)) is not None:
                self._report(found)
        return t

    def _report(self, first: Any) -> None:
        """One report for all that was written, so that nobody mends one line a run."""
        others = (self.options.mutation_of((watch,)) for watch in self._watches())
        rest = [m for m in others if m is not None and m.watch is not first.watch]
        self.options.report([first, *rest])

    def _watches(self) -> Iterator[Watch]:
        for entries in self.entries.values():
            plain = [e.kept if type(e) is Besides else e for e in entries]
            for entry in _torch.tree_leaves(plain):
                if isinstance(entry, Watch):
                    yield entry
                elif isinstance(entry, Kept):
                    yield from entry.watches


def detached(x: torch.Tensor) -> torch.Tensor:
    """An alias without autograd metadata, sharing the counter also below autograd.

    A native view kernel refuses metadata on what a handler returns, and a grad_fn would make the
    cache a part of the graph that owns it.
    """
    set_excluded(ADINPLACEORVIEW, False)
    try:
        return _detach(x)
    finally:
        set_excluded(ADINPLACEORVIEW, True)


def hooks_for(respected: bool | None) -> tuple[Any, Any] | None:
    """The user's saved-tensor hooks that a kept tensor must pass.

    Torch 2.14 gave checkpoint() an argument for it; by default they are passed by, with a warning.
    """
    hooks = _torch_guard.user_saved_tensors_hooks()
    if hooks is not None and respected is None:
        warnings.warn(_BYPASSED, FutureWarning, stacklevel=3)
    return hooks if respected else None
