"""`register`: the same kernels for an op that somebody else defined."""

from __future__ import annotations

import functools
import inspect
import weakref
from collections.abc import Callable
from typing import Any

import torch

from .._torch import library as _torch_library
from .._torch.dynamo import skip_dynamo
from .._torch.kernels import has_autograd_kernel
from ..errors import ViewTrackError
from ..plan import Plan, forget
from .checks import checked_body
from .customop import CustomOp, install, install_counting
from .native import check_can_count
from .schema import ANY, check_annotations
from .spec import Body, Spec


def register(
    op: Any,
    body: Body | None = None,
    *,
    lib: torch.library.Library | None = None,
    opaque: bool | None = None,
) -> CustomOp:
    """Give an op that was defined with ``torch.library``, in Python or in C++, its missing kernels.

    ``Library.define`` gives an op no ADInplaceOrView kernel: its views are none to autograd, and
    its writes move no counter. Afterwards they do, everywhere. The op keeps its backend kernels,
    its fake implementation, and its Autograd kernel if it has one of its own; then its views may
    not be written in place, so rather let `CustomOp.register_autograd` have the formula.

    Some of ATen's own ops that write have no such kernel either, those of the fused optimizers
    among them. Registered, they count too, and remain torch's in all other respects. Where a
    version of torch counts an op itself, nothing is done.

    Args:
        op: an OpOverload, a packet with one overload, ``"mylib::name.overload"``, or what
            ``torch.library.custom_op`` returns (above which this may stand as a decorator).
        body: what autograd, vmap and compilers are to see of it; the kernel of the backend itself
            if left out.
        lib: the library that owns the registration; it ends when that is destroyed, or dies.
        opaque: as in `view_op`.

    Returns:
        The `CustomOp`, on which formulas can be registered.

    Raises:
        ViewTrackError: there is no such op, it is CompositeImplicitAutograd and needs none, its
            schema makes no sense, or it is torch's own and writes nothing that may be counted.
    """
    found = _lookup(op)
    plan = check_annotations(found._schema, ANY)
    if plan.is_composite:
        raise ViewTrackError(
            f"viewtrack.library.register: `{plan.qualified}` is CompositeImplicitAutograd: "
            f"autograd sees the ops that it is made of, so it needs no kernel of its own"
        )
    if plan.is_aten:
        return _register_native(found, plan, lib)
    _kept.append(found)
    owns = lib is None
    lib = _own_library(plan.qualified) if lib is None else lib
    definition = _torch_library.custom_op_def(plan.qualified)
    foreign_autograd = definition is None and has_autograd_kernel(plan.qualified)
    is_out = bool(plan.writes) and all(a.kwarg_only for a in plan.writes)
    spec = Spec(
        found,
        plan,
        body or _backend_kernel(found),
        _where(body, found),
        is_out=is_out,
        opaque=opaque,
        lib=lib,
    )
    if body is not None:
        spec.body = checked_body(spec, body)
    custom = CustomOp(spec, body or found)
    _torch_library.on_destroy(lib, lambda: functools.partial(forget, found))
    if owns and definition is not None:
        _end_with(_torch_library.custom_op_library(definition), lib, custom)
    fake = not _torch_library.has_fake(plan.qualified)
    return install(custom, autograd=not foreign_autograd, fake=fake)


def _register_native(found: Any, plan: Plan, lib: torch.library.Library | None) -> CustomOp:
    """Count what an op of torch's own writes, if torch does not do so itself."""
    check_can_count(plan)
    counts = _counts_itself.setdefault(plan.qualified, plan.has_native_kernel)
    if lib is None and not counts:
        lib = _own_library(plan.qualified)
    spec = Spec(found, plan, found, _where(None, found), opaque=True, lib=lib)
    custom = CustomOp(spec, found)
    if counts or lib is None:
        return custom
    _torch_library.on_destroy(lib, lambda: functools.partial(forget, found))
    return install_counting(custom)


_counts_itself: dict[str, bool] = {}


def _own_library(qualified: str) -> torch.library.Library:
    """A library for one op, that lives until the op is registered again."""
    before = _libraries.pop(qualified, None)
    if before is not None:
        _torch_library.destroy(before)
    lib = _libraries[qualified] = torch.library.Library(qualified.partition("::")[0], "FRAGMENT")
    return lib


_libraries: dict[str, torch.library.Library] = {}

# The dispatcher hands modes the OpOverload that it looked up first for an op, and holds no
# reference to it: it must outlive the definition where kernels of another library, as these are,
# are left.
_kept: list[Any] = []


def _end_with(
    definition: torch.library.Library, lib: torch.library.Library, custom: CustomOp
) -> None:
    """Take the kernels back when the op is defined again: the next is a new op to the dispatcher.

    Else modes are given the OpOverload of the old one, with its schema.
    """
    kernels, end = [weakref.ref(lib)], weakref.WeakMethod(custom._end)
    _torch_library.on_destroy(lib, lambda: kernels.clear)  # not twice

    def take_back() -> None:
        alive = kernels.pop()() if kernels else None
        if alive is not None:
            _torch_library.destroy(alive)
        told = end()
        if told is not None:
            told()

    _torch_library.on_destroy(definition, lambda: take_back)


def _lookup(op: Any) -> Any:
    try:
        found = _torch_library.lookup(op) if isinstance(op, str) else op
    except AttributeError:
        raise ViewTrackError(
            f"viewtrack.library.register: there is no op `{op}`; define it first, and import the "
            f"module or load the library that does"
        ) from None
    overload = _torch_library.overload_of(found)
    if overload is None:
        raise ViewTrackError(
            f"viewtrack.library.register: `{op}` does not name one op; pass an overload, as in "
            f"torch.ops.mylib.name.default"
        )
    return overload


def _backend_kernel(op: Any) -> Callable[..., Any]:
    """The kernel that the first tensor's backend has, as a function that ops inside of it see."""

    def body(*args: Any, **kwargs: Any) -> Any:
        return op.redispatch(_torch_library.backend_of(args, kwargs), *args, **kwargs)

    skip_dynamo(body)
    return body


def _where(body: Body | None, op: Any) -> str:
    seen = body or _torch_library.custom_op_body(op.name())
    code = getattr(seen and inspect.unwrap(seen), "__code__", None)
    if code is not None:
        return f"{code.co_filename}:{code.co_firstlineno}"
    return f"defined as {op._schema}"
