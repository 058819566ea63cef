"""``views="full"``: views that handlers keep become real differentiable views.

Inside a handler a view must stay free of metadata, since a native kernel above marks what the
handler returns and refuses what is marked already. Whether a view is returned or kept shows only
when the outermost handler returns; and the history of its base shows only when the kernels above
have run, which call nothing of ours. So the views that a handler's ops made and that it did not
return are noted, and marked at the first moment after that: when the next op comes, when the
tracker is left, or when somebody asks the view itself for anything. To be asked, a noted view is
lent a class of ours (`_Kept`) with a ``__torch_function__``, and gives it back then.

The next op must not be a view op, though. Native code may have called that to make the grad_fn or
the tangent of a view anew (``VariableHooks::grad_fn``, ``AutogradMeta::fw_grad``), and it holds
that view's mutex meanwhile: to mark a view of the same one would wait for it for ever.

Each view is marked by its own native kernel: the op is called again above autograd, and answered
with the view. So flags, creation_meta and grad_fn are native.

A handler may also hand out later what it kept, as a cache does. So what a handler returns loses the
mark that we gave it, or is exchanged for an alias without metadata if a kernel would refuse it.
"""

from __future__ import annotations

import functools
import logging
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from . import _torch
from .ledger import key_of
from .plan import Plan, plan_of
from .view import mark_as_view
from .view_fn import replaying

log = logging.getLogger(__name__)


