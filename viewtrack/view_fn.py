"""A Python view_fn behind a marked view, replayed by the native engine.

A native ViewFunc captures it (`_torch/view_fn.py`), and native calls that when it regenerates
grad_fn (``VariableHooks::grad_fn``). To have the first grad_fn made so too, the view is marked
while base's counter is far away, and counts as out of date.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch

from . import _torch
from ._torch import CreationMeta
from ._torch.view_fn import as_view_with_fn
from .aliasing import brief, dims, shape_of, shares_or_unknown
from .errors import AliasingError, ViewTrackError
from .markable import native, propagated

ViewFn = Callable[[torch.Tensor], torch.Tensor]

WITHOUT_HISTORY = (CreationMeta.NO_GRAD_MODE, CreationMeta.INFERENCE_MODE)
"""Views made in these modes have no grad_fn."""

# A counter is set to this while a view is marked that is to count as stale. Not to one more than it
# has: one write later the view would count as fresh, without grad_fn, and lose its gradient.
_FAR_AWAY = 2**31 - 1


def mark_with_fn(t: torch.Tensor, base: torch.Tensor, replay: Replay, creation_meta: Any) -> None:
    """Mark t as a view of base that `replay` makes."""
    final = propagated(base, creation_meta)
    history = base.requires_grad and creation_meta not in WITHOUT_HISTORY
    out = None
    if history:
        # Now and not at the next read: check_inplace takes a view without grad_fn for a leaf, and
        # register_hook on a stale one crashes. And first, while t is still untouched.
        with _torch.above_autograd(), torch.enable_grad():
            out = replay.checked(base)
        replay.check_place(out, t)
    if out is None or base._is_view():
        native(as_view_with_fn, t, base, replay)
    else:
        _mark_stale(t, base, replay)
    if out is not None:
        with torch.enable_grad():
            _take_grad_fn(t, base, replay, out)
    if _torch.creation_meta(t) is not final:
        _torch.set_creation_meta(t, final)


def _mark_stale(t: torch.Tensor, base: torch.Tensor, replay: Replay) -> None:
    """Mark t so that native takes its grad_fn for out of date, and makes it anew when asked."""
    version = base._version
    _torch.set_version(base, _FAR_AWAY)
    try:
        with torch.enable_grad():  # for CreationMeta.DEFAULT: native regenerates under no other
            native(as_view_with_fn, t, base, replay)
    finally:
        _torch.set_version(base, version)
    if _torch.creation_meta(t) is not CreationMeta.DEFAULT:  # under inference mode
        _torch.set_creation_meta(t, CreationMeta.DEFAULT)


def _take_grad_fn(t: torch.Tensor, base: torch.Tensor, replay: Replay, out: torch.Tensor) -> None:
    """Give t the grad_fn of `out`, which is view_fn's result for base.

    Where base is a view itself, regenerating would replay from the root and lose what base's own
    grad_fn does besides; there t gets an alias's, on top of out's.
    """
    if base._is_view():
        _torch.take_history(t, out)
        return
    replay.ready = out
    try:
        with _torch.above_autograd():
            _ = t.grad_fn
    finally:
        replay.ready = None


class _Replaying(threading.local):
    """Whether native replays a view_fn in this thread, holding the mutex of the view meanwhile."""

    now = False


replaying = _Replaying()


class Replay:
    """A view_fn that is checked each time it is replayed on a base of the original shape."""

    __slots__ = ("base_like", "like", "ready", "view_fn")

    def __init__(self, view_fn: ViewFn, t: torch.Tensor, base: torch.Tensor) -> None:
        self.view_fn = view_fn
        self.ready: torch.Tensor | None = None
        self.like = (shape_of(t), t.dtype)
        self.base_like = (shape_of(base), base.dtype)

    def __call__(self, base: torch.Tensor) -> torch.Tensor:
        """What native is to take for the view: a result that may be written."""
        if self.ready is not None:
            return self.ready
        was, replaying.now = replaying.now, True
        try:
            return self._made(base)
        finally:
            replaying.now = was

    def _made(self, base: torch.Tensor) -> torch.Tensor:
        out = self.checked(base)
        if _torch.creation_meta(out) is not CreationMeta.IN_CUSTOM_FUNCTION:
            return out
        # Double backward through CopySlices writes to what it replayed, and native refuses that of
        # a custom Function's view; a view marked as t was may be written.
        view = out.detach()
        as_view_with_fn(view, base, self)
        if out.requires_grad:
            _torch.take_history(view, out)
        return view

    def checked(self, base: torch.Tensor) -> torch.Tensor:
        """view_fn's result, if it is a view such as the one that was marked."""
        out = self.view_fn(base)
        if not isinstance(out, torch.Tensor):
            raise ViewTrackError(
                f"{self._who()} returned {type(out).__name__}; it must return a tensor"
            )
        like = (shape_of(out), out.dtype)
        if (shape_of(base), base.dtype) == self.base_like and like != self.like:
            shape, dtype = self.like
            raise ViewTrackError(
                f"{self._who()} returned {brief(out)} where the view that was marked with it is "
                f"{dtype}[{dims(shape)}]; return exactly that view of its argument"
            )
        if out is base or not shares_or_unknown(out, base):
            raise AliasingError(
                f"{self._who()} returned {'its argument' if out is base else 'a copy'}; it must "
                f"return a new view of its argument (for the whole of it, `base.view_as(base)`)"
            )
        recorded = base.requires_grad and torch.is_grad_enabled() and not _torch.below_autograd()
        if recorded and not out.requires_grad:
            raise ViewTrackError(
                f"{self._who()} returned a tensor that is cut off from its argument's gradient; "
                f"leave out `detach()` and `no_grad`"
            )
        return out

    def check_place(self, out: torch.Tensor, t: torch.Tensor) -> None:
        """Refuse a result that lies elsewhere in base than t does, where that can be told."""
        if type(out) is not torch.Tensor or type(t) is not torch.Tensor or not t.numel():
            return
        if out.layout is not torch.strided or t.layout is not torch.strided or t.is_nested:
            return
        if _place(out) != _place(t):
            raise ViewTrackError(
                f"{self._who()} returned strides {out.stride()} at offset {out.storage_offset()}, "
                f"where the view that is marked with it has strides {t.stride()} at offset "
                f"{t.storage_offset()}; return exactly that view of its argument"
            )

    def _who(self) -> str:
        fn = self.view_fn
        name = getattr(fn, "__qualname__", type(fn).__qualname__)
        code = getattr(fn, "__code__", None)
        where = f" ({code.co_filename}:{code.co_firstlineno})" if code is not None else ""
        return f"mark_as_view: view_fn `{name}`{where}"


def _place(t: torch.Tensor) -> object:
    """Where in memory t's elements lie; the stride of a dimension of one element says nothing."""
    steps = [step for size, step in zip(t.size(), t.stride(), strict=True) if size > 1]
    return t.storage_offset(), steps
