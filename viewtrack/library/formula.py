"""A gradient formula of the user's, for ops that view, write, or do both.

torch.library takes formulas for functional ops only. Here a formula is that of the op's functional
form: what it returns, in order, and then each written argument that it does not return. So
`backward` gets one gradient for each of these, and returns one for each argument.

The op runs inside an autograd.Function whose outputs are ghosts: aliases that nobody else sees. The
history of each ghost is then given to the tensor it stands for, by the native Autograd kernel that
does such a thing: ``copy_`` for a written argument (``rebase_history``, also through views),
``alias`` for a view. So one Function does for several views and several written tensors at once,
which ``mark_dirty`` cannot.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from .. import _torch
from .._torch import library as _torch_library
from .._torch import view_fn as _torch_view_fn
from ..errors import ViewTrackError
from .call import Call, put
from .history import ViewFn, arguments_for, marked_leaf, swapped, with_arguments
from .relations import base_of
from .spec import Leaf, Place, Spec

Run = Callable[[], Any]


@dataclass(slots=True, eq=False)
class Formula:
    """The user's functions, as autograd.Function takes them.

    Attributes:
        backward: ``backward(ctx, *grads)``.
        setup_context: ``setup_context(ctx, inputs, output)``, or with ``keyword_only_inputs``.
        jvp: ``jvp(ctx, *tangents)``.
    """

    backward: Callable[..., Any] | None = None
    setup_context: Callable[..., Any] | None = None
    jvp: Callable[..., Any] | None = None

    def run(self, call: Call, run: Run) -> Any:
        """Run an op that does more than to view, and give its outputs their histories."""
        spec = call.spec
        ghosts, out = _Pass(self, call, run).apply()
        if is_transformed(call.tensors):
            return _functional(call, out, ghosts)
        outputs = [list(v) if isinstance(v, (list, tuple)) else v for v in spec.outputs(out)]
        leaves = [leaf for leaf in spec.leaves(out) if leaf.index not in spec.written]
        for leaf, ghost in zip(leaves, ghosts, strict=False):
            if leaf.index in spec.views:
                t = marked_leaf(call, leaf, _by_geometry)
                if _is_recorded(ghost):
                    _torch_library.set_history(t, ghost)
                put(outputs, leaf.place, t)
        written = [t for _, t in spec.writes(call.args, call.kwargs)]
        for t, ghost in zip(written, ghosts[len(leaves) :], strict=True):
            if _is_recorded(ghost):
                _torch_library.rebase_history(t, ghost)
        return spec.packed(with_arguments(spec, outputs, call.args, call.kwargs))

    def view_fn(self, call: Call, leaf: Leaf) -> ViewFn:
        """Make a view anew from another base, with the user's gradient."""
        spec, arguments, place = call.spec, arguments_for(call, base_of(call, leaf)), leaf.place

        def view_fn(base: torch.Tensor) -> torch.Tensor:
            args, kwargs = arguments(base)
            again = Call(spec, spec.tensors(args, kwargs), args, kwargs, looks_inside=False)
            ghosts, out = _Pass(self, again, lambda: spec.run_below(args, kwargs)).apply()
            ghost = ghosts[[other.place for other in spec.leaves(out)].index(place)]
            # Double backward through CopySlices writes to the view that it replays.
            view = ghost.detach()
            _torch_view_fn.as_view_with_fn(view, base, view_fn)
            if _is_recorded(ghost):
                _torch_library.set_history(view, ghost)
            return view

        return view_fn


def is_transformed(tensors: list[torch.Tensor]) -> bool:
    """Whether a transform of torch.func is at work."""
    return any(_torch.is_functorch_wrapped(t) for t in tensors)


def _functional(call: Call, out: Any, ghosts: tuple[torch.Tensor, ...]) -> Any:
    spec = call.spec
    outputs = [list(v) if isinstance(v, (list, tuple)) else v for v in spec.outputs(out)]
    leaves = [leaf for leaf in spec.leaves(out) if leaf.index not in spec.written]
    for leaf, ghost in zip(leaves, ghosts, strict=False):
        put(outputs, leaf.place, ghost)
    return spec.packed(with_arguments(spec, outputs, call.args, call.kwargs))


def _by_geometry(call: Call, leaf: Leaf) -> None:
    """No view_fn: running the op again would write again."""


def _is_recorded(ghost: torch.Tensor) -> bool:
    return ghost.requires_grad or _torch.tangent(ghost) is not None


