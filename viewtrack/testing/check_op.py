"""`check_op`: does an op do to memory and counters what its schema says?

Works for any op of the dispatcher, whoever defined it. Each call is made on copies of the inputs,
and what it did is read from the bytes, so raw kernels are found out too.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from .. import _torch
from .._torch import library as _torch_library
from ..errors import ViewTrackError
from ..info import version
from ..library import CustomOp
from ..plan import Plan, plan_of
from ..site import Site, caller
from .copies import Bytes, copied, share_memory


@dataclass(frozen=True, slots=True)
class Finding:
    """Something that an op does and its schema does not say, or the other way round.

    Attributes:
        op: the op, ``"mylib::name"``.
        kind: ``"undeclared alias"``, ``"undeclared write"``, ``"no view"``, ``"unmarked view"``,
            ``"outputs alias"``, ``"missing bump"``, ``"missing return"`` or ``"error"``.
        argument: the argument that it is about, or None.
        output: the output that it is about, counted from 0, or None.
        input: which of the inputs showed it, counted from 0.
        site: the line that called `check_op`.
        message: what happened, and the mend.
    """

    op: str
    kind: str
    argument: str | None
    output: int | None
    input: int
    site: Site
    message: str

    def __str__(self) -> str:
        return f"`{self.op}` {self.message} (input {self.input}, called at {self.site})"


def check_op(op: Any, *inputs: Any) -> list[Finding]:
    """Compare what an op does with what its schema says, over several inputs.

    Give inputs of several shapes, strides and sizes: an op may alias for some of them only.

    Args:
        op: an OpOverload, a packet with one overload, ``"mylib::name.overload"``, or what
            `viewtrack.library` or ``torch.library.custom_op`` returned.
        *inputs: the arguments of one call each: a tuple of positional arguments, or a pair of such
            a tuple and a dict of keyword arguments. They are copied, so nothing is written to.

    Returns:
        What differs; empty if nothing does. Found are outputs in memory of arguments, or of other
        outputs, that the schema does not mention; declared views that are none, or that autograd
        does not know as views; arguments that are written undeclared; writes that move no version
        counter, with or without a dispatch mode; and written arguments that are not returned where
        the schema says so.

    Raises:
        ViewTrackError: `op` names no op, or there are no inputs.
    """
    overload = overload_of(op)
    if not inputs:
        raise ViewTrackError("check_op: give at least one input, a tuple of arguments")
    site = caller(2)
    findings: list[Finding] = []
    for index, given in enumerate(inputs):
        args, kwargs = _arguments(given)
        for under in (nullcontext, _PassThrough):
            call = _Checked(overload, index, site, in_mode=under is _PassThrough)
            findings.extend(call.run(args, kwargs, under))
    return _once(findings)


def overload_of(op: Any) -> Any:
    """The OpOverload that is meant.

    Raises:
        ViewTrackError: there is none, or there are several.
    """
    try:
        found = _torch_library.lookup(op) if isinstance(op, str) else op
        if isinstance(found, CustomOp):
            found = found.op
        overload = _torch_library.overload_of(found)
    except AttributeError:
        raise ViewTrackError(
            f"check_op: there is no op `{op}`; define it first, and import the module or load the "
            f"library that does"
        ) from None
    if overload is None:
        raise ViewTrackError(
            f"check_op: `{op}` does not name one op; pass an overload, as in "
            f"torch.ops.mylib.name.default"
        )
    return overload


def _arguments(given: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if isinstance(given, (tuple, list)):
        if len(given) == 2 and isinstance(given[0], tuple) and isinstance(given[1], dict):
            return given[0], given[1]
        return tuple(given), {}
    return (given,), {}


def _once(findings: list[Finding]) -> list[Finding]:
    """What a second input, or the call in a mode, shows again is no news."""
    first: dict[Any, Finding] = {}
    for finding in findings:
        first.setdefault((finding.kind, finding.argument, finding.output), finding)
    return list(first.values())


class _PassThrough(_torch.QuietMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


class _Checked:
    """One call of the op, looked at."""

    def __init__(self, op: Any, index: int, site: Site, in_mode: bool) -> None:
        self.op = op
        self.plan: Plan = plan_of(op)
        self.index = index
        self.site = site
        self.in_mode = in_mode

    def run(self, args: Any, kwargs: Any, under: Any) -> Iterator[Finding]:
        given, (args, kwargs) = (args, kwargs), self._take(args, kwargs)
        before = [(Bytes(t), version(t)) for _, t in self.inputs]
        try:
            with torch.no_grad(), under():
                out = self.op(*args, **kwargs)
        except Exception as error:
            # torch.library.custom_op refuses an alias without a word of where it is.
            body = _torch_library.custom_op_body(self.plan.qualified)
            if body is None or "alias" not in str(error):
                yield self._finding("error", None, None, f"raised {type(error).__name__}: {error}")
                return
            args, kwargs = self._take(*given)
            with torch.no_grad():
                out = body(*args, **kwargs)
        else:
            yield from self._writes(before)
        outputs = () if self.plan.returns == 0 else (out,) if self.plan.returns == 1 else out
        yield from self._views(outputs, args, kwargs)
        yield from self._returned(outputs, args, kwargs)
        yield from self._fresh(outputs)

    def _take(self, args: Any, kwargs: Any) -> tuple[Any, Any]:
        args, kwargs = copied((args, kwargs))
        self.inputs = [(a, t) for a in self.plan.arguments for t in a.tensors(args, kwargs)]
        return args, kwargs

    def _writes(self, before: list[tuple[Bytes, int | None]]) -> Iterator[Finding]:
        written = [t for a, t in self.inputs if a.is_write]
        for (argument, t), (content, was) in zip(self.inputs, before, strict=True):
            name = argument.name
            if not content.differ_from(t):
                continue
            if not argument.is_write:
                if not any(share_memory(t, w) for w in written):
                    yield self._finding(
                        "undeclared write", name, None,
                        f"changed argument `{name}`, and its schema says that it does not; declare "
                        f"`Tensor(a!) {name}` (in torch.library.custom_op, mutates_args=({name!r},"
                        f")), or write a clone",
                    )  # fmt: skip
            elif was is not None and version(t) == was:
                where = " under a dispatch mode" if self.in_mode else ""
                yield self._finding(
                    "missing bump", name, None,
                    f"wrote argument `{name}`, and its version counter did not move{where}; give "
                    f"the op its ADInplaceOrView kernel by viewtrack.library.register"
                    f"({self.plan.qualified!r})",
                )  # fmt: skip

    def _views(self, outputs: Any, args: Any, kwargs: Any) -> Iterator[Finding]:
        for output in self.plan.views:
            bases = [t for a in output.arguments for t in a.tensors(args, kwargs)]
            names = " or ".join(f"`{a.name}`" for a in output.arguments)
            argument = output.arguments[0].name if output.arguments else None
            for t in _each(outputs[output.index]):
                base = next((b for b in bases if share_memory(t, b)), None)
                if base is None and t.numel():
                    yield self._finding(
                        "no view", argument, output.index,
                        f"returned a tensor of its own as output {output.index}, and its schema "
                        f"calls that a view of {names}; return a view for every input, or drop the "
                        f"alias annotation",
                    )  # fmt: skip
                elif base is not None and not _share_counter(t, base):
                    yield self._finding(
                        "unmarked view", argument, output.index,
                        f"returned output {output.index} as a view of {names} that autograd does "
                        f"not know as one: they do not share a version counter; give the op its "
                        f"ADInplaceOrView kernel by viewtrack.library.register"
                        f"({self.plan.qualified!r})",
                    )  # fmt: skip

    def _returned(self, outputs: Any, args: Any, kwargs: Any) -> Iterator[Finding]:
        for output in self.plan.written:
            argument = output.arguments[0]
            given = argument.tensors(args, kwargs)
            found = list(_each(outputs[output.index]))
            if len(found) != len(given) or any(
                a is not b for a, b in zip(found, given, strict=False)
            ):
                yield self._finding(
                    "missing return", argument.name, output.index,
                    f"returned another tensor as output {output.index}, and its schema calls that "
                    f"argument `{argument.name}` itself; end it with `return {argument.name}`",
                )  # fmt: skip

    def _fresh(self, outputs: Any) -> Iterator[Finding]:
        related = {output.index: output for output in (*self.plan.views, *self.plan.written)}
        seen: list[tuple[int, torch.Tensor]] = []
        for index, value in enumerate(outputs):
            declared = [a.name for a in related[index].arguments] if index in related else []
            for t in _each(value):
                yield from self._undeclared(index, t, declared)
                yield from self._among_outputs(index, t, seen, related)
            seen.extend((index, t) for t in _each(value))

    def _undeclared(self, index: int, t: torch.Tensor, declared: list[str]) -> Iterator[Finding]:
        own = [given for a, given in self.inputs if a.name in declared]
        for argument, given in self.inputs:
            name = argument.name
            apart = name not in declared and not any(share_memory(given, o) for o in own)
            if apart and share_memory(t, given):
                yield self._finding(
                    "undeclared alias", name, index,
                    f"returned output {index} in the memory of argument `{name}`, and its schema "
                    f"does not say so; declare it as `Tensor(a) {name} -> Tensor(a)`, or return a "
                    f"clone",
                )  # fmt: skip

    def _among_outputs(
        self, index: int, t: torch.Tensor, seen: list[tuple[int, torch.Tensor]], related: Any
    ) -> Iterator[Finding]:
        for other, earlier in seen:
            if other in related and index in related:
                continue  # both lie in memory of arguments, which was looked at
            if share_memory(t, earlier):
                yield self._finding(
                    "outputs alias", None, index,
                    f"returned output {other} and output {index} in the same memory, and its "
                    f"schema does not say so; return a clone as output {index}",
                )  # fmt: skip

    def _finding(
        self, kind: str, argument: str | None, output: int | None, message: str
    ) -> Finding:
        name = self.plan.qualified
        return Finding(name, kind, argument, output, self.index, self.site, message)


def _share_counter(t: torch.Tensor, base: torch.Tensor) -> bool:
    was = version(t)
    if was is None or base.is_inference():
        return True
    torch.autograd.graph.increment_version(base)
    return version(t) == was + 1


def _each(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        yield from (t for t in value if isinstance(t, torch.Tensor))
