"""What compilers and the transforms of torch.func see of an op.

They see its body, as if it were CompositeImplicitAutograd, so that they need no rule of its own:
AOTAutograd traces its ATen ops, vmap batches them, and functionalization knows their views. The op
itself stays whole for modes, subclasses, make_fx and the fake tensors of dynamo.

A body that reads memory cannot be traced. If all it does is to write, the compiler is given a
companion instead, ``ns::name__opaque``, with the same arguments and without the outputs that are
arguments: the form that ``auto_functionalized`` takes.
"""

from __future__ import annotations

import logging
from typing import Any

import torch

from .. import _torch, _torch_library
from ..errors import ViewTrackError
from .call import under_way
from .checks import check_aliases
from .history import note_inside
from .spec import Body, Spec

log = logging.getLogger(__name__)


def looks_through(
    spec: Spec, tensors: list[torch.Tensor], args: Any, kwargs: Any, needs: bool
) -> bool:
    """Whether the body is to run in the op's place."""
    if any(_torch.is_functorch_wrapped(t) for t in tensors):
        return spec.formula is None and not spec.opaque
    if any(_torch_library.is_functional(t) for t in tensors):
        return spec.formula is None and not is_opaque(spec, tensors, args, kwargs)
    # Outputs that are no views can get the history that autograd records in no other way where a
    # handler of a subclass stands between.
    return (
        needs
        and not spec.only_views
        and spec.formula is None
        and not spec.opaque
        and any(_is_wrapper(t) for t in tensors)
    )


def _is_wrapper(t: torch.Tensor) -> bool:
    dispatches = type(t).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__
    return dispatches and not _torch_library.is_fake(t)


def run_body(spec: Spec, args: Any, kwargs: Any) -> Any:
    """Run the body as a part of the program that calls the op."""
    try:
        return spec.run_body(args, kwargs)
    except RuntimeError as error:
        if "data pointer" in str(error) or "numpy()" in str(error):
            raise ViewTrackError(
                f"`{spec.name}` ({spec.where}) reads memory, which tensors that are traced or "
                f"transformed have none of: {error}; give the op its rule by `register_vmap` or "
                f"`register_autograd`"
            ) from error
        raise


# ------------------------------------------------------------------------------ fake tensors


def fake_of(spec: Spec) -> Body:
    """The op on tensors without memory: the user's function, else the body."""

    def fake(*args: Any, **kwargs: Any) -> Any:
        if spec.fake is not None:
            out = spec.fake(*args, **kwargs)
        elif spec.opaque or spec.untraceable:
            out = _trivial(spec, args, kwargs)
        else:
            out = _try_body(spec, args, kwargs)
        check_aliases(spec, args, kwargs, out)
        return out

    return fake


def _try_body(spec: Spec, args: Any, kwargs: Any) -> Any:
    call = under_way(spec, spec.tensors(args, kwargs))
    try:
        if call is None or not call.looks_inside:
            return spec.run_body(args, kwargs)
        with call.as_called():
            out = spec.run_body(args, kwargs)
        note_inside(call, out)
        return out
    except Exception as error:
        if not _is_trivial(spec):
            raise
        _found_untraceable(spec, error)
        return _trivial(spec, args, kwargs)


def _is_trivial(spec: Spec) -> bool:
    """Whether nothing new comes out: then outputs without memory need no body."""
    return len(spec.written) == spec.plan.returns


def _trivial(spec: Spec, args: Any, kwargs: Any) -> Any:
    if not _is_trivial(spec):
        raise ViewTrackError(
            f"`{spec.name}` ({spec.where}) needs a fake implementation under torch.compile, "
            f"torch.export and FakeTensorMode, since its body is opaque; use `register_fake`"
        )
    outputs = [spec.written[i].arguments[0].of(args, kwargs) for i in range(spec.plan.returns)]
    return spec.packed(outputs)


