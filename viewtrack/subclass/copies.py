"""View ops whose handler copied: what is written to such a view never reaches its base."""

from __future__ import annotations

from typing import Any

import torch

from ..aliasing import shares_or_unknown
from ..errors import AliasingError
from ..plan import Output, Plan
from ..site import Site, caller
from .kinds import is_wrapper, kind_of, likely_parts_of, parts_of


def refuse_copies(plan: Plan, output: Output, bases: list[Any], t: Any) -> None:
    """Raise if a view op's output shares memory with none of the arguments that it is to view.

    Of wrappers the inner tensors are looked at, as far as they can be told.

    Raises:
        AliasingError: it does not.
    """
    if all(_is_copied(t, base) for base in bases):
        names = " or ".join(f"`{a.name}`" for a in output.arguments)
        raise AliasingError(
            f"{_handler_of(t)} returned for `{plan.name}` an output {output.index} that does not "
            f"share memory with its argument {names}, as the schema says it does; return a view of "
            f"the argument, not a copy"
        )


def _is_copied(t: Any, base: Any) -> bool:
    if not is_wrapper(t):
        return not shares_or_unknown(t, base)
    if type(t) is not type(base):
        return False
    if not kind_of(type(t)).flattens and not (likely_parts_of(t) and likely_parts_of(base)):
        return False  # what it keeps need not be what it stands for: a scale, a cache
    parts, base_parts = _tensors_in(t), _tensors_in(base)
    return bool(parts and base_parts) and not any(
        shares_or_unknown(part, base_part) for part in parts for base_part in base_parts
    )


def _tensors_in(t: Any) -> list[torch.Tensor]:
    if kind_of(type(t)).flattens:
        return [part for _, part in parts_of(t)]
    return [value for value in vars(t).values() if isinstance(value, torch.Tensor)]


def _handler_of(t: Any) -> str:
    """Who returned t: the handler's line, or the method that a TrackedTensor's handler called."""
    if not kind_of(type(t)).counts_itself:
        return f"the handler at {caller(5)}"
    run = type(t).run.__code__
    return f"`{run.co_qualname}` at {Site(run.co_filename, run.co_firstlineno, run.co_name)}"
