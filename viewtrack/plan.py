"""What one op does, read once from its schema: `Plan`.

The schema objects of torch tell which arguments and outputs carry alias annotations, but for lists
they leave the alias set empty, so those letters are read from the schema's text. Planning never
raises for an OpOverload: a handler that raises while C++ asks a subclass for metadata
(``prim::device``) aborts the process.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from . import _torch, collectives
from ._torch import kernels as _torch_kernels
from ._torch import library as _torch_library
from .undeclared import UNDECLARED_ALIASES

# Here the counters may be joined as well: nothing saves the argument of _unsafe_view, since its
# callers hand it a fresh tensor. `unsafe_split` and its like keep them apart on purpose.
SHARE_UNDECLARED = frozenset({"aten::_unsafe_view"})

_INPLACE_METADATA = frozenset(
    {
        "as_strided_",
        "detach_",
        "resize_",
        "resize_as_",
        "resize_as_sparse_",
        "set_",
        "squeeze_",
        "swapaxes_",
        "swapdims_",
        "t_",
        "transpose_",
        "unsqueeze_",
    }
)


@dataclass(frozen=True, slots=True)
class Argument:
    """A tensor argument, or list of tensors, of an op.

    Attributes:
        name: its name in the schema.
        index: its place in the schema, counted over all arguments.
        kwarg_only: whether it can only be passed by name.
        is_list: whether it is a list of tensors.
        is_optional: whether it, or an item of it, may be None.
        alias_set: the letters of its annotation, ``{"a"}`` for ``Tensor(a!)``.
        is_write: whether the op writes it.
    """

    name: str
    index: int
    kwarg_only: bool
    is_list: bool
    is_optional: bool
    alias_set: frozenset[str]
    is_write: bool

    def of(self, args: Any, kwargs: Any) -> Any:
        """The value passed for it, or None."""
        if not self.kwarg_only and self.index < len(args):
            return args[self.index]
        return kwargs.get(self.name) if kwargs else None

    def tensors(self, args: Any, kwargs: Any) -> list[Any]:
        """The tensors passed for it, without those left out."""
        return _tensors(self.of(args, kwargs))


NUMBERS = {bool, int, float, complex}
"""Types of what may be passed for a tensor: C++ makes one of it, which nobody else has."""


def _tensors(value: Any) -> list[Any]:
    if value is None:
        return []
    if isinstance(value, (list, tuple)):
        if any(isinstance(item, (list, tuple)) for item in value):  # Tensor[][], of collectives
            return [t for item in value for t in _tensors(item)]
        return [t for t in value if t is not None]
    return [] if type(value) in NUMBERS else [value]


@dataclass(frozen=True, slots=True)
class Output:
    """An output that lies in the memory of arguments.

    Attributes:
        index: its place among the op's outputs.
        is_list: whether it is a list of tensors.
        arguments: the arguments whose memory it is in (one, in every ATen op).
    """

    index: int
    is_list: bool
    arguments: tuple[Argument, ...]


@dataclass(frozen=True, slots=True)
class Plan:
    """What one op does to memory and to version counters.

    Attributes:
        name: as a user writes it, ``aten.add_.Tensor``.
        qualified: as the dispatcher knows it, ``aten::add_.Tensor``.
        arguments: the tensor arguments.
        returns: how many outputs the op has.
        views: outputs that view arguments.
        writes: arguments that the op writes.
        sole_write: the one argument that it writes, if that is one tensor passed by position.
        written: outputs that are written arguments themselves.
        changes_metadata: whether it changes sizes, strides or storage of what it writes.
        exchanges_storage: whether it gives what it writes another storage.
        has_native_kernel: whether ATen, or its author, gave it an ADInplaceOrView kernel.
        is_counted_first: whether that kernel moves counters before the op writes, not after.
        has_autograd_kernel: whether it has an Autograd kernel; autograd records what its kernel
            calls if it has none.
        is_composite: whether it is made of other ops, also for autograd.
        is_made_of_other_ops: whether its kernel calls other ops, below autograd.
        is_aten: whether it is one of torch's own ops.
        may_alias_undeclared: whether outputs may share memory that the schema does not mention.
        is_collective: whether it is an op of torch.distributed.
    """

    name: str
    qualified: str
    arguments: tuple[Argument, ...]
    returns: int
    views: tuple[Output, ...]
    writes: tuple[Argument, ...]
    sole_write: Argument | None
    written: tuple[Output, ...]
    changes_metadata: bool
    exchanges_storage: bool
    has_native_kernel: bool
    is_counted_first: bool
    has_autograd_kernel: bool
    is_composite: bool
    is_made_of_other_ops: bool
    is_aten: bool
    may_alias_undeclared: bool
    is_collective: bool

    @property
    def is_functional(self) -> bool:
        """Whether nothing but values comes out of the op and nothing goes in."""
        return not (self.views or self.writes or self.may_alias_undeclared)

    def tensors_written(self, args: Any, kwargs: Any) -> list[Any]:
        """The tensors that a call writes."""
        sole = self.sole_write
        # Nearly all writes; spare them the rest.
        if sole is not None and sole.index < len(args) and type(args[sole.index]) not in NUMBERS:
            return [args[sole.index]]
        return [t for a in self.writes for t in a.tensors(args, kwargs)]

    @property
    def updates_beside_results(self) -> bool:
        """Whether it is an op like batch norm, below whose Autograd kernel nothing counts.

        Below that of an op which does nothing but write (`_foreach_add_`) all does.
        """
        if not self.is_aten or not self.writes or self.name.endswith(".out"):
            return False
        return self.returns > len(self.written)

    @property
    def is_recorded_inside(self) -> bool:
        """Whether autograd records what the op's kernel calls, for want of an Autograd kernel."""
        return not (
            self.is_aten or self.is_composite or self.has_native_kernel or self.has_autograd_kernel
        )


