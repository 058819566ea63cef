"""What the kernels of one op share: its plan, its body, and how its outputs are laid out."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from dataclasses import InitVar, dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch

from .._torch import library as _torch_library
from ..plan import Argument, Output, Plan

if TYPE_CHECKING:
    from .formula import Formula

Body = Callable[..., Any]


@dataclass(eq=False)
class Spec:
    """One op.

    Attributes:
        op: the OpOverload.
        plan: its plan, as if it had an ADInplaceOrView kernel already.
        body: the function that does it, in terms that can be traced and differentiated unless it
            is opaque.
        where: ``file:line`` of the body, for errors.
        is_out: whether it is an out= op, which autograd refuses.
        opaque: True if autograd must not look into the body; None if that is to be found out.
        formula: the user's gradient formula.
        fake: the user's fake implementation.
        vmap: the user's batching rule.
        lib: the ``torch.library.Library`` that its kernels are registered in. They hold this spec,
            so it does not hold the library, which ends the op when its owner lets it die.
        companion: the op that compilers are given where the body is opaque (`traced.py`).
        kernel_devices: the types of device that have a kernel of their own.
        custom: the `CustomOp`, which lives as long as the kernels, which hold on to this.
        schema: the FunctionSchema.
        only_views: whether running it again does no harm, and gives only views.
        returned: what kind of value each output is.
        bottom_plan: the plan as it is without an ADInplaceOrView kernel, to ask who counts a write.
    """

    op: Any
    plan: Plan
    body: Body
    where: str
    is_out: bool = False
    opaque: bool | None = None
    formula: Formula | None = None
    fake: Body | None = None
    vmap: Body | None = None
    lib: InitVar[Any] = None
    companion: Any = None
    custom: Any = None
    kernel_devices: set[str] = field(default_factory=set)
    schema: Any = field(init=False)
    only_views: bool = field(init=False)
    returned: list[_Returned] = field(init=False)
    bottom_plan: Plan = field(init=False)
    views: dict[int, Output] = field(init=False)
    written: dict[int, Output] = field(init=False)

    def __post_init__(self, lib: Any) -> None:
        self.library: Callable[[], Any] = weakref.ref(lib) if lib is not None else lambda: None
        self.schema = self.op._schema
        self.bottom_plan = replace(self.plan, has_native_kernel=False)
        self.views = {output.index: output for output in self.plan.views}
        self.written = {output.index: output for output in self.plan.written}
        arguments = self.schema.arguments
        self._positional = [a for a in arguments if not a.kwarg_only]
        self._named = [a for a in arguments if a.kwarg_only]
        # Where all tensors are passed one by one and by position they are found at once.
        plain = not any(a.is_list or a.kwarg_only for a in self.plan.arguments)
        self._places = [a.index for a in self.plan.arguments] if plain else None
        self.only_views = not self.plan.writes and len(self.views) == self.plan.returns
        self.returned = [_Returned(str(r.type)) for r in self.schema.returns]

    @property
    def name(self) -> str:
        """The name that errors show."""
        return self.plan.qualified

    @property
    def is_trivial(self) -> bool:
        """Whether nothing new comes out: then outputs without memory need no body."""
        return len(self.written) == self.plan.returns

    def tensors(self, args: Any, kwargs: Any) -> list[torch.Tensor]:
        """All tensors among the arguments, in the schema's order."""
        if self._places is not None and len(args) == len(self._positional):
            return [args[i] for i in self._places if args[i] is not None]
        return [t for a in self.plan.arguments for t in a.tensors(args, kwargs)]

    def writes(self, args: Any, kwargs: Any) -> list[tuple[Argument, torch.Tensor]]:
        """The tensors that a call writes."""
        if not self.plan.writes:
            return []
        return [(a, t) for a in self.plan.writes for t in a.tensors(args, kwargs)]

    def outputs(self, out: Any) -> tuple[Any, ...]:
        """The outputs one by one, lists as lists."""
        count = self.plan.returns
        return () if count == 0 else (out,) if count == 1 else tuple(out)

    def packed(self, outputs: list[Any]) -> Any:
        """The opposite of `outputs`."""
        count = self.plan.returns
        return None if count == 0 else outputs[0] if count == 1 else tuple(outputs)

    def leaves(self, out: Any) -> Iterator[Leaf]:
        """The output tensors."""
        if isinstance(out, torch.Tensor):
            yield Leaf(_FIRST, out)
            return
        for index, value in enumerate(self.outputs(out)):
            if isinstance(value, torch.Tensor):
                yield Leaf(Place(index, None), value)
            elif isinstance(value, (list, tuple)):
                for position, t in enumerate(value):
                    if isinstance(t, torch.Tensor):
                        yield Leaf(Place(index, position), t)

    def completed(self, args: Any, kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments with those that the dispatcher left out for being the defaults."""
        if len(args) == len(self._positional) and not self._named:
            return args, kwargs
        rest = [kwargs.get(a.name, a.default_value) for a in self._positional[len(args) :]]
        named = {a.name: kwargs.get(a.name, a.default_value) for a in self._named}
        return (*args, *rest), named

    def run_body(self, args: Any, kwargs: Any) -> Any:
        """Run the body as a part of the program that calls it: autograd looks into it."""
        return self.body(*args, **kwargs)

    def run_below(self, args: Any, kwargs: Any) -> Any:
        """Run the op below autograd: its outputs have no autograd metadata."""
        with _torch_library.below_inplace_or_view():
            return self.op(*args, **kwargs)


class _Returned:
    """What kind of value an output is."""

    __slots__ = ("is_list", "is_optional", "is_tensor")

    def __init__(self, kind: str) -> None:
        self.is_tensor = "Tensor" in kind and "Dict" not in kind
        self.is_list = "List[" in kind
        self.is_optional = "Optional[" in kind


@dataclass(frozen=True, slots=True)
class Place:
    """Where an output tensor is.

    Attributes:
        index: which output it is, or is in.
        position: its place in that, if that is a list.
    """

    index: int
    position: int | None

    def of(self, spec: Spec, out: Any) -> torch.Tensor:
        """The tensor at this place."""
        value = spec.outputs(out)[self.index]
        found: torch.Tensor = value if self.position is None else value[self.position]
        return found

    def __str__(self) -> str:
        return f"output {self.index}" + ("" if self.position is None else f"[{self.position}]")


class Leaf:
    """An output tensor `t`, its place, and the index of the output that it is, or is in.

    Whatever outlives the call keeps the place alone: t holds on to its view_fn and its grad_fn.
    """

    __slots__ = ("index", "place", "t")

    def __init__(self, place: Place, t: torch.Tensor) -> None:
        self.place = place
        self.t = t
        self.index = place.index

    def __str__(self) -> str:
        return str(self.place)


_FIRST = Place(0, None)
