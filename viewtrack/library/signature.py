"""Whether a function can be called as the schema says, asked when it is registered."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from ..errors import ViewTrackError

_BY_POSITION = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


def check_signature(
    schema: Any, where: str, fn: Callable[..., Any], what: str, before: int = 0
) -> None:
    """Refuse a function that a call of the op would not fit.

    It is called with all arguments: the positional ones by position, so that they may have other
    names than in the schema, and the keyword-only ones by name.

    Args:
        schema: the FunctionSchema.
        where: the op's name and where it is, for the error.
        fn: the function.
        what: what it is to the op, for the error.
        before: how many arguments it gets before those of the op.

    Raises:
        ViewTrackError: it takes others, or takes them in another order.
    """
    try:
        signature = inspect.signature(fn)
    except (TypeError, ValueError):  # a builtin need not tell
        return
    given = [a.name for a in schema.arguments if not a.kwarg_only]
    named = {a.name: None for a in schema.arguments if a.kwarg_only}
    try:
        signature.bind(*[None] * (before + len(given)), **named)
    except TypeError as error:
        raise _misfit(schema, where, what, signature, str(error)) from None
    taken = [p.name for p in signature.parameters.values() if p.kind in _BY_POSITION][before:]
    for place, name in enumerate(taken[: len(given)]):
        if name in given and given[place] != name:
            raise _misfit(
                schema, where, what, signature, f"`{name}` comes where `{given[place]}` is passed"
            )


def _misfit(
    schema: Any, where: str, what: str, signature: inspect.Signature, why: str
) -> ViewTrackError:
    named = [a.name for a in schema.arguments if a.kwarg_only]
    wanted = [a.name for a in schema.arguments if not a.kwarg_only]
    wanted += ["*", *named] if named else []
    return ViewTrackError(
        f"{where}: its {what} takes {signature}, and cannot be called as its "
        f"schema says: {why}; let it take ({', '.join(wanted)})"
    )