class _Kept(torch.Tensor):
    """The class that a plain tensor has from being noted until it is marked."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for t in _torch.tree_leaves((args, kwargs)):
            if type(t) is _Kept:
                for views in list(_everywhere):
                    views.settle()
                _lend(t, torch.Tensor)
        return func(*args, **(kwargs or {}))


@dataclass(frozen=True, slots=True)
class _Note:
    """A view op that a handler issued, to be called again above autograd.

    Attributes:
        func: the op.
        args: its positional arguments.
        kwargs: its keyword arguments.
        views: weak references to its outputs.
        spares: for an op that returns a list, aliases of its outputs, for those that die.
        grad: whether grad mode was on.
        inference: whether inference mode was on.
    """

    func: Any
    args: Any
    kwargs: Any
    views: list[weakref.ref[torch.Tensor]]
    spares: list[torch.Tensor] | None
    grad: bool
    inference: bool

    def living(self) -> list[torch.Tensor]:
        """Those of its outputs that are in use."""
        return [t for ref in self.views if (t := ref()) is not None]

    def return_class(self) -> None:
        """Give its outputs back the class that they had before `_Kept`."""
        for t in self.living():
            if type(t) is _Kept:
                _lend(t, torch.Tensor)


class FullViews:
    """What the handlers that run in one thread keep."""

    def __init__(self) -> None:
        self._running = 0
        self._notes: list[_Note] = []
        self._marked: dict[int, weakref.ref[torch.Tensor]] = {}
        self._lock = threading.RLock()  # a kept view may be asked in another thread
        _everywhere.add(self)

    def settle(self) -> None:
        """Mark the views of all ops that have returned to their callers."""
        if self._running or replaying.now:
            return
        with self._lock:
            while self._notes and not self._running:
                note = self._notes.pop(0)
                note.return_class()
                self._mark(note)

    def next_op(self, func: Any) -> None:
        """Tell that an op has come."""
        if not (isinstance(func, _torch.OpOverload) and plan_of(func).views):
            self.settle()

    @contextmanager
    def handler(self, func: Any) -> Iterator[None]:
        """Tell that a handler runs inside, for the op `func`."""
        self.next_op(func)
        if not self._running:
            self._return_class()
        self._running += 1
        try:
            yield
        finally:
            self._running -= 1
            if not self._running:
                self._lend_class()

    def note(self, plan: Plan, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        """Note the views among the outputs of an op, if a handler issued it."""
        if not (self._running and (plan.views or plan.is_composite)):
            return
        if plan.qualified == "aten::detach" or _torch.functorch_is_active():
            return
        given = list(_tensors((args, kwargs)))
        made = [t for t in _tensors(out) if not _is_any(t, given) and not t.is_inference()]
        if made:
            views = [self._ref(t) for t in made]
            spares = [t.detach() for t in made] if isinstance(out, (list, tuple)) else None
            modes = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
            self._notes.append(_Note(func, args, kwargs, views, spares, *modes))

    def handed_back(self, func: Any, args: Any, kwargs: Any, out: Any) -> Any:
        """What a handler returned, as the kernel above takes it."""
        given = list(_tensors((args, kwargs)))
        refuses = isinstance(func, _torch.OpOverload) and bool(plan_of(func).views)
        return self._exchanged(out, given, refuses)

    def _exchanged(self, value: Any, given: list[torch.Tensor], refuses: bool) -> Any:
        if isinstance(value, (list, tuple)):
            return type(value)(self._exchanged(item, given, refuses) for item in value)
        if isinstance(value, torch.Tensor) and not _is_any(value, given):
            if self._running == 1:
                self._forget(value)
            return self._without_mark(value, refuses)
        return value

    def _without_mark(self, t: torch.Tensor, refuses: bool) -> torch.Tensor:
        ref = self._marked.pop(id(t), None)
        base = t._base
        if ref is not None and base is not None:
            _torch.as_view_version_only(t, base)
        elif refuses and (base is not None or t.requires_grad):
            with _torch.inplace_or_view():
                return t.detach()
        return t

    def _forget(self, t: torch.Tensor) -> None:
        """Drop what is noted of a view that was returned."""
        for note in self._notes:
            note.views[:] = [ref for ref in note.views if ref() is not t]

    def _ref(self, t: torch.Tensor) -> weakref.ref[torch.Tensor]:
        """A weak reference to a view; the note that holds its base goes when it dies."""
        key, views = id(t), weakref.ref(self)

        def died(_: Any) -> None:
            me = views()
            if me is not None:
                me._marked.pop(key, None)
                if not me._running:
                    me._notes[:] = [note for note in me._notes if note.living()]

        return weakref.ref(t, died)

    def _return_class(self) -> None:
        """A handler finds its views as it made them, those too that are not marked yet."""
        for note in list(self._notes):  # no lock: this may run while native holds a mutex
            note.return_class()

    def _lend_class(self) -> None:
        """Have the views that outlived their handler ask us; forget the others."""
        self._notes[:] = [note for note in self._notes if note.living()]
        for note in self._notes:
            for t in note.living():
                if type(t) is torch.Tensor:
                    _lend(t, _Kept)

    def _mark(self, note: _Note) -> None:
        try:
            with (
                torch.inference_mode(False),
                torch.set_grad_enabled(note.grad),
                _torch.above_autograd(),
                _torch.no_torch_function(),
            ):
                _mark_natively(note)
        except (RuntimeError, NotImplementedError, ValueError) as error:
            log.debug("a view that %s made stays without metadata: %s", note.func, error)
        for t in note.living():
            if t._is_view():
                self._marked[id(t)] = self._ref(t)
                if note.inference:
                    _torch.set_creation_meta(t, _torch.CreationMeta.INFERENCE_MODE)


_everywhere: weakref.WeakSet[FullViews] = weakref.WeakSet()


def _mark_natively(note: _Note) -> None:
    plan = plan_of(note.func)
    given = list(_tensors((note.args, note.kwargs)))
    living = note.living()
    if not living or any(_base_of(t, given) is None or t._is_view() for t in living):
        return  # pointed elsewhere meanwhile, by `set_` or `.data =`; or marked by somebody else
    if not plan.has_native_kernel or plan.is_composite:
        for t in living:
            mark_as_view(t, _base_of(t, given))  # type: ignore[arg-type]
        return
    if note.spares is None:
        answer: Any = living[0]
    else:
        pairs = zip(note.views, note.spares, strict=True)
        answer = [spare if (view := ref()) is None else view for ref, spare in pairs]
    _torch.answering(note.func, answer, functools.partial(note.func, **note.kwargs), *note.args)


def _base_of(t: torch.Tensor, given: list[torch.Tensor]) -> torch.Tensor | None:
    """The one among an op's arguments that lies in t's storage; a wrapper is believed to."""
    for base in given:
        if key_of(base) == key_of(t) or _torch.has_python_key(t):
            return base
    return None


def _lend(t: Any, cls: type[torch.Tensor]) -> None:
    t.__class__ = cls


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    return (t for t in _torch.tree_leaves(value) if isinstance(t, torch.Tensor))


def _is_any(t: torch.Tensor, others: list[torch.Tensor]) -> bool:
    return any(t is other for other in others)
