"""The outputs of one call: what they should be, and whose memory they lie in."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from ..info import version
from ..plan import Output
from .copies import may_share_memory, share_memory
from .findings import Finding

if TYPE_CHECKING:
    from .checked_call import CheckedCall


def check_outputs(call: CheckedCall, out: Any) -> Iterator[Finding]:
    """Compare what a call returned with the schema.

    Args:
        call: the call, when it has been made.
        out: what it returned.
    """
    count = call.plan.returns
    outputs = () if count == 0 else (out,) if count == 1 else out
    if isinstance(outputs, (tuple, list)) and len(outputs) == count:
        yield from _Outputs(call, outputs).check()
        return
    number = len(outputs) if isinstance(outputs, (tuple, list)) else 1
    yield call.finding(
        "wrong output", None, None,
        f"returned {number} value{'s' * (number != 1)} where its schema has {count} outputs; "
        f"return a tuple of {count}",
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class _Leaf:
    """An output tensor, and its place."""

    index: int
    label: str
    t: torch.Tensor


class _Outputs:
    """The outputs of one call."""

    def __init__(self, call: CheckedCall, outputs: Any) -> None:
        self._call = call
        self._plan = call.plan
        self._outputs = outputs
        self._finding = call.finding

    def check(self) -> Iterator[Finding]:
        """Look at all."""
        yield from self._absent()
        yield from self._views()
        yield from self._returned()
        yield from self._fresh()

    def _absent(self) -> Iterator[Finding]:
        schema = self._call.op._schema.returns
        absent = [
            index
            for index, value in enumerate(self._outputs)
            if value is None and str(schema[index].type) == "Tensor"
        ]
        for index in absent:
            kind = "no output" if len(absent) < len(self._outputs) else "wrong output"
            yield self._finding(
                kind, None, index,
                f"returned None as output {index}, which its schema calls a tensor; return one, or "
                f"declare `Tensor?`",
            )  # fmt: skip

    def _views(self) -> Iterator[Finding]:
        for output in self._plan.views:
            names = " or ".join(f"`{a.name}`" for a in output.arguments)
            bases = [
                t for a in output.arguments for t in a.tensors(self._call.args, self._call.kwargs)
            ]
            for leaf in _leaves(output.index, self._outputs[output.index]):
                base = next((b for b in bases if share_memory(leaf.t, b)), None)
                if base is None and leaf.t.numel() and not _lies_in_some(leaf.t, bases):
                    yield from self._no_view(leaf, output, names)
                elif base is not None and not _share_counter(leaf.t, base):
                    yield self._finding(
                        "unmarked view", output.arguments[0].name, leaf.index,
                        f"returned {leaf.label} as a view of {names} that autograd does not know "
                        f"as one{self._call.how}: they do not share a version counter; "
                        f"{self._call.kernel()}",
                    )  # fmt: skip

    def _no_view(self, leaf: _Leaf, output: Output, names: str) -> Iterator[Finding]:
        yield from self._kept(leaf)
        argument = output.arguments[0].name if output.arguments else None
        yield self._finding(
            "no view", argument, leaf.index,
            f"returned a tensor of its own as {leaf.label}, and its schema calls that a view of "
            f"{names}; return a view for every input, or drop the alias annotation",
        )  # fmt: skip

    def _returned(self) -> Iterator[Finding]:
        for output in self._plan.written:
            argument = output.arguments[0]
            given = argument.tensors(self._call.args, self._call.kwargs)
            found = [leaf.t for leaf in _leaves(output.index, self._outputs[output.index])]
            if len(found) != len(given) or any(
                a is not b for a, b in zip(found, given, strict=True)
            ):
                yield self._finding(
                    "missing return", argument.name, output.index,
                    f"returned another tensor as output {output.index}, and its schema calls that "
                    f"argument `{argument.name}` itself; end it with `return {argument.name}`",
                )  # fmt: skip

    def _fresh(self) -> Iterator[Finding]:
        related = {output.index: output for output in (*self._plan.views, *self._plan.written)}
        fresh: list[_Leaf] = []
        for index, value in enumerate(self._outputs):
            declared = [a.name for a in related[index].arguments] if index in related else []
            for leaf in _leaves(index, value):
                aliases = list(self._undeclared(leaf, declared))
                yield from aliases
                if index not in related and not aliases:
                    yield from self._kept(leaf)
                    yield from self._among(leaf, fresh)
                    fresh.append(leaf)
        earlier, number = "what an earlier call", f"(input {self._call.index})"
        self._call.checked.returned += [
            *((f"{earlier} was given as `{g.label}` {number}", g.t) for g in self._call.given),
            *((f"{earlier} returned as {leaf.label} {number}", leaf.t) for leaf in fresh),
        ]

    def _undeclared(self, leaf: _Leaf, declared: list[str]) -> Iterator[Finding]:
        own = [one.t for one in self._call.given if one.argument.name in declared]
        for one in self._call.given:
            name = one.argument.name
            apart = name not in declared and not any(share_memory(one.t, o) for o in own)
            if apart and (leaf.t is one.t or share_memory(leaf.t, one.t)):
                yield self._finding(
                    "undeclared alias", name, leaf.index,
                    f"returned {leaf.label} in the memory of argument `{one.label}`, and its "
                    f"schema does not say so; declare it as `Tensor(a) {name} -> Tensor(a)`, or "
                    f"return a clone",
                )  # fmt: skip

    def _kept(self, leaf: _Leaf) -> Iterator[Finding]:
        for label, earlier in self._call.checked.returned:
            if share_memory(leaf.t, earlier):
                yield self._finding(
                    "kept memory", None, leaf.index,
                    f"returned {leaf.label} in the memory of {label}{self._call.how}: "
                    f"a write to the one changes the other; return a clone of what it keeps",
                )  # fmt: skip
                return

    def _among(self, leaf: _Leaf, fresh: list[_Leaf]) -> Iterator[Finding]:
        for other in fresh:
            if share_memory(leaf.t, other.t):
                yield self._finding(
                    "outputs alias", None, leaf.index,
                    f"returned {other.label} and {leaf.label} in the same memory, and its "
                    f"schema does not say so; return a clone as {leaf.label}",
                )  # fmt: skip


def _leaves(index: int, value: Any) -> Iterator[_Leaf]:
    if isinstance(value, torch.Tensor):
        yield _Leaf(index, f"output {index}", value)
    elif isinstance(value, (list, tuple)):
        for position, t in enumerate(value):
            if isinstance(t, torch.Tensor):
                yield _Leaf(index, f"output {index}[{position}]", t)


def _lies_in_some(t: torch.Tensor, bases: list[torch.Tensor]) -> bool:
    return any(may_share_memory(t, base) for base in bases)


def _share_counter(t: torch.Tensor, base: torch.Tensor) -> bool:
    was = version(t)
    if was is None or base.is_inference():
        return True
    torch.autograd.graph.increment_version(base)
    return version(t) == was + 1
