"""A call of an op that is on its way down through the dispatcher.

The Autograd kernel notes in which state the user called: what autograd would do there, and with
which tensors. The bottom kernel, which comes after all handlers of modes and subclasses, finds the
note and lets the body run in that very state, so that autograd itself records what the body is made
of: views, in-place ops, their gradients, creation_meta, tangents. A handler that passed other
tensors made another call of it, and the body then runs below autograd, as usual.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from operator import is_
from typing import Any

import torch

from .. import _torch
from .._torch import library as _torch_library
from ..info import version
from .spec import Place, Spec


class Call:
    """One call.

    Attributes:
        spec: the op.
        args: its positional arguments.
        kwargs: its keyword arguments.
        tensors: the tensors among them.
        looks_inside: whether autograd is to look into the body.
        ran_inside: whether it did.
        is_raw: whether it could not, since the body used numpy.
        hidden: the outputs that the schema calls views, and where autograd found none.
        counted_inside: for each written tensor, whether the body moved its counter by itself.
        recorded: what autograd has made of an output, and the alias that handlers got for it.
    """

    __slots__ = (
        "_excluded",
        "_grad",
        "_has_handlers",
        "args",
        "counted_inside",
        "hidden",
        "is_raw",
        "kwargs",
        "looks_inside",
        "ran_inside",
        "recorded",
        "spec",
        "tensors",
    )

    def __init__(
        self, spec: Spec, tensors: list[torch.Tensor], args: Any, kwargs: Any, looks_inside: bool
    ) -> None:
        self.spec = spec
        self.tensors = tensors
        self.args = args
        self.kwargs = kwargs
        self.looks_inside = looks_inside
        self.ran_inside = False
        self.is_raw = False
        self.hidden: tuple[Place, ...] = ()
        self.counted_inside: list[bool] = []
        self.recorded: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._has_handlers = _torch.mode_stack_len() > 0 or any(map(_is_handled, tensors))
        self._excluded = _torch_library.excluded_keys()
        self._grad = torch.is_grad_enabled()

    def __enter__(self) -> Call:
        _under_way.calls.append(self)
        return self

    def __exit__(self, *exc: object) -> None:
        _under_way.calls.pop()

    @property
    def hides_views(self) -> bool:
        """Whether autograd has found no views where the schema has them."""
        return bool(self.hidden)

    @property
    def is_settled(self) -> bool:
        """Whether autograd has made all views, and no handler has had a hand in it."""
        return self.ran_inside and not (self._has_handlers or self.hides_views)

    def run_inside(self, run: Callable[[], Any]) -> Any:
        """Run in the state of the user's call, as far as autograd goes."""
        with _torch_library.as_called(self._excluded):
            if torch.is_grad_enabled() == self._grad:
                return run()
            with torch.set_grad_enabled(self._grad):
                return run()

    def handed_up(self, out: Any) -> Any:
        """The outputs as handlers get them."""
        if not self._has_handlers:
            return out
        outputs = [list(v) if isinstance(v, (list, tuple)) else v for v in self.spec.outputs(out)]
        for leaf in list(self.spec.leaves(out)):
            t = leaf.t
            if leaf.index not in self.spec.written and (t._is_view() or t.requires_grad):
                with _torch.inplace_or_view():
                    alias = t.detach()
                if leaf.place not in self.hidden:
                    self.recorded.append((t, alias))
                put(outputs, leaf.place, alias)
        return self.spec.packed(outputs)

    def taken_back(self, t: torch.Tensor) -> torch.Tensor:
        """The output that a handler returned an alias for: the alias, which it then becomes.

        Tracers know a tensor by the object that the handler returned.
        """
        for i, (output, alias) in enumerate(self.recorded):
            if alias is t:
                del self.recorded[i]
                return t if _torch_library.take_place(t, output) else output
        return t

    def note(self, before: list[int | None]) -> None:
        """Note which counters the body moved.

        Args:
            before: the versions of the written tensors before it ran.
        """
        written = self.spec.writes(self.args, self.kwargs)
        self.counted_inside = [
            version(t) != was for (_, t), was in zip(written, before, strict=True)
        ]


def _is_handled(t: torch.Tensor) -> bool:
    return type(t).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__


def put(outputs: list[Any], place: Place, t: torch.Tensor) -> None:
    """Put a tensor into outputs that are laid out one by one."""
    if place.position is None:
        outputs[place.index] = t
    else:
        outputs[place.index][place.position] = t


class _UnderWay(threading.local):
    def __init__(self) -> None:
        self.calls: list[Call] = []


_under_way = _UnderWay()


def under_way(spec: Spec, tensors: list[torch.Tensor], args: Any, kwargs: Any) -> Call | None:
    """The call that a kernel is reached for, unless a handler made it anew with other tensors.

    A handler may have changed what is no tensor: the call has from then on the arguments that run.
    """
    if not _under_way.calls:
        return None
    call = _under_way.calls[-1]
    if call.spec is not spec or len(call.tensors) != len(tensors):
        return None
    if not all(a is b for a, b in zip(call.tensors, tensors, strict=True)):
        return None
    if call._has_handlers:
        if not _have_their_places(call, args, kwargs):
            return None
        call.args, call.kwargs = args, kwargs
    return call


def _have_their_places(call: Call, args: Any, kwargs: Any) -> bool:
    """Whether each argument that takes tensors was given what the call gave it."""
    pairs = [(a.of(args, kwargs), a.of(call.args, call.kwargs)) for a in call.spec.plan.arguments]
    return all(
        len(a) == len(b) and all(map(is_, a, b)) if isinstance(a, (list, tuple)) else a is b
        for a, b in pairs
    )
