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
that view's mutex meanwhile: to mark a view of the same one would wait for it for ever. Nor may it
be one that asks for sizes or layout: native code asks wrappers and nested tensors for them just
before it gives them their history (``InputMetadata``).

`full_marks.py` tells how a view is marked.

A handler may also hand out later what it kept, as a cache does. So what a handler returns loses the
mark that we gave it, or is exchanged for an alias without metadata if a kernel would refuse it.
"""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from . import _torch
from ._torch.dynamo import break_graph
from .full_marks import Call, mark, tensors
from .plan import Plan, caches, plan_of
from .view_fn import replaying

log = logging.getLogger(__name__)


class _Kept(torch.Tensor):
    """The class that a plain tensor has from being noted until it is marked."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        _asked(args, kwargs)
        return func(*args, **(kwargs or {}))


@break_graph  # dynamo would trace what native code is made to do, with fake tensors
def _asked(args: Any, kwargs: Any) -> None:
    """Mark the views among the arguments of a call."""
    for t in tensors((args, kwargs)):
        if type(t) is _Kept:
            for views in list(_everywhere):
                views.settle()
            _lend(t, torch.Tensor)


@dataclass(slots=True)
class _Note:
    """A view op that a handler issued, to be called again above autograd.

    Attributes:
        call: the op and its arguments.
        views: weak references to those of its outputs that are in use, by their places.
        grad: whether grad mode was on.
        inference: whether inference mode was on.
        moved: whether sizes, strides or storage of a tensor that took part were changed since.
    """

    call: Call
    views: dict[int, weakref.ref[torch.Tensor]]
    grad: bool
    inference: bool
    moved: bool = False

    def living(self) -> dict[int, torch.Tensor]:
        """Those of its outputs that are in use."""
        return {i: t for i, ref in self.views.items() if (t := ref()) is not None}

    def return_class(self) -> None:
        """Give its outputs back the class that they had before `_Kept`."""
        for t in self.living().values():
            if type(t) is _Kept:
                _lend(t, torch.Tensor)

    def mark(self) -> None:
        """Mark its outputs."""
        views = self.living()
        if not views:
            return
        try:
            with (
                torch.inference_mode(False),
                torch.set_grad_enabled(self.grad),
                _torch.above_autograd(),
                _torch.no_torch_function(),
            ):
                mark(self.call, views, moved=self.moved)
                for t in views.values():
                    if self.inference and t._is_view():
                        _torch.set_creation_meta(t, _torch.CreationMeta.INFERENCE_MODE)
        except Exception as error:  # as a handler of somebody's tensor may raise
            log.debug("a view that %s made stays without metadata: %s", self.call.func, error)


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
                note.mark()
                note.return_class()  # only now: until then another thread that asks waits for us
                self._marked.update(
                    (id(t), self._ref(t)) for t in note.living().values() if t._is_view()
                )

    def next_op(self, func: Any) -> None:
        """Tell that an op has come."""
        if self._notes and not (isinstance(func, _torch.OpOverload) and _may_be_part(func)):
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

    def note(self, plan: Plan, call: Call, out: Any, *, made_inside: bool = False) -> None:
        """Note the views among the outputs of an op, if a handler issued it.

        Args:
            plan: the plan of the op.
            call: the op and its arguments.
            out: what it returned.
            made_inside: whether that comes from other ops of which we know.
        """
        if not self._running:
            return
        if plan.changes_metadata:
            self._note_moved(list(tensors((call.args, call.kwargs))))
        if not (plan.views or plan.is_composite) or plan.qualified == "aten::detach":
            return
        if _torch.functorch_is_active():
            return
        given = list(tensors((call.args, call.kwargs)))
        made = {
            i: t
            for i, t in enumerate(tensors(out))
            if not _is_any(t, given) and not t.is_inference()
        }
        if made_inside:
            for t in made.values():
                self._forget(t)
        if made:
            views = {i: self._ref(t) for i, t in made.items()}
            modes = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
            self._notes.append(_Note(call, views, *modes))

    def _note_moved(self, written: list[torch.Tensor]) -> None:
        """Note that an op changed sizes, strides or storage of tensors."""
        for note in self._notes:
            took_part = [*note.living().values(), *tensors((note.call.args, note.call.kwargs))]
            note.moved = note.moved or any(_is_any(t, written) for t in took_part)

    def handed_back(self, func: Any, args: Any, kwargs: Any, out: Any) -> Any:
        """What a handler returned, as the kernel above takes it."""
        given = list(tensors((args, kwargs)))
        plan = plan_of(func) if isinstance(func, _torch.OpOverload) else None
        refuses = plan is not None and bool(plan.views) and plan.has_native_kernel
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
            note.views = {i: ref for i, ref in note.views.items() if ref() is not t}

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
            for t in note.living().values():
                if type(t) is torch.Tensor:
                    _lend(t, _Kept)


def _may_be_part(func: _torch.OpOverload) -> bool:
    """Whether native code may call an op where a view cannot be marked.

    View ops it calls while it holds a mutex. For sizes and layout of wrappers and nested tensors it
    asks before an op's result is given its history.
    """
    try:
        return _parts[func._op]
    except KeyError:
        returns = func._schema.returns
        asks = bool(returns) and not any("Tensor" in str(result.type) for result in returns)
        found = bool(plan_of(func).views) or asks or "_nested_tensor_" in func._schema.name
        _parts[func._op] = found
        return found


# Keyed by the builtin inside an OpOverload: hashing the OpOverload itself runs Python.
_parts: dict[Any, bool] = {}
caches.append(_parts)

_everywhere: weakref.WeakSet[FullViews] = weakref.WeakSet()


def _lend(t: Any, cls: type[torch.Tensor]) -> None:
    t.__class__ = cls


def _is_any(t: torch.Tensor, others: list[torch.Tensor]) -> bool:
    return any(t is other for other in others)