_plans: dict[Any, Plan] = {}


def plan_of(op: _torch.OpOverload) -> Plan:
    """The plan of an OpOverload, made once."""
    # Keyed by the builtin in it: hashing an OpOverload runs Python.
    plan = _plans.get(op._op)
    if plan is None:
        plan = _plans[op._op] = plan_of_schema(op._schema)
    return plan


caches: list[dict[Any, Any]] = [_plans]
"""Whatever is kept for each op, by the builtin in it."""


def forget(op: _torch.OpOverload) -> None:
    """Plan an op anew when it comes next: it was given an ADInplaceOrView kernel."""
    for cache in caches:
        cache.pop(op._op, None)


def plan_of_schema(schema: Any) -> Plan:
    """The plan of a FunctionSchema, of an op that need not exist yet."""
    qualified = schema.name + (f".{schema.overload_name}" if schema.overload_name else "")
    letters, returned = _letters(str(schema))
    arguments = tuple(
        _argument(argument, index, letters, argument.name == collectives.WRITES.get(schema.name))
        for index, argument in enumerate(schema.arguments)
        if "Tensor" in str(argument.type)
    )
    outputs = [
        (index, result, returned[index] if index < len(returned) else frozenset())
        for index, result in enumerate(schema.returns)
        if result.alias_info is not None
    ]
    writes = tuple(a for a in arguments if a.is_write)
    namespace, _, base_name = schema.name.partition("::")
    return Plan(
        name=f"{namespace}.{base_name}.{schema.overload_name or 'default'}",
        qualified=qualified,
        arguments=arguments,
        returns=len(schema.returns),
        views=_related(outputs, arguments, is_write=False),
        writes=writes,
        sole_write=_sole(writes),
        written=_related(outputs, arguments, is_write=True),
        changes_metadata=base_name in _INPLACE_METADATA,
        exchanges_storage=schema.name == "aten::set_",
        has_native_kernel=_torch_kernels.has_native_kernel(qualified),
        is_counted_first=bool(writes) and _torch_library.custom_op_def(qualified) is not None,
        has_autograd_kernel=_torch_kernels.has_autograd_kernel(qualified),
        is_composite=_torch_kernels.has_composite_kernel(qualified),
        is_made_of_other_ops=_torch_kernels.is_made_of_other_ops(qualified),
        is_aten=namespace in ("aten", "prim", "prims"),
        may_alias_undeclared=qualified in UNDECLARED_ALIASES
        or namespace not in ("aten", "prim", "prims"),
        is_collective=namespace in collectives.NAMESPACES,
    )


def _sole(writes: tuple[Argument, ...]) -> Argument | None:
    one = writes[0] if len(writes) == 1 else None
    plain = one is not None and not (one.kwarg_only or one.is_list or one.is_optional)
    return one if plain else None


def _argument(
    argument: Any, index: int, letters: dict[str, frozenset[str]], is_written: bool
) -> Argument:
    kind = str(argument.type)
    info = argument.alias_info
    return Argument(
        name=argument.name,
        index=index,
        kwarg_only=argument.kwarg_only,
        is_list="List[" in kind,
        is_optional="Optional[" in kind,
        alias_set=letters.get(argument.name, frozenset()) if info is not None else frozenset(),
        is_write=is_written or (info is not None and info.is_write),
    )


def _related(
    outputs: list[tuple[int, Any, frozenset[str]]], arguments: tuple[Argument, ...], is_write: bool
) -> tuple[Output, ...]:
    return tuple(
        Output(
            index=index,
            is_list="List[" in str(result.type),
            arguments=tuple(a for a in arguments if a.alias_set & letters),
        )
        for index, result, letters in outputs
        if result.alias_info.is_write is is_write
    )


_ARGUMENT = re.compile(r"Tensor\??\(([^()]*)\)[\[\]?\d]* (\w+)")
_RESULT = re.compile(r"(\w+)(?:\(([^()]*)\))?[\[\]?\d]*")


def _letters(schema: str) -> tuple[dict[str, frozenset[str]], list[frozenset[str]]]:
    """Alias letters by argument name, and by output."""
    head, _, tail = schema.rpartition(" -> ")
    while head.count("(") != head.count(")"):  # the arrow of "Tensor(a -> *)", not of the results
        head, _, rest = head.rpartition(" -> ")
        tail = f"{rest} -> {tail}"
    arguments = {name: _letter_set(text) for text, name in _ARGUMENT.findall(head)}
    inner = tail[1:-1] if tail.startswith("(") else tail
    results = [_letter_set(match[2] or "") for match in map(_RESULT.match, _split(inner)) if match]
    return arguments, results


def _split(results: str) -> list[str]:
    return [part.strip() for part in re.split(r",(?![^()]*\))", results) if part.strip()]


def _letter_set(text: str) -> frozenset[str]:
    before = text.split("->")[0]
    return frozenset(before.replace("!", "").replace("|", " ").split())
