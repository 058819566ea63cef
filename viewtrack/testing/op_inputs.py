"""Inputs for an op, made up from its schema: shapes and strides of several kinds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ..errors import ViewTrackError
from ..plan import plan_of

Make = Callable[[], torch.Tensor]


def _numbers(*shape: int) -> torch.Tensor:
    return torch.arange(1.0, 1.0 + torch.Size(shape).numel()).view(shape)


# Some ops alias for some strides only. No tensor whose elements overlap: a raw kernel that takes it
# for contiguous would write beyond its memory.
SHAPES: dict[str, Make] = {
    "matrix": lambda: _numbers(3, 4),
    "transposed": lambda: _numbers(4, 3).t(),
    "every other column": lambda: _numbers(3, 8)[:, ::2],
    "square": lambda: _numbers(3, 3),
    "vector": lambda: _numbers(4),
    "strided vector": lambda: _numbers(8)[::2],
    "three-dimensional": lambda: _numbers(2, 3, 4),
    "one element": lambda: _numbers(1),
}

_VALUES: dict[str, Any] = {
    "int": 1,
    "float": 0.5,
    "number": 2,
    "bool": False,
    "str": "",
    "Device": torch.device("cpu"),
    "ScalarType": torch.float32,
    "Layout": torch.strided,
    "MemoryFormat": torch.contiguous_format,
    "List[int]": [1],
    "List[float]": [0.5],
    "List[bool]": [False],
}


def inputs_for(op: Any) -> list[tuple[tuple[Any, ...], dict[str, Any]]]:
    """Calls of an op that it takes: those of the made-up ones that do not raise.

    Args:
        op: an OpOverload.

    Raises:
        ViewTrackError: it takes none of them.
    """
    accepted = []
    reasons: dict[str, str] = {}
    for name, make in SHAPES.items():
        try:
            with torch.no_grad():
                op(*_args(op, make), **_kwargs(op, make))
        except ViewTrackError:
            pass  # the call is a finding
        except Exception as error:
            reasons[name] = f"{type(error).__name__}: {str(error).splitlines()[0]}"
            continue
        accepted.append((_args(op, make), _kwargs(op, make)))
    if not accepted:
        tried = "; ".join(f"{name}: {reason}" for name, reason in list(reasons.items())[:2])
        raise ViewTrackError(
            f"`{plan_of(op).qualified}` takes none of the inputs that were made up from its schema "
            f"({tried}); give it inputs of your own"
        )
    return accepted


def _args(op: Any, make: Make) -> tuple[Any, ...]:
    return tuple(_value(a, make) for a in op._schema.arguments if not a.kwarg_only)


def _kwargs(op: Any, make: Make) -> dict[str, Any]:
    return {a.name: _value(a, make) for a in op._schema.arguments if a.kwarg_only}


def _value(argument: Any, make: Make) -> Any:
    if argument.has_default_value():
        return argument.default_value
    kind = str(argument.type)
    if "Tensor" in kind:
        return [make(), make()] if "List[" in kind else make()
    if kind.startswith("Optional["):
        return None
    return _VALUES.get(str(argument.real_type), 1)
