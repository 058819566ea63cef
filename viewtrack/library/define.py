"""`view_op`, `inplace_op`, `out_op`, `op`: define an op, from its schema and its body."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any, overload
from weakref import WeakMethod

import torch

from .._torch import library as _torch_library
from ..errors import ViewTrackError
from ..plan import forget
from .checks import checked_body
from .customop import CustomOp, install
from .schema import ANY, INPLACE, OUT, VIEW, checked_plan
from .signature import check_signature
from .spec import Body, Spec

Decorator = Callable[[Body], CustomOp]


def _define(
    kind: str,
    schema: str,
    body: Body | None,
    lib: torch.library.Library | None,
    opaque: bool | None,
    tags: Sequence[Any],
) -> Any:
    if not isinstance(schema, str):
        raise TypeError(
            f"viewtrack.library.{kind} takes the schema first, a str, got "
            f"{type(schema).__name__}; call it with one, as in "
            f'`@{kind}("mylib::name(Tensor x) -> Tensor")` with the outputs and writes of yours'
        )
    plan = checked_plan(schema, kind)

    def define(fn: Body) -> CustomOp:
        if not callable(fn):
            raise TypeError(
                f"viewtrack.library.{kind}: the body of `{plan.qualified}` must be callable, got "
                f"{type(fn).__name__}"
            )
        where = f"`{plan.qualified}` ({_where(fn)})"
        check_signature(_torch_library.parse_schema(schema), where, fn, "body")
        library = _library_for(kind, plan.qualified, lib)
        rest = schema.strip().partition("::")[2]
        library.define(rest, tags=(torch.Tag.pt2_compliant_tag, *tags))
        op = _torch_library.lookup(plan.qualified)
        forget(op)
        spec = Spec(op, plan, fn, _where(fn), is_out=kind == OUT, opaque=opaque, lib=library)
        spec.body = checked_body(spec, fn)
        library.impl(plan.qualified, spec.body, _torch_library.CompositeExplicit)
        custom = CustomOp(spec, fn)
        _torch_library.on_destroy(library, WeakMethod(custom._end))
        return install(custom)

    return define if body is None else define(body)


def _library_for(
    kind: str, qualified: str, lib: torch.library.Library | None
) -> torch.library.Library:
    """The library to define an op in."""
    namespace = qualified.partition("::")[0]
    if lib is None:
        return _own_library(namespace, qualified)
    mend = f"make it by torch.library.Library({namespace!r}, 'FRAGMENT')"
    if lib.ns != namespace:
        raise ViewTrackError(
            f"viewtrack.library.{kind}: `lib` is of the namespace `{lib.ns}`, and the op is "
            f"`{qualified}`; {mend}"
        )
    if _torch_library.is_destroyed(lib):
        raise ViewTrackError(
            f"viewtrack.library.{kind}: `lib` was destroyed, so `{qualified}` cannot be defined in "
            f"it; {mend}"
        )
    return lib


_own: dict[str, torch.library.Library] = {}


def _own_library(namespace: str, qualified: str) -> torch.library.Library:
    """A library for one op, that lives until the op is defined again, as in a notebook."""
    before = _own.pop(qualified, None)
    if before is not None:
        _torch_library.destroy(before)
    library = _own[qualified] = torch.library.Library(namespace, "FRAGMENT")
    return library


def _where(fn: Body) -> str:
    code = getattr(inspect.unwrap(fn), "__code__", None)
    return f"{code.co_filename}:{code.co_firstlineno}" if code is not None else repr(fn)


@overload
def view_op(
    schema: str,
    body: None = None,
    *,
    lib: torch.library.Library | None = None,
    opaque: bool | None = None,
    tags: Sequence[Any] = (),
) -> Decorator: ...


@overload
def view_op(
    schema: str,
    body: Body,
    *,
    lib: torch.library.Library | None = None,
    opaque: bool | None = None,
    tags: Sequence[Any] = (),
) -> CustomOp: ...


def view_op(
    schema: str,
    body: Body | None = None,
    *,
    lib: torch.library.Library | None = None,
    opaque: bool | None = None,
    tags: Sequence[Any] = (),
) -> Any:
    """Define an op that returns views of its arguments, as ``aten.narrow`` and ``aten.split`` do.

    ``@view_op("mylib::first(Tensor(a) x, int n) -> Tensor(a)")`` above ``def first(x, n): return
    x[:n]`` makes ``first``, and ``torch.ops.mylib.first``, an op whose result is a differentiable
    view: ``_base``, shared version counter, creation_meta, and right gradients after in-place ops
    on either, as a native view op has them (``as_view`` in VariableTypeUtils.h, NOTE [ Autograd
    View Variables ] in variable.h).

    Args:
        schema: name and signature. Outputs ``Tensor(a)``, ``Tensor(a)[]``, or tuples with such.
        body: the function that does it, for all devices (`CustomOp.register_kernel` has others for
            some). It must return views of what the schema says, for every shape. Made of
            differentiable view ops, it needs no gradient formula; if it hides the views from
            autograd, the gradient is taken from their geometry.
        lib: the library that owns the registration; it ends when that is destroyed, or dies with
            its last reference. Without it, the op lives until it is defined again.
        opaque: True if neither autograd nor a compiler must look into the body, since it works on
            raw memory. None lets viewtrack find out.
        tags: more ``torch.Tag``s of the op.

    Returns:
        A `CustomOp`, or a decorator if `body` is left out.

    Raises:
        ViewTrackError: the schema makes no sense for a view op.
    """
    return _define(VIEW, schema, body, lib, opaque, tags)


def inplace_op(
    schema: str,
    body: Body | None = None,
    *,
    lib: torch.library.Library | None = None,
    opaque: bool | None = None,
    tags: Sequence[Any] = (),
) -> Any:
    """Define an op that writes its arguments, as ``aten.add_`` and ``aten._foreach_add_`` do.

    Every call moves the counter of what it writes, also if the body is a raw kernel (ctypes,
    numpy, Triton) and wherever it is called: above or below autograd, in a handler, under `track`.
    If the body is made of differentiable in-place ops it needs no gradient formula. If it is raw,
    give it one by `CustomOp.register_autograd`; without it, a gradient that reaches what was
    written raises, as do native ops without a derivative.

    Args:
        schema: name and signature, with ``Tensor(a!)``, ``Tensor(a!)?``, ``Tensor(a!)[]`` or
            ``Tensor(a!)?[]`` arguments; the outputs are these arguments, new tensors, or none.
        body: the function. It must return the argument itself where the schema says so.
        lib: as in `view_op`.
        opaque: as in `view_op`.
        tags: as in `view_op`.

    Returns:
        A `CustomOp`, or a decorator if `body` is left out.

    Raises:
        ViewTrackError: the schema makes no sense for an in-place op.
    """
    return _define(INPLACE, schema, body, lib, opaque, tags)


def out_op(
    schema: str,
    body: Body | None = None,
    *,
    lib: torch.library.Library | None = None,
    opaque: bool | None = None,
    tags: Sequence[Any] = (),
) -> Any:
    """Define an op that writes its results to tensors it is given, as ``aten.mul.out`` does.

    As `inplace_op`, except that autograd refuses it when an argument requires grad, as it refuses
    native out= ops.

    Args:
        schema: name and signature, ``(Tensor x, *, Tensor(a!) out) -> Tensor(a!)``.
        body: the function; it must return `out` itself.
        lib: as in `view_op`.
        opaque: as in `view_op`.
        tags: as in `view_op`.

    Returns:
        A `CustomOp`, or a decorator if `body` is left out.

    Raises:
        ViewTrackError: the schema makes no sense for an out= op.
    """
    return _define(OUT, schema, body, lib, opaque, tags)


def op(
    schema: str,
    body: Body | None = None,
    *,
    lib: torch.library.Library | None = None,
    opaque: bool | None = None,
    tags: Sequence[Any] = (),
) -> Any:
    """Define an op that views, writes, returns new tensors, or several of these.

    Where it only returns new tensors it is an op as ``torch.library.custom_op`` makes them, whose
    gradient may come from its body.

    Args:
        schema: name and signature, such as ``(Tensor(a!) cache, Tensor new, int pos) ->
            Tensor(a)`` for an op that fills a buffer and returns a part of it.
        body: the function.
        lib: as in `view_op`.
        opaque: as in `view_op`.
        tags: as in `view_op`.

    Returns:
        A `CustomOp`, or a decorator if `body` is left out.

    Raises:
        ViewTrackError: the schema makes no sense.
    """
    return _define(ANY, schema, body, lib, opaque, tags)
