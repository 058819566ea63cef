"""What compilers and the transforms of torch.func see of an op.

They see its body, as if it were CompositeImplicitAutograd, so that they need no rule of its own:
AOTAutograd traces its ATen ops, vmap batches them, and functionalization knows their views. The op
itself stays whole for modes, subclasses, make_fx and the fake tensors of dynamo.

A body that reads memory cannot be traced. If all it does is to write, the compiler is given a
companion instead, ``ns::name__opaque``, with the same arguments and without the outputs that are
arguments: the form that ``auto_functionalized`` takes.
"""

from __future__ import annotations

from typing import Any

import torch

from .. import _torch
from .._torch import fakes as _fakes
from .._torch import library as _torch_library
from ..errors import ViewTrackError
from .call import Call, put, under_way
from .checks import check_aliases
from .inspection import inspected
from .relations import is_wrapper, note_inside
from .schema import companion_schema
from .spec import Body, Spec


def looks_through(
    spec: Spec, tensors: list[torch.Tensor], args: Any, kwargs: Any, needs: bool
) -> bool:
    """Whether the body is to run in the op's place."""
    if any(_torch.is_functorch_wrapped(t) for t in tensors):
        if needs and spec.opaque and spec.formula is None:
            raise ViewTrackError(
                f"`{spec.name}` ({spec.where}) is opaque, and torch.func cannot differentiate it; "
                f"give it a gradient formula by `register_autograd`"
            )
        return spec.formula is None and not spec.opaque
    if any(_torch_library.is_functional(t) for t in tensors):
        return spec.formula is None and not is_opaque(spec, tensors, args, kwargs)
    # Outputs that are no views get the history that autograd records in no other way where a
    # subclass's handler, or a fallback that resolves conj bits, hands the body other tensors.
    changed = any(is_wrapper(t) or t.is_conj() or t.is_neg() for t in tensors)
    return (
        needs
        and changed
        and not spec.only_views
        and spec.formula is None
        and not is_raw(spec, tensors, args, kwargs)
    )


def run_body(spec: Spec, args: Any, kwargs: Any) -> Any:
    """Run the body as a part of the program that calls the op.

    Raises:
        ViewTrackError: the body reads memory, or hides its views from autograd.
    """
    tensors = spec.tensors(args, kwargs)
    traits = inspected(spec, tensors, args, kwargs)
    if traits.captures and any(_torch_library.is_functional(t) for t in tensors):
        raise ViewTrackError(f"{_captures(spec)}, and so cannot be traced; {_PASS_IT}")
    if traits.untraceable is not None:
        raise ViewTrackError(
            f"`{spec.name}` ({spec.where}) reads memory, and tensors that are traced or "
            f"transformed have none: {traits.untraceable}; give the op its rule by `register_vmap` "
            f"or `register_autograd`"
        ) from traits.untraceable
    if traits.hides_views and any(_torch.is_functorch_wrapped(t) for t in tensors):
        raise ViewTrackError(
            f"`{spec.name}` ({spec.where}) hides its views from autograd, as `detach()` and "
            f"`no_grad()` do, and torch.func would lose their gradient; make them by "
            f"differentiable ops, or give the op its rules by `register_autograd` and "
            f"`register_vmap`"
        )
    if not traits.hides_views:
        return spec.run_body(args, kwargs)
    try:
        out = spec.run_body(args, kwargs)
    except RuntimeError as error:
        if "inference tensor" not in str(error):
            raise
        raise ViewTrackError(
            f"`{spec.name}` ({spec.where}) enters inference_mode, which AOTAutograd cannot trace; "
            f"make the views without it, or under torch.no_grad()"
        ) from error
    return _by_geometry(spec, args, kwargs, out)


def check_formula_is_kept(spec: Spec, tensors: list[torch.Tensor]) -> None:
    """Refuse to batch the body where a gradient or tangent would then pass the user's formula by.

    Raises:
        ViewTrackError: the op has a formula and no batching rule, and its derivative is asked for.
    """
    if spec.formula is None and not spec.opaque:
        return
    asked = any(_torch_library.needs_grad_inside(t) for t in tensors)
    if not asked and _torch.forward_ad_level() < 0:
        return
    # A view is linear in its base, so its tangent needs no formula.
    asked = asked or (
        not (spec.only_views and spec.formula is not None and spec.formula.jvp is None)
        and any(_torch_library.has_tangent_inside(t) for t in tensors)
    )
    if asked:
        raise ViewTrackError(
            f"`{spec.name}` ({spec.where}) is opaque or has a gradient formula of its own, and has "
            f"no batching rule; give it one by `register_vmap`"
        )


def _by_geometry(spec: Spec, args: Any, kwargs: Any, out: Any) -> Any:
    """The same views, made of their bases by an op that autograd knows."""
    outputs = [list(v) if isinstance(v, (list, tuple)) else v for v in spec.outputs(out)]
    for leaf in list(spec.leaves(out)):
        if leaf.index in spec.views:
            base = next(
                t for a in spec.views[leaf.index].arguments for t in a.tensors(args, kwargs)
            )
            t = leaf.t
            put(outputs, leaf.place, base.as_strided(t.size(), t.stride(), t.storage_offset()))
    return spec.packed(outputs)


# ------------------------------------------------------------------------------ fake tensors


