"""Guarding a pair of contexts that somebody else made.

Nothing is known of what such a pair keeps, and how. But what an op returns in the recompute, if it
lies in a storage that the forward made and in none of the op's own arguments, was kept. So one mode
on top of the forward's context lays a watch on each tensor that an op returns, which keeps nothing
alive; one on top of the recompute's looks at what comes back; and a tracker at the bottom sees who
writes.

Torch's own pair, wherever it is in the pair, tells what it hands out, and its check of one counter
is ours to make: it could say no more than that something was mutated, and knows of nothing that is
allowed. If another pair has a check of its own that fires first, its error is the cue to tell more.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, ExitStack
from typing import Any

import torch

from .. import _torch
from .._torch import guard as _torch_guard
from ..ledger import Write, key_of
from ..mode import track
from ..mutation_text import Mutation
from ..operands import is_any, tensors
from ..overlap import region_of
from ..site import UNKNOWN, Place, place_of, user_frame
from ..watch import UNSEEN, Watch, parts
from ..weak_watch import WeakWatch, is_watchable
from .create import Contexts
from .inputs import Inputs, hinted
from .options import Check, OnMutation, Options, make_options
from .passing import has_no_content

ContextFn = Callable[..., Contexts]


def guard(
    context_fn: ContextFn,
    *,
    check: Check = "storage",
    allow: Mapping[Any, str] | Iterable[Any] | None = None,
    on_mutation: OnMutation = "raise",
    check_inputs: bool = False,
) -> ContextFn:
    """Guard the contexts that any ``context_fn`` makes, torch's own or anybody's.

    The pair itself runs as it is: the user's policy is called no extra time, and what it keeps is
    what it kept. It costs time on every op of the region; where there is a choice,
    `create_selective_checkpoint_contexts` is faster. Under ``torch.compile`` the pair is handed on
    as it came.

    Args:
        context_fn: returns a pair of context managers, for the forward and for the recompute.
        check: as for `create_selective_checkpoint_contexts`.
        allow: as there.
        on_mutation: as there.
        check_inputs: as there.

    Returns:
        A function to pass as ``context_fn``.

    Raises:
        ValueError: an argument has none of its values.
    """
    options = make_options(check, allow, on_mutation, check_inputs)

    def guarded_contexts(*args: Any, **kwargs: Any) -> Contexts:
        forward, recompute = context_fn(*args, **kwargs)
        if _torch_guard.is_compiling() or options.check == "off":
            return forward, recompute
        made = Made(options)
        around = CachingAround if _torch_guard.is_stock_caching(forward) else Around
        return around(forward, Recorder(made)), Around(recompute, Checker(made))

    return guarded_contexts


class Made:
    """What the forward of a region made."""

    def __init__(self, options: Options) -> None:
        self.options = options
        self.inputs = Inputs(options) if options.check_inputs else None
        self._by_storage: dict[int, list[WeakWatch]] = {}

    def add(self, op: str, t: torch.Tensor) -> None:
        """Watch a tensor that an op has returned."""
        place = place_of(user_frame(sys._getframe(2)))
        weak = WeakWatch(t, op, place, content=self.options.content, died=self._forget)
        self._by_storage.setdefault(weak.watch.key, []).append(weak)

    def take(self, op: str, t: torch.Tensor) -> WeakWatch | None:
        """The watch on what the recompute's context has handed out, if it is from the forward."""
        found = [weak for weak in self._by_storage.get(key_of(t), ()) if weak.is_on(t)]
        if not found:
            return None
        region = region_of(t)
        # Of several, the first of this op and region: ops come in the order of the forward.
        weak = min(found, key=lambda w: (w.watch.region != region, w.watch.saved.op != op))
        self._by_storage[weak.watch.key].remove(weak)
        return weak

    def mutations_of(self, weak: WeakWatch, t: torch.Tensor) -> list[Mutation]:
        """What reached a tensor that is handed out; then also the others that will be."""
        found = self.options.mutation_of((weak.watch,), t)
        if found is None:
            return []
        watches = self._watches_on(weak.watch.saved.op)
        others = [self.options.mutation_of((w,)) for w in watches if not w.has_fingerprint]
        return [found, *(mutation for mutation in others if mutation is not None)]

    def mutations_by(self, op: str) -> list[Mutation]:
        """What was written of the results of an op, where somebody else knows that one was.

        A watch has not the tensor that its fingerprint is of, so there the noted writes must do.
        """
        found = [
            self.options.noted_on(w) if w.has_fingerprint else self.options.mutation_of((w,))
            for w in self._watches_on(op)
        ]
        return [mutation for mutation in found if mutation is not None]

    def _watches_on(self, op: str) -> list[Watch]:
        """The watches on the results of an op that somebody still keeps."""
        weaks = [weak for found in self._by_storage.values() for weak in found]
        return [weak.watch for weak in weaks if weak.watch.saved.op == op]

    def _forget(self, weak: WeakWatch) -> None:
        self._by_storage.pop(weak.watch.key, None)


