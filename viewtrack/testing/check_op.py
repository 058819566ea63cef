"""`check_op`: does an op do to memory and counters what its schema says?

Works for any op of the dispatcher, whoever defined it. Each call is made on copies of the inputs,
and what it did is read from the bytes, so raw kernels are found out too. Three calls are made with
each input: one, another with the same tensors, and one under a dispatch mode with new copies.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

from .. import _torch
from .._torch import library as _torch_library
from ..errors import ViewTrackError
from ..library.customop import body_of
from ..plan import plan_of
from ..site import caller
from .checked_call import Checked, CheckedCall, Fenced, unwritten
from .findings import Finding, once
from .named_ops import overload_of


def check_op(op: Any, *inputs: Any, notes: bool = False) -> list[Finding]:
    """Compare what an op does with what its schema says, over several inputs.

    Give inputs of several shapes, strides and sizes: an op may alias for some of them only.

    Args:
        op: an OpOverload, a packet with one overload, ``"mylib::name.overload"``, or what
            `viewtrack.library` or ``torch.library.custom_op`` returned.
        *inputs: the arguments of one call each: a tuple of positional arguments, or a pair of such
            a tuple and a dict of keyword arguments. They are copied, so nothing is written to.
        notes: whether to return also what a correct op may show (`Finding.is_note`): a declared
            write that no input showed, a written argument that got other sizes, an output among
            several that is None, an argument whose memory cannot be read.

    Returns:
        What differs; empty if nothing does. Found are outputs in memory of arguments, of other
        outputs, or of an earlier call, that the schema does not mention; declared views that are
        none, or that autograd does not know as views; arguments that are written undeclared, or
        given other sizes; writes beside the argument, in its storage or beyond it; writes that move
        no version counter, with or without a dispatch mode; written arguments that are not returned
        where the schema says so; outputs other than the schema's, and calls that raise.

    Raises:
        ViewTrackError: `op` names no op, there are no inputs, or one does not fit the schema.
    """
    overload = overload_of(op)
    if not inputs:
        raise ViewTrackError("check_op: give at least one input, a tuple of arguments")
    checked = Checked(overload, caller(2), definition_of(overload))
    findings: list[Finding] = []
    for index, given in enumerate(inputs):
        findings += _calls(checked, index, *_arguments(given))
    findings += unwritten(checked)
    return [finding for finding in once(findings) if notes or not finding.is_note]


def _arguments(given: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if isinstance(given, (tuple, list)):
        if len(given) == 2 and isinstance(given[0], tuple) and isinstance(given[1], dict):
            return given[0], given[1]
        return tuple(given), {}
    return (given,), {}


def definition_of(op: Any) -> str | None:
    """``file:line`` of the body of an op or, of ops that Python cannot see into, of its schema."""
    plan = plan_of(op)
    if plan.is_aten:
        return None
    body = body_of(plan.qualified) or _torch_library.custom_op_body(plan.qualified)
    code = getattr(body and inspect.unwrap(body), "__code__", None)
    if code is not None:
        return f"{code.co_filename}:{code.co_firstlineno}"
    return _torch_library.defined_at(plan.qualified)


def _calls(checked: Checked, index: int, args: Any, kwargs: Any) -> Iterator[Finding]:
    try:
        yield from _three_calls(checked, index, args, kwargs, fenced=True)
    except Fenced:
        yield from _three_calls(checked, index, args, kwargs, fenced=False)


def _three_calls(
    checked: Checked, index: int, args: Any, kwargs: Any, *, fenced: bool
) -> Iterator[Finding]:
    call = CheckedCall(checked, index, args, kwargs, fenced=fenced)
    first = list(call.run(nullcontext))
    yield from first
    if any(finding.kind in ("error", "wrong output") for finding in first):
        return
    for finding in call.again().run(nullcontext):
        # An op that gives its argument other sizes may not take it twice.
        if finding.kind != "error" or not plan_of(checked.op).writes:
            yield finding
    call = CheckedCall(checked, index, args, kwargs, fenced=fenced)
    yield from call.run(_PassThrough, " under a dispatch mode")


class _PassThrough(_torch.QuietMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))