def fake_of(spec: Spec) -> Body:
    """The op on tensors without memory: the user's function, else the body."""

    def fake(*args: Any, **kwargs: Any) -> Any:
        tensors = spec.tensors(args, kwargs)
        if spec.fake is not None:
            out = spec.fake(*args, **kwargs)
        elif (
            is_raw(spec, tensors, args, kwargs)
            or inspected(spec, tensors, args, kwargs).reads_captured
        ):
            out = _trivial(spec, args, kwargs)
        elif inspected(spec, tensors, args, kwargs).captures:
            with _fakes.real_allowed(_fakes.fake_mode_of(tensors)):
                out = _run_inside(under_way(spec, tensors, args, kwargs), spec, args, kwargs)
        else:
            out = _run_inside(under_way(spec, tensors, args, kwargs), spec, args, kwargs)
        check_aliases(spec, args, kwargs, out)
        return out

    return fake


def _run_inside(call: Call | None, spec: Spec, args: Any, kwargs: Any) -> Any:
    if call is None or not call.looks_inside:
        return spec.run_body(args, kwargs)
    return call.handed_up(call.run_inside(lambda: _noted(call, args, kwargs)))


def _noted(call: Call, args: Any, kwargs: Any) -> Any:
    out = call.spec.run_body(args, kwargs)
    note_inside(call, out)
    return out


def _trivial(spec: Spec, args: Any, kwargs: Any) -> Any:
    if spec.views:
        raise ViewTrackError(
            f"`{spec.name}` ({spec.where}) returns a view, and its body is opaque, so "
            f"torch.compile cannot take it; make the view of ops that can be traced, in an op of "
            f"its own (for torch.export and FakeTensorMode `register_fake` is enough)"
        )
    if not spec.is_trivial:
        raise ViewTrackError(
            f"`{spec.name}` ({spec.where}) needs a fake implementation under torch.compile, "
            f"torch.export and FakeTensorMode, since its body is opaque; use `register_fake`"
        )
    outputs = [spec.written[i].arguments[0].of(args, kwargs) for i in range(spec.plan.returns)]
    return spec.packed(outputs)


# ------------------------------------------------------------------------------ opaque bodies


def is_opaque(spec: Spec, tensors: list[torch.Tensor], args: Any, kwargs: Any) -> bool:
    """Whether compilers are to be given the companion."""
    if is_raw(spec, tensors, args, kwargs):
        return True
    traits = inspected(spec, tensors, args, kwargs)
    if traits.captures_grad and any(_torch_library.is_functional(t) for t in tensors):
        raise ViewTrackError(
            f"{_captures(spec)} and that requires grad, and a compiler would lose its gradient; "
            f"{_PASS_IT}"
        )
    return traits.captures


def is_raw(spec: Spec, tensors: list[torch.Tensor], args: Any, kwargs: Any) -> bool:
    """Whether the body reads memory, which tensors do not have while they are traced."""
    return bool(spec.opaque) or inspected(spec, tensors, args, kwargs).untraceable is not None


def _captures(spec: Spec) -> str:
    return f"`{spec.name}` ({spec.where}) uses a tensor that it was not given"


_PASS_IT = "make that tensor an argument of the op"


def is_opaque_in(spec: Spec, tensors: list[torch.Tensor], args: Any, kwargs: Any) -> bool:
    """The same, where it is being compiled."""
    return any(_torch_library.is_functional(t) for t in tensors) and is_opaque(
        spec, tensors, args, kwargs
    )


def run_opaque(spec: Spec, args: Any, kwargs: Any) -> Any:
    """Put the companion into the compiler's graph."""
    if spec.views:
        raise _view_of_opaque(spec, spec.tensors(args, kwargs), args, kwargs)
    return _with_arguments(spec, spec.companion(*args, **kwargs), args, kwargs)


def _view_of_opaque(
    spec: Spec, tensors: list[torch.Tensor], args: Any, kwargs: Any
) -> ViewTrackError:
    if not spec.opaque and inspected(spec, tensors, args, kwargs).captures:
        return ViewTrackError(
            f"{_captures(spec)} and returns a view, which compilers cannot take; {_PASS_IT}"
        )
    return ViewTrackError(
        f"`{spec.name}` ({spec.where}) returns a view, and its body is opaque to compilers; "
        f"make the view of ops that can be traced, in an op of its own"
    )


def functionalize(spec: Spec, args: Any, kwargs: Any) -> Any:
    """What a Functionalize kernel does: run the body, or hand the compiler the companion."""
    tensors = spec.tensors(args, kwargs)
    in_transform = any(_torch.is_functorch_wrapped(t) for t in tensors)
    if in_transform or spec.views or not is_opaque(spec, tensors, args, kwargs):
        return run_body(spec, args, kwargs)
    fresh = _torch_library.call_functionalized(spec.companion, args, kwargs)
    return _with_arguments(spec, fresh, args, kwargs)


def _with_arguments(spec: Spec, fresh: Any, args: Any, kwargs: Any) -> Any:
    """The op's outputs, of those that the companion has."""
    rest = iter(fresh if isinstance(fresh, tuple) else (fresh,))
    outputs = [
        spec.written[i].arguments[0].of(args, kwargs) if i in spec.written else next(rest)
        for i in range(spec.plan.returns)
    ]
    return spec.packed(outputs)


def define_companion(spec: Spec) -> Any:
    """The op of the same effect whose outputs are new tensors only.

    It is defined at once, since code that a compiler finds in its cache calls it by name.
    """
    namespace, _, schema = companion_schema(spec.schema, spec.plan).partition("::")
    name = schema.partition("(")[0]
    fresh = [i for i in range(spec.plan.returns) if i not in spec.written]
    lib = spec.library()
    lib.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
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
