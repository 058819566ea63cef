"""What an operation on a wrapper subclass must do, as it does on plain tensors."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from .. import _torch
from ..info import version
from ..plan import plan_of
from ..subclass.kinds import is_wrapper, kind_of, parts_of
from .subclass_table import Of, Operation

Read = Callable[[torch.Tensor], torch.Tensor]
Same = Callable[[torch.Tensor, torch.Tensor], bool]


@dataclass(frozen=True)
class Subject:
    """The class under test.

    Attributes:
        make: makes a tensor of it that stands for a plain one.
        read: the plain tensor of values that one stands for.
        same: whether two plain tensors of values are the same, as far as the class keeps values.
        keeps_inner_counters: whether the counters of its inner tensors are to move too.
        results_are_plain: whether functional ops give plain tensors.
    """

    make: Of
    read: Read
    same: Same
    keeps_inner_counters: bool
    results_are_plain: bool = False


def check_operation(operation: Operation, subject: Subject) -> list[str]:
    """Try an operation, and say what is wrong with it.

    Args:
        operation: an entry of the table.
        subject: the class under test.

    Returns:
        A line for each thing that is wrong; empty if nothing is.
    """
    # Not in a mode: a mode that does nothing loses what foreach ops count.
    expected = _tried(operation, lambda t: t, nullcontext())
    plain, plain_out = expected.x, expected.outs
    spy = _Spy()
    found = _tried(operation, subject.make, spy)
    if found.error is not None:
        return [f"raised {found.error!r}, and plain tensors do not"]
    problems = spy.problems
    if len(found.outs) != len(plain_out):
        return [*problems, f"gave {len(found.outs)} tensors for {len(plain_out)}"]
    pairs = [("the argument", found.x, plain)]
    twins = zip(found.outs, plain_out, strict=True)
    pairs += [(f"output {i}", t, p) for i, (t, p) in enumerate(twins)]
    for name, t, p in pairs:
        problems += _compared(name, t, p, subject)
    if operation.kind == "functional" and not subject.results_are_plain:
        problems += _unwrapped(found)
    if operation.kind == "view":
        problems += _written_through(found, plain, plain_out, subject)
    if subject.keeps_inner_counters:
        problems += _inner_counters(pairs)
    return list(dict.fromkeys(problems))


# ------------------------------------------------------------------------------ running


class _Spy(_torch.QuietMode):
    """Looks at what the handler itself returns, before native kernels make something of it."""

    def __init__(self) -> None:
        super().__init__()
        self.problems: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if isinstance(func, _torch.OpOverload):
            self.problems += _of_handler(func, args, kwargs or {}, out)
        return out


@dataclass
class _Tried:
    x: torch.Tensor
    outs: list[torch.Tensor]
    error: Exception | None


def _tried(operation: Operation, make: Of, under: AbstractContextManager[Any]) -> _Tried:
    x = make(torch.arange(6.0).view(2, 3).clone())
    try:
        with under:
            out = operation.run(x, make)
    except Exception as error:
        return _Tried(x, [], error)
    outs = [t for t in _torch.tree_leaves(out) if isinstance(t, torch.Tensor)]
    return _Tried(x, outs, None)


# ------------------------------------------------------------------------------ checks


def _of_handler(func: Any, args: Any, kwargs: Any, out: Any) -> list[str]:
    """What is wrong with what a handler returned for one op."""
    plan = plan_of(func)
    outs = out if plan.returns > 1 else (out,)
    problems = []
    for output in plan.written:
        argument = output.arguments[0]
        given = argument.of(args, kwargs)
        if is_wrapper(given) and outs[output.index] is not given:
            problems.append(
                f"`{plan.name}` returned a new tensor and not its argument `{argument.name}`"
            )
    for output in plan.views if plan.has_native_kernel and not plan.is_composite else ():
        base = output.arguments[0].of(args, kwargs)
        value = outs[output.index]
        for t in value if isinstance(value, (list, tuple)) else (value,):
            problems += _of_view(plan.name, output.arguments[0].name, t, base)
    return problems


def _of_view(op: str, argument: str, t: Any, base: Any) -> list[str]:
    if not (is_wrapper(t) and is_wrapper(base)):
        return []
    if t is base:
        return [f"`{op}` returned its own argument; return a new tensor"]
    problems = []
    if not _torch.is_alias_of(t, base):
        problems.append(f"`{op}` returned a tensor whose storage is not that of `{argument}`")
    if t.requires_grad or t._is_view():
        problems.append(f"`{op}` returned a tensor that carries autograd metadata")
    return problems


def _unwrapped(found: _Tried) -> list[str]:
    """Results in the dtype of the argument that are not of its class."""
    return [
        f"output {i} is a `{type(t).__name__}` and no `{type(found.x).__name__}`; if that is "
        f"meant, set `results_are_plain = True`"
        for i, t in enumerate(found.outs)
        if t.dtype is found.x.dtype and not isinstance(t, type(found.x))
    ]


def _compared(name: str, t: torch.Tensor, plain: torch.Tensor, subject: Subject) -> list[str]:
    """Compare a tensor of the class with its plain twin."""
    problems = []
    for what, found, expected in (
        ("shape", tuple(t.shape), tuple(plain.shape)),
        ("strides", t.stride(), plain.stride()),
        ("dtype", t.dtype, plain.dtype),
        ("_is_view()", t._is_view(), plain._is_view()),
        ("_version", version(t), version(plain)),
    ):
        if found != expected:
            problems.append(f"{name} has {what} {found}, a plain one {expected}")
    if t.requires_grad and not plain.requires_grad:
        problems.append(f"{name} requires grad, a plain one does not")
    values = subject.read(t) if is_wrapper(t) else t
    if values.shape == plain.shape and not subject.same(values.detach(), plain.detach()):
        problems.append(f"{name} has values {values.tolist()}, a plain one {plain.tolist()}")
    elif values.shape != plain.shape:
        problems.append(f"the values of {name} have shape {tuple(values.shape)}")
    return problems


def _written_through(
    found: _Tried, plain: torch.Tensor, plain_out: list[torch.Tensor], subject: Subject
) -> list[str]:
    """Write to each view, and look for it in the base."""
    problems = []
    for index, (t, p) in enumerate(zip(found.outs, plain_out, strict=True)):
        base = p._base
        if base is plain and t._base is not found.x:
            problems.append(f"output {index} has another `_base` than the argument")
        try:
            t.add_(index + 1)
        except Exception as error:
            return [*problems, f"writing to output {index} raised {error!r}"]
        p.add_(index + 1)
    if not subject.same(subject.read(found.x), plain):
        problems.append("what is written to a view does not reach its base: the handler copied")
    if version(found.x) != version(plain):
        problems.append(f"writes to views moved the base's counter to {version(found.x)}")
    return problems


def _inner_counters(pairs: list[tuple[str, torch.Tensor, torch.Tensor]]) -> list[str]:
    """The counters of inner tensors against that of the wrapper that holds them."""
    problems = []
    for name, t, _ in pairs:
        if is_wrapper(t) and kind_of(type(t)).flattens:
            for part_name, part in parts_of(t):
                if version(part) != version(t):
                    problems.append(
                        f"{name} is at version {version(t)}, its inner tensor `{part_name}` at "
                        f"{version(part)}"
                    )
    return problems


def check_gradients(subject: Subject) -> list[str]:
    """Write to views of an intermediate result, and compare the gradient with a plain one's."""

    def gradient(make: Of, read: Read) -> torch.Tensor:
        x = make(torch.arange(6.0).view(2, 3).clone()).requires_grad_()
        y = x * 2
        y[0].mul_(3)
        y.t()[1:].add_(1)
        (y * y).sum().backward()
        if x.grad is None:
            raise RuntimeError("the leaf has no gradient after backward()")
        return read(x.grad) if is_wrapper(x.grad) else x.grad

    try:
        found = gradient(subject.make, subject.read)
    except Exception as error:
        return [f"backward through writes to views raised {error!r}"]
    expected = gradient(lambda t: t, lambda t: t)
    if subject.same(found, expected):
        return []
    return [f"the gradient is {found.tolist()}, a plain one {expected.tolist()}"]


def defined_at(cls: type) -> str:
    """Where a class's handler is defined, as ``file:line``."""
    try:
        code = inspect.unwrap(cls.__torch_dispatch__).__code__  # type: ignore[attr-defined]
        return f"{code.co_filename}:{code.co_firstlineno}"
    except AttributeError:
        return cls.__module__
