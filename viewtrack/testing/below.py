"""`compare_below`: does a call that a handler issues move and share the counters that it should?"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from .. import _torch
from ..info import version
from ..ledger import key_of
from ..mode import track
from .call import Call, Variant
from .compare import Difference, _name
from .modes import NoOpMode
from .observation import Under, counters, describe_error, same, value_of

APART_ON_PURPOSE = frozenset({"unsafe_chunk", "unsafe_split", "unsafe_split_with_sizes"})
"""Ops whose outputs lie in their argument's memory with counters of their own, on stock torch too.

They exist for code that writes to the parts without autograd noticing.
"""


def compare_below(
    fn: Callable[..., Any],
    args: tuple[Any, ...] = (),
    kwargs: dict[str, Any] | None = None,
    *,
    under: Under = track,
    name: str = "",
    variant: Variant = "function",
) -> list[Difference]:
    """Issue `fn` from another mode's handler, and list what is otherwise than it should be.

    This is promise 2 of `track`. On stock torch nearly every view and write differs.

    * Each input's counter moves by what the same call moves it above autograd without any mode.
    * Each output in the memory of an input shares its counter, unless the two are apart above
      autograd too; outputs that share one there share one.
    * Values are those of the call above autograd, or at worst those that a handler gets above a
      mode that does nothing: it reads lazily conjugated memory as it lies. Errors are those that
      such a handler gets.
    * No output carries autograd metadata, so a handler may return it.

    Args:
        fn: a callable that takes tensors; it is called several times, each time on fresh copies.
        args: positional arguments; tensors in them must be leaves, of any shape and dtype.
        kwargs: keyword arguments.
        under: makes the context manager that holds around the handler.
        name: how the differences name the call.
        variant: as for `compare`.

    Returns:
        The differences; empty if there are none.
    """
    call = Call(fn, args, kwargs or {}, name or _name(fn), variant)
    return below_differences(call, under, apart=True)


def below_differences(call: Call, under: Under = track, apart: bool = False) -> list[Difference]:
    """`compare_below` for a `Call`.

    Args:
        call: the call.
        under: makes the context manager that holds around the handler.
        apart: whether outputs may lie in an input's memory with counters of their own, where they
            do so above autograd (`unsafe_split`, `set_`).
    """
    above = _Outcome(call, lambda body: body())
    with NoOpMode():
        untracked = _Outcome(call, in_handler)
    with under():
        below = _Outcome(call, in_handler)
    found: list[tuple[str, Any, Any]] = [("error", untracked.error, below.error)]
    if above.error is None and below.error is None:
        found += _compare(above, below, apart)
        if call.compares_values:
            found += _compare_values(above, untracked, below)
    return [
        Difference(call.name, f"below autograd, {what}", expected, seen)
        for what, expected, seen in found
        if not same(expected, seen)
    ]


class _Outcome:
    """What a call without grad did to counters."""

    def __init__(self, call: Call, issue: Callable[[Callable[[], Any]], Any]) -> None:
        self.error: str | None = None
        inputs = call.inputs(requires_grad=False)
        before = [version(t) for t in inputs.tensors]
        torch.default_generator.manual_seed(0)
        out: Any = None
        try:
            out = issue(lambda: call.fn(*inputs.args, **inputs.kwargs))
        except Exception as error:
            self.error = describe_error(error)
        self.inputs = list(inputs.tensors)
        self.outputs = [t for t in _torch.tree_leaves(out) if isinstance(t, torch.Tensor)]
        self.moved = [
            None if now is None or was is None else now - was
            for now, was in zip(map(version, self.inputs), before, strict=True)
        ]
        self.is_view = [t._is_view() and not self.is_input(t) for t in self.outputs]
        self.named = {f"in[{index}]": t for index, t in enumerate(self.inputs)}
        self.named.update({f"out[{index}]": t for index, t in enumerate(self.outputs)})
        self.counters = counters(self.named)

    def is_input(self, t: torch.Tensor) -> bool:
        return any(t is u for u in self.inputs)


def _compare_values(
    above: _Outcome, untracked: _Outcome, below: _Outcome
) -> list[tuple[str, Any, Any]]:
    """Values are to be right; where stock torch has them wrong in a handler, those will do."""
    found = []
    for name, t in below.named.items():
        now, right = value_of(t), value_of(above.named[name])
        if not (same(now, right) or _close(now, right)):
            found.append((f"{name}.value", value_of(untracked.named[name]), now))
    return found


def _close(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether the two are the same but for rounding, which depends on where memory lies."""
    inexact = a.is_floating_point() or a.is_complex()
    if not inexact or a.size() != b.size() or a.layout is not torch.strided:
        return False
    return torch.allclose(a, b, rtol=1e-3, equal_nan=True)


def _compare(above: _Outcome, below: _Outcome, apart: bool) -> list[tuple[str, Any, Any]]:
    found: list[tuple[str, Any, Any]] = [
        (f"moves of in[{index}]", was, now)
        for index, (was, now) in enumerate(zip(above.moved, below.moved, strict=True))
    ]
    found.append(("number of outputs", len(above.outputs), len(below.outputs)))
    for index, now in enumerate(below.outputs):
        name = f"out[{index}]"
        found.append((f"{name} carries view metadata", False, below.is_view[index]))
        stock = above.counters.get(f"counter({name})")
        seen = below.counters.get(f"counter({name})")
        if seen != stock or not apart:
            found.append((f"counter({name})", _owner(now, below) or stock, seen))
    return found


def _owner(t: torch.Tensor, outcome: _Outcome) -> str | None:
    """The counter of the first input that `t` lies in the memory of."""
    if version(t) is None:
        return None
    for index, u in enumerate(outcome.inputs):
        if key_of(u) == key_of(t):
            return str(outcome.counters.get(f"counter(in[{index}])"))
    return None


def in_handler(body: Callable[[], Any]) -> Any:
    """Call `body` in the handler of a dispatch mode."""
    results: list[Any] = []

    class Issuer(_torch.TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            if not results:
                results.append(body())
            return func(*args, **(kwargs or {}))

    trigger = torch.zeros(())
    with Issuer():  # type: ignore[no-untyped-call]
        trigger.sin()
    return results[0]