def _found_untraceable(spec: Spec, error: Exception) -> None:
    spec.untraceable = True
    log.info("the body of %s (%s) cannot be traced, so it is opaque to compilers: %s",
             spec.name, spec.where, error)  # fmt: skip


# ------------------------------------------------------------------------------ opaque bodies


def is_opaque(spec: Spec, tensors: list[torch.Tensor], args: Any, kwargs: Any) -> bool:
    """Whether compilers are to be given the companion."""
    if spec.opaque or spec.untraceable:
        return True
    if spec not in _probed:
        _probed.add(spec)
        if _is_trivial(spec):
            _probe(spec, tensors, args, kwargs)
    return spec.untraceable


_probed: set[Spec] = set()


def _probe(spec: Spec, tensors: list[torch.Tensor], args: Any, kwargs: Any) -> None:
    """Find out on fake tensors, since a body that fails midway would spoil a trace."""
    mode, fakes = _torch_library.fake_like(tensors)
    stand_ins = {id(t): fake for t, fake in zip(tensors, fakes, strict=True)}

    def swap(value: Any) -> Any:
        if isinstance(value, (list, tuple)):
            return [swap(v) for v in value]
        return stand_ins.get(id(value), value)

    try:
        with torch.no_grad(), _torch_library.without_modes(), mode:
            spec.run_body(tuple(map(swap, args)), {k: swap(v) for k, v in kwargs.items()})
    except Exception as error:
        _found_untraceable(spec, error)


def is_opaque_in(spec: Spec, tensors: list[torch.Tensor], args: Any, kwargs: Any) -> bool:
    """The same, where it is being compiled."""
    return any(_torch_library.is_functional(t) for t in tensors) and is_opaque(
        spec, tensors, args, kwargs
    )


def run_opaque(spec: Spec, args: Any, kwargs: Any) -> Any:
    """Put the companion into the compiler's graph."""
    if spec.views:
        raise ViewTrackError(
            f"`{spec.name}` ({spec.where}) returns a view, and its body is opaque to compilers; "
            f"make the view of ops that can be traced, in an op of its own"
        )
    fresh = _companion(spec)(*args, **kwargs)
    rest = iter(fresh if isinstance(fresh, tuple) else (fresh,))
    outputs = [
        spec.written[i].arguments[0].of(args, kwargs) if i in spec.written else next(rest)
        for i in range(spec.plan.returns)
    ]
    return spec.packed(outputs)


def _companion(spec: Spec) -> Any:
    """The op of the same effect whose outputs are new tensors only; defined when first needed."""
    if spec.companion is None:
        spec.companion = _define_companion(spec)
    return spec.companion


def _define_companion(spec: Spec) -> Any:
    head, _, _ = str(spec.schema).rpartition(" -> ")
    namespace, _, rest = head.partition("::")
    name, _, arguments = rest.partition("(")
    name = name.replace(".", "_") + "__opaque"
    fresh = [i for i in range(spec.plan.returns) if i not in spec.written]
    returns = ", ".join(str(spec.schema.returns[i].type) for i in fresh)
    lib = spec.lib
    lib.define(f"{name}({arguments} -> ({returns})", tags=(torch.Tag.pt2_compliant_tag,))
    op = getattr(getattr(torch.ops, namespace), name).default

    def kernel(*args: Any, **kwargs: Any) -> Any:
        outputs = spec.outputs(spec.op(*args, **kwargs))
        kept = tuple(outputs[i] for i in fresh)
        return None if not kept else kept[0] if len(kept) == 1 else kept

    def fake(*args: Any, **kwargs: Any) -> Any:
        outputs = spec.outputs(fake_of(spec)(*args, **kwargs))
        kept = tuple(outputs[i] for i in fresh)
        return None if not kept else kept[0] if len(kept) == 1 else kept

    lib.impl(name, kernel, _torch_library.CompositeExplicit)
    torch.library.register_fake(f"{namespace}::{name}", fake, lib=lib)
    return op
