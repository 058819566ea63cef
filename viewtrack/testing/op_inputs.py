"""Inputs for an op, made up from its schema: shapes, strides and dtypes of several kinds."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from ..errors import ViewTrackError
from ..plan import plan_of
from .checked_call import is_misfit
from .copies import Copies

Make = Callable[[], torch.Tensor]


def _numbers(*shape: int) -> torch.Tensor:
    return torch.arange(1.0, 1.0 + torch.Size(shape).numel()).view(shape)


# Some ops alias for some strides only, or for some sizes, or dtypes.
SHAPES: dict[str, Make] = {
    "matrix": lambda: _numbers(3, 4),
    "transposed": lambda: _numbers(4, 3).t(),
    "every other column": lambda: _numbers(3, 8)[:, ::2],
    "square": lambda: _numbers(3, 3),
    "vector": lambda: _numbers(4),
    "strided vector": lambda: _numbers(8)[::2],
    "part of a vector": lambda: _numbers(12)[4:8],
    "three-dimensional": lambda: _numbers(2, 3, 4),
    "one element": lambda: _numbers(1),
    "scalar": lambda: _numbers(1)[0],
    "empty": lambda: _numbers(0, 3),
    "expanded": lambda: _numbers(1, 3).expand(2, 3),
    "integers": lambda: torch.arange(4).view(2, 2),
    "complex": lambda: torch.complex(_numbers(2, 2), _numbers(2, 2)),
}

_VALUES: dict[str, Any] = {
    "float": 0.5,
    "number": 2,
    "bool": False,
    "str": "",
    "Device": torch.device("cpu"),
    "ScalarType": torch.float32,
    "Layout": torch.strided,
    "MemoryFormat": torch.contiguous_format,
    "List[float]": [0.5],
    "List[bool]": [False],
}


@dataclass(frozen=True)
class _Choice:
    """What arguments without a tensor are, and optional tensors.

    Attributes:
        number: an int.
        sizes: a list of ints, for a tensor.
        gives_all: whether optional tensors are given.
    """

    number: int
    sizes: Callable[[torch.Tensor], list[int]]
    gives_all: bool = False

    def args(self, op: Any, make: Make) -> tuple[Any, ...]:
        """The positional arguments."""
        return tuple(self._value(a, make) for a in op._schema.arguments if not a.kwarg_only)

    def kwargs(self, op: Any, make: Make) -> dict[str, Any]:
        """The keyword arguments."""
        return {a.name: self._value(a, make) for a in op._schema.arguments if a.kwarg_only}

    def _value(self, argument: Any, make: Make) -> Any:
        kind = str(argument.type)
        if "Tensor" in kind and (self.gives_all or not argument.has_default_value()):
            return [make(), make()] if "List[" in kind else make()
        if argument.has_default_value():
            return argument.default_value
        if kind.startswith("Optional["):
            return None
        if kind == "List[int]":
            return self.sizes(make())
        return _VALUES.get(str(argument.real_type), self.number)


def _choices(gives_all: bool) -> Iterator[_Choice]:
    yield _Choice(1, lambda t: [1], gives_all)
    yield _Choice(0, lambda t: list(t.shape), gives_all)
    yield _Choice(2, lambda t: [-1], gives_all)


def inputs_for(op: Any) -> dict[str, tuple[tuple[Any, ...], dict[str, Any]]]:
    """Calls of an op that it takes: those of the made-up ones that do not raise.

    Args:
        op: an OpOverload.

    Returns:
        Arguments and keyword arguments, by what the tensors are like.

    Raises:
        ViewTrackError: it takes none of them.
    """
    accepted: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = {}
    reasons: dict[str, str] = {}
    has_options = any(
        "Tensor" in str(a.type) and a.has_default_value() for a in op._schema.arguments
    )
    for name, make in SHAPES.items():
        for gives_all in (False, True) if has_options else (False,):
            label = f"{name}, with optional tensors" if gives_all else name
            for choice in _choices(gives_all):
                given = (choice.args(op, make), choice.kwargs(op, make))
                reason = _refusal(op, given)
                if reason is None:
                    accepted[label] = given
                    break
                reasons.setdefault(label, reason)
    if not accepted:
        tried = "; ".join(f"{name}: {reason}" for name, reason in list(reasons.items())[:2])
        raise ViewTrackError(
            f"`{plan_of(op).qualified}` takes none of the inputs that were made up from its schema "
            f"({tried}); give it inputs of your own"
        )
    return accepted


def _refusal(op: Any, given: Any) -> str | None:
    """Why an op does not take these arguments; None if it does, or would if it were right."""
    args, kwargs = Copies(given).arguments
    try:
        with torch.no_grad():
            op(*args, **kwargs)
    except Exception as error:
        refuses_overlap = "unsupported operation: more than one element" in str(error)
        if isinstance(error, ViewTrackError) and not refuses_overlap:
            return None
        if is_misfit(error) or "may not alias" in str(error):
            return None
        return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
    return None