class _Pass:
    """One run of the op in an autograd.Function.

    Afterwards it is kept for backward, and then holds no tensor: the tensors have it as their
    grad_fn.
    """

    def __init__(self, formula: Formula, call: Call, run: Run) -> None:
        self.formula = formula
        self.spec: Spec = call.spec
        self.places: list[Place] = []
        # What was passed for each argument: nothing, a tensor, or a list with or without holes.
        self.given = {
            a.name: _shape_of(a.of(call.args, call.kwargs)) for a in call.spec.plan.arguments
        }
        self._call: Call | None = call
        self._run: Run | None = run
        self._recording = _torch_library.recording_as_here()
        self._out: Any = None

    def apply(self) -> tuple[tuple[torch.Tensor, ...], Any]:
        """Ghosts, and what the op returned.

        There is a ghost for each output that is no written argument, then for each of those.
        """
        if self._call is None:
            raise RuntimeError("a pass runs once")
        try:
            if is_transformed(self._call.tensors):
                with _torch_library.single_level_functions():
                    ghosts = _LevelFunction.apply(self, *self._call.tensors)
            else:
                ghosts = _Function.apply(self, *self._call.tensors)  # type: ignore[no-untyped-call]
            return ghosts, self._out
        finally:
            self._call = self._run = self._out = None

    def forward(self, ctx: Any) -> tuple[torch.Tensor, ...]:
        """Run the op and let the user save for backward."""
        spec, call = self.spec, self._call
        if call is None or self._run is None:
            raise RuntimeError("a pass runs once")
        transformed = is_transformed(call.tensors)
        # The outer levels of torch.func record too, which a Function's forward puts off.
        with self._recording() if transformed else nullcontext():
            self._out = self._run()
        leaves = [leaf for leaf in spec.leaves(self._out) if leaf.index not in spec.written]
        self.places = [leaf.place for leaf in leaves]
        if transformed:
            return self._forward_transformed(ctx, call, leaves)
        with _torch_library.below_autograd():
            returned = [x.t.detach() if x.index in spec.views else x.t for x in leaves]
            written = [t.detach() for _, t in spec.writes(call.args, call.kwargs)]
        integral = [t for t in (*returned, *written) if not _is_differentiable(t)]
        if integral:
            ctx.mark_non_differentiable(*integral)
        self._set_up(ctx, call, [*returned, *written])
        return (*returned, *written)

    def _forward_transformed(
        self, ctx: Any, call: Call, leaves: list[Leaf]
    ) -> tuple[torch.Tensor, ...]:
        """The same in a transform of torch.func, whose wrappers native kernels do not mark.

        So an in-place op on a view that comes out is refused, as on that of any custom Function.
        """
        spec = self.spec
        with self._recording(), _torch_library.below_autograd():
            returned = [_torch_library.alias(x.t) if x.index in spec.views else x.t for x in leaves]
        written = [t for _, t in spec.writes(call.args, call.kwargs)]
        ctx.mark_dirty(*written)
        self._set_up(ctx, call, [*returned, *written])
        return (*returned, *written)

    def _set_up(self, ctx: Any, call: Call, ghosts: list[torch.Tensor]) -> None:
        if self.formula.setup_context is None:
            return
        args, kwargs = self.spec.completed(call.args, call.kwargs)
        groups = self._grouped(ghosts)
        output = groups[0] if len(groups) == 1 else tuple(groups)
        named = {"keyword_only_inputs": kwargs} if kwargs else {}
        self.formula.setup_context(ctx=ctx, inputs=args, output=output, **named)

    def _grouped(self, values: list[Any]) -> list[Any]:
        """Values for the ghosts, by output of the functional form, lists as lists."""
        spec = self.spec
        by_output: dict[int, Any] = {}
        for place, value in zip(self.places, values, strict=False):
            if place.position is None:
                by_output[place.index] = value
            else:
                by_output.setdefault(place.index, []).append(value)
        rest = iter(values[len(self.places) :])
        by_argument = {a.name: _like(self.given[a.name], rest) for a in spec.plan.writes}
        groups = []
        for index in range(spec.plan.returns):
            if index in spec.written:
                groups.append(by_argument.pop(spec.written[index].arguments[0].name))
            else:
                groups.append(by_output.get(index))
        return [*groups, *by_argument.values()]

    def backward(self, ctx: Any, grads: tuple[Any, ...]) -> tuple[Any, ...]:
        if self.formula.backward is None:
            raise ViewTrackError(
                f"`{self.spec.name}` ({self.spec.where}) has no gradient formula, only a jvp; give "
                f"it one by `register_autograd`"
            )
        needs = ctx.needs_input_grad
        ctx.needs_input_grad = self._by_argument(list(needs[1:]), False)
        try:
            result = self.formula.backward(ctx, *self._grouped(list(grads)))
        finally:
            ctx.needs_input_grad = needs
        return (None, *self._flat(result))

    def jvp(self, ctx: Any, tangents: tuple[Any, ...]) -> Any:
        call = self._call
        if call is None or not is_transformed(call.tensors):
            return self._jvp(ctx, tangents)
        # Forward mode is off in here, which the outer levels of torch.func must not see; what it
        # then records for this level has no place in a tangent.
        with self._recording():
            found = [_torch_library.without_tangent(t) for t in self._jvp(ctx, tangents)]
            # A Function that writes its input must write its tangent too.
            given = dict(zip(map(id, call.tensors), tangents[1:], strict=True))
            for i, (_, t) in enumerate(
                call.spec.writes(call.args, call.kwargs), start=len(self.places)
            ):
                if found[i] is not None and given[id(t)] is not None:
                    found[i] = given[id(t)].copy_(found[i])
        return tuple(found)

    def _jvp(self, ctx: Any, tangents: tuple[Any, ...]) -> Any:
        spec = self.spec
        if self.formula.jvp is not None:
            result = self.formula.jvp(ctx, *self._by_argument(list(tangents[1:]), None))
            return self._flat_outputs(result)
        if not spec.only_views:
            raise NotImplementedError(
                f"Trying to use forward AD with {spec.name} that does not support it, because it "
                f"has no jvp; give it one by `register_jvp`"
            )
        call = self._call
        if call is None:
            raise RuntimeError("a pass runs once")
        # A view is linear in its base.
        args: Any = call.args
        kwargs: Any = call.kwargs
        for t, tangent in zip(call.tensors, tangents[1:], strict=True):
            if tangent is not None:
                args, kwargs = swapped(args, t, tangent), swapped(kwargs, t, tangent)
        out = spec.run_below(args, kwargs)
        return tuple(place.of(spec, out) for place in self.places)

    def _by_argument(self, values: list[Any], missing: Any) -> tuple[Any, ...]:
        """Values for the tensors, by argument of the schema."""
        rest = iter(values)
        found = {a.index: _like(self.given[a.name], rest) for a in self.spec.plan.arguments}
        return tuple(found.get(i, missing) for i in range(len(self.spec.schema.arguments)))

    def _flat(self, result: Any) -> list[Any]:
        """What `backward` returned, by tensor."""
        spec = self.spec
        count = len(spec.schema.arguments)
        positional = sum(not a.kwarg_only for a in spec.schema.arguments)
        by_argument = result if isinstance(result, tuple) else (result,)
        if len(by_argument) not in (count, positional):
            raise ViewTrackError(
                f"the backward of `{spec.name}` returned {len(by_argument)} values; return one "
                f"gradient for each of its {count} arguments, None for those that have none"
            )
        flat: list[Any] = []
        for argument in spec.plan.arguments:
            index = argument.index
            grad = by_argument[index] if index < len(by_argument) else None
            given = self.given[argument.name]
            if isinstance(given, list):
                parts = grad if grad is not None else [None] * len(given)
                flat.extend(g for g, there in zip(parts, given, strict=True) if there)
            elif given:
                flat.append(grad)
        return flat

    def _flat_outputs(self, result: Any) -> tuple[Any, ...]:
        parts = result if isinstance(result, tuple) else (result,)
        spec = self.spec
        by_argument: list[Any] = []
        returned: list[Any] = []
        for index, part in enumerate(parts):
            values = list(part) if isinstance(part, (list, tuple)) else [part]
            kind = by_argument if index in spec.written or index >= spec.plan.returns else returned
            kind.extend(values)
        return (*returned, *by_argument)


Shape = bool | list[bool]


def _shape_of(value: Any) -> Shape:
    if isinstance(value, (list, tuple)):
        return [t is not None for t in value]
    return value is not None


def _like(given: Shape, values: Iterator[Any]) -> Any:
    """The next values, laid out as what was passed for an argument."""
    if isinstance(given, list):
        return [next(values) if there else None for there in given]
    return next(values) if given else None


def _is_differentiable(t: torch.Tensor) -> bool:
    return t.is_floating_point() or t.is_complex()


class _Methods:
    @staticmethod
    def forward(ctx: Any, run: _Pass, *tensors: torch.Tensor) -> Any:
        ctx.run = run
        return run.forward(ctx)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return ctx.run.backward(ctx, grads)

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        return ctx.run.jvp(ctx, tangents)


class _Function(_Methods, torch.autograd.Function):
    pass


class _LevelFunction(_Methods, _torch_library.SingleLevelFunction):  # type: ignore[misc]
    pass