class Around:
    """A foreign context with a tracker below it and a mode of ours on top."""

    def __init__(self, foreign: AbstractContextManager[Any], top: TopMode) -> None:
        self._foreign = foreign
        self._top = top
        self._stacks: list[ExitStack] = []

    def __enter__(self) -> Any:
        with ExitStack() as stack:
            stack.enter_context(track(record="none"))
            below = _torch.mode_stack_len()
            value = stack.enter_context(self._foreign)
            self._top.look_below(below)
            stack.enter_context(self._top)
            self._top.begin()
            self._stacks.append(stack.pop_all())
        return value

    def __exit__(self, *exc: Any) -> Any:
        try:
            return self._stacks.pop().__exit__(*exc)
        finally:
            self._top.end(exc[0] is not None)


class CachingAround(Around, _torch_guard.CachingMode):
    """The same around torch's own context, which torch 2.14 hands an option."""

    @property
    def respect_saved_tensors_hooks(self) -> bool | None:
        """What checkpoint() was called with."""
        return getattr(self._foreign, "respect_saved_tensors_hooks", None)

    @respect_saved_tensors_hooks.setter
    def respect_saved_tensors_hooks(self, value: bool | None) -> None:
        setattr(self._foreign, "respect_saved_tensors_hooks", value)  # noqa: B010


class TopMode(_torch.QuietMode):
    """What the modes on top have in common."""

    supports_higher_order_operators = True

    def __init__(self, made: Made) -> None:
        super().__init__()
        self.made = made

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Let compiled regions run as they do under torch's own pair."""
        return True

    def look_below(self, below: int) -> None:
        """The foreign context is entered, on top of so many modes."""

    def begin(self) -> None:
        """All is entered."""

    def end(self, stopped: bool) -> None:
        """All is left, by an exception or not."""


class Recorder(TopMode):
    """On top of the forward's context."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self.made.inputs is not None:
            self.made.inputs.note(func, args, kwargs)
        out = func(*args, **kwargs)
        for t in () if has_no_content(func) else tensors(out):
            if not is_any(t, (*args, *kwargs.values())):
                for part in parts(t):
                    if is_watchable(part):
                        self.made.add(str(func), part)
        if self.made.inputs is not None:
            self.made.inputs.made(out)
        return out

    def begin(self) -> None:
        """Look at what the region starts from."""
        if self.made.inputs is not None:
            self.made.inputs.begin()

    def end(self, stopped: bool) -> None:
        """Look at it no longer."""
        if self.made.inputs is not None:
            self.made.inputs.end()


class Checker(TopMode):
    """On top of the recompute's context."""

    def __init__(self, made: Made) -> None:
        super().__init__(made)
        self._handed_out: list[_torch_guard.HandedOut] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        self._handed_out.clear()
        if self.made.inputs is not None:
            self.made.inputs.follow(func, args, kwargs)
        try:
            out = func(*args, **kwargs)
        except RuntimeError as error:
            if "has been mutated" in str(error):
                self._report(self.made.mutations_by(str(func)), error)
            hinted(error, self.made.inputs)
            raise
        if self._handed_out:
            for handed in () if has_no_content(func) else self._handed_out:
                self._check(str(func), handed)
            return out
        given = {key_of(t) for t in tensors((args, tuple(kwargs.values())))}
        for t in tensors(out):
            for part in parts(t):
                if is_watchable(part) and key_of(part) not in given:
                    weak = self.made.take(str(func), part)
                    if weak is not None:
                        self._report(self.made.mutations_of(weak, part), None)
        return out

    def look_below(self, below: int) -> None:
        """Let torch's own pair tell what it hands out."""
        _torch_guard.look_at_entries(below, self._handed_out.append)

    def begin(self) -> None:
        """See whether the region starts from what it started from."""
        if self.made.inputs is not None:
            self.made.inputs.check()

    def end(self, stopped: bool) -> None:
        """See whether it has done all that the forward did."""
        if self.made.inputs is not None:
            self.made.inputs.finish(stopped)

    def _check(self, op: str, handed: _torch_guard.HandedOut) -> None:
        """Look at a value that torch's own pair has handed out."""
        explained = False
        for part in parts(handed.value):
            weak = self.made.take(op, part) if is_watchable(part) else None
            if weak is not None:
                mutations = self.made.mutations_of(weak, part)
                # Of a wrapper, an inner watch does not see what only the wrapper's counter tells.
                explained |= part is handed.value or bool(mutations or weak.watch.noted())
                self._report(mutations, None)
        if handed.moved is not None and not explained:
            place = place_of(user_frame(sys._getframe(2)))
            self._report([unseen(handed.value, op, place, *handed.moved)], None)

    def _report(self, mutations: list[Mutation], cause: BaseException | None) -> None:
        if mutations:
            self.made.options.report(mutations, cause)


def unseen(t: torch.Tensor, op: str, place: Place, was: int, now: int) -> Mutation:
    """A write of which no more is known than that it moved the counter."""
    return Mutation(Watch(t, op, place), [Write(UNSEEN, "", UNKNOWN, "", was, now, None, 0)])
