"""How the outputs of an op get their place in autograd's graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from .. import _torch
from .._torch import CreationMeta
from .._torch import library as _torch_library
from ..errors import AliasingError, ViewTrackError
from ..view import mark_as_view, share_version
from .call import Call, put
from .inspection import does_nothing, inspected
from .relations import base_of, is_marked, is_wrapper, reinterprets
from .spec import Leaf, Spec

ViewFn = Callable[[torch.Tensor], torch.Tensor]


def wants_gradient(tensors: list[torch.Tensor]) -> bool:
    """Whether autograd has anything to record, in backward or forward mode."""
    if torch.is_grad_enabled() and any(t.requires_grad for t in tensors):
        return True
    return any(_torch.tangent(t) is not None for t in tensors if _is_floating(t))


def check_writable(t: torch.Tensor) -> None:
    """Raise what native's ``check_inplace`` raises, before anything is written.

    Raises:
        RuntimeError: t is a leaf that requires grad, or a view that may not be written.
    """
    if not _is_floating(t):
        return
    if t._is_view():
        refused = _torch.creation_meta(t) is not CreationMeta.DEFAULT
        refused = refused or bool(t.requires_grad and t._base.is_leaf)  # type: ignore[union-attr]
    else:
        refused = t.requires_grad and t.is_leaf
    if refused:
        _torch_library.check_inplace(t)


def recorded_at(t: torch.Tensor) -> Any:
    """The grad_fn that tells whether autograd has seen a write to t: of a view, its base's.

    A view's own is made anew after any write, seen or not.
    """
    return t._base.grad_fn if t._is_view() else t.grad_fn  # type: ignore[union-attr]


def settle(call: Call, out: Any, needs: bool, histories: list[Any]) -> Any:
    """Give the outputs what autograd has not given them while the body ran.

    Args:
        call: the call that returned `out`.
        out: the op's outputs.
        needs: whether autograd records.
        histories: `recorded_at` of each written tensor before the call, if so.

    Returns:
        The outputs. Those that the schema calls arguments are the arguments.
    """
    spec = call.spec
    if call.is_settled and spec.only_views:
        return out
    if needs:
        _settle_writes(call, histories)  # before the views, which take their history from these
    outputs = [list(v) if isinstance(v, (list, tuple)) else v for v in spec.outputs(out)]
    for found in list(spec.leaves(out)):
        leaf = Leaf(found.place, call.taken_back(found.t))
        put(outputs, leaf.place, leaf.t)
        if leaf.index in spec.views:
            put(outputs, leaf.place, marked_leaf(call, leaf, _view_fn))
        elif needs and leaf.index not in spec.written:
            _settle_fresh(call, leaf)
    return spec.packed(with_arguments(spec, outputs, call.args, call.kwargs))


def with_arguments(spec: Spec, outputs: list[Any], args: Any, kwargs: Any) -> list[Any]:
    """The outputs, with those that are written arguments replaced by these."""
    for index, output in spec.written.items():
        outputs[index] = output.arguments[0].of(args, kwargs)
    return outputs


# ------------------------------------------------------------------------------ views


def marked_leaf(
    call: Call, leaf: Leaf, make: Callable[[Call, Leaf], ViewFn | None]
) -> torch.Tensor:
    """The output as a view of its base: itself, unless it is a view of something else already."""
    spec, t = call.spec, leaf.t
    base = base_of(call, leaf)
    if base is None or base.is_inference():
        return t
    if reinterprets(t, base) and spec.formula is None:
        return t if call.ran_inside else share_version(t, base)
    if is_marked(leaf, base):
        return t
    if _torch.is_functorch_wrapped(t):
        return t  # at this level of the transform nothing is recorded
    with _torch_library.without_modes():
        if t._is_view() or t.requires_grad:
            with _torch_library.below_inplace_or_view():
                t = t.detach()
        # The handler of a subclass need not give its views the storage of their base.
        apart = is_wrapper(t) and is_wrapper(base)
        meta = _creation_meta(leaf)
        view_fn = make(call, Leaf(leaf.place, t))
        try:
            return mark_as_view(t, base, True, True, view_fn, meta, alias_storage=apart)
        except AliasingError as error:
            raise AliasingError(f"`{spec.name}` ({spec.where}), {leaf}: {error}") from None
        except ViewTrackError as error:
            raise ViewTrackError(
                f"`{spec.name}` ({spec.where}), {leaf}: {error}; or give the op a gradient formula "
                f"by `register_autograd`"
            ) from None


def _creation_meta(leaf: Leaf) -> Any:
    if torch.is_inference_mode_enabled():
        return CreationMeta.INFERENCE_MODE
    if not torch.is_grad_enabled():
        return CreationMeta.NO_GRAD_MODE
    return CreationMeta.DEFAULT if leaf.place.position is None else CreationMeta.MULTI_OUTPUT_NODE


def _view_fn(call: Call, leaf: Leaf) -> ViewFn | None:
    """How to make the output anew from another base; None leaves it to its geometry."""
    spec = call.spec
    if not spec.only_views:
        return None
    if spec.formula is not None:
        return spec.formula.view_fn(call, leaf)
    if spec.opaque or call.is_raw or call.hides_views:
        return None
    if not call.ran_inside and inspected(spec, call.tensors, call.args, call.kwargs).hides_views:
        return None
    return body_view_fn(call, leaf)


def body_view_fn(call: Call, leaf: Leaf) -> ViewFn:
    """Run the body on another base and pick the output."""
    spec, arguments, place = call.spec, arguments_for(call, base_of(call, leaf)), leaf.place

    def view_fn(base: torch.Tensor) -> torch.Tensor:
        return place.of(spec, spec.run_body(*arguments(base)))

    return view_fn


Arguments = tuple[tuple[Any, ...], dict[str, Any]]


def arguments_for(call: Call, base: torch.Tensor | None) -> Callable[[torch.Tensor], Arguments]:
    """The arguments of a call, as a function of the tensor in the place of `base`.

    It does not hold on to `base`, whose grad_fn may come to hold on to it (CopySlices).
    """
    hollow = swapped((call.args, call.kwargs), base, _HOLE)

    def arguments(base: torch.Tensor) -> Arguments:
        filled: Arguments = swapped(hollow, _HOLE, base)
        return filled

    return arguments


_HOLE = object()


def swapped(value: Any, old: Any, new: Any) -> Any:
    """Arguments with `new` in the place of `old`."""
    if isinstance(value, dict):
        return {k: swapped(v, old, new) for k, v in value.items()}
    if isinstance(value, tuple):
        return tuple(swapped(v, old, new) for v in value)
    if isinstance(value, list):
        return [swapped(v, old, new) for v in value]
    return new if value is old else value


# ------------------------------------------------------------------------------ new tensors


def _settle_fresh(call: Call, leaf: Leaf) -> None:
    spec = call.spec
    if leaf.t.requires_grad or not _is_floating(leaf.t):
        return
    opaque = spec.opaque or call.is_raw or _is_unseen(call)
    if not call.ran_inside and not spec.plan.writes and not opaque:
        # A handler answered without running the op on these tensors. What it answered has the
        # gradient that the op has.
        with _torch_library.without_modes():
            out = leaf.place.of(spec, spec.run_body(call.args, call.kwargs))
        if out.requires_grad:
            _torch_library.set_history(leaf.t, out)
            return
    if not opaque:
        return  # autograd saw all of the body, and the output does not depend on what requires grad
    ghost = _underivable(call, str(leaf), leaf.t)
    _torch_library.set_history(leaf.t, ghost)


def _is_unseen(call: Call) -> bool:
    """Whether autograd cannot look into the body, in this call."""
    traits = inspected(call.spec, call.tensors, call.args, call.kwargs)
    if traits.captures and any(map(_torch_library.is_functional, call.tensors)):
        return True
    return traits.untraceable is not None


def _settle_writes(call: Call, histories: list[Any]) -> None:
    """Give each tensor that was written unseen by autograd a history that raises in backward."""
    writes = call.spec.writes(call.args, call.kwargs)
    inside = call.counted_inside or [False] * len(writes)
    for (argument, t), history, counted in zip(writes, histories, inside, strict=True):
        if not _is_floating(t) or recorded_at(t) is not history:
            continue
        if call.ran_inside and counted and not t.requires_grad:
            continue  # what the body wrote there does not depend on what requires grad
        if call.ran_inside and not counted and _does_nothing(call):
            continue
        ghost = _underivable(call, f"argument `{argument.name}`", t)
        _torch_library.rebase_history(t, ghost)


def _does_nothing(call: Call) -> bool:
    return does_nothing(call.spec, call.tensors, call.args, call.kwargs)


def _is_floating(t: torch.Tensor) -> bool:
    return t.is_floating_point() or t.is_complex()


def _underivable(call: Call, what: str, t: torch.Tensor) -> torch.Tensor:
    """A tensor of t's shape, dtype and device that raises when a gradient reaches it."""
    text = (
        f"`{call.spec.name}` ({call.spec.where}): {what} was written unseen by autograd, so its "
        f"gradient is not known; give the op a formula by `register_autograd`, or call it under "
        f"torch.no_grad()"
    )
    ghost: torch.Tensor = _Underivable.apply(text, t, *call.tensors)  # type: ignore[no-untyped-call]
    return ghost


class _Underivable(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, text: str, like: torch.Tensor, *tensors: torch.Tensor) -> Any:
        ctx.text = text
        return like.new_zeros(()).expand(like.shape)

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        # Where only a part of a base was written, the rest of it sends zeros here. While a program
        # is compiled, nobody can tell.
        traced = _torch_library.is_functional(grad) or _torch_library.is_fake(grad)
        if traced or grad.any():
            raise ViewTrackError(ctx.text)
        return (None,) * len(ctx.needs_input_grad)

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        raise ViewTrackError(ctx.text)
