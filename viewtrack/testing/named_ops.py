"""Ops by the names that people write."""

from __future__ import annotations

import difflib
import fnmatch
from typing import Any

from .._torch import library as _torch_library
from ..errors import ViewTrackError
from ..library import CustomOp

_MOST_NAMED = 5


def overload_of(op: Any) -> Any:
    """The OpOverload that is meant.

    Raises:
        ViewTrackError: there is none, or there are several.
    """
    if isinstance(op, str):
        try:
            return _torch_library.lookup(op)
        except AttributeError:
            raise ViewTrackError(_unknown(op)) from None
    overload = _torch_library.overload_of(op.op if isinstance(op, CustomOp) else op)
    if overload is None:
        raise ViewTrackError(
            f"check_op: `{op}` does not name one op; pass an overload, as in "
            f"torch.ops.mylib.name.default"
        )
    return overload


def ops_named(pattern: str) -> list[Any]:
    """The OpOverloads that are meant.

    Args:
        pattern: ``"ns::name.overload"``, ``"ns::name"`` for all of its overloads, or a pattern of
            the shell for either.

    Raises:
        ViewTrackError: there are none.
    """
    names = _names()
    exact = [name for name in names if pattern in (name, name.partition(".")[0])]
    if not exact and not any(c in pattern for c in "*?["):
        return [overload_of(pattern)]
    found = exact or [
        name
        for name in names
        if fnmatch.fnmatchcase(name, pattern) or fnmatch.fnmatchcase(_short(name), pattern)
    ]
    if not found:
        raise ViewTrackError(_unknown(pattern))
    return [_torch_library.lookup(name) for name in sorted(found)]


def _names() -> list[str]:
    """The names of all ops, without those that stand for opaque ops in a compiler's graph."""
    return [name for name in _torch_library.op_names() if not name.endswith("__opaque")]


def _short(name: str) -> str:
    return name.partition(".")[0]


def _unknown(wanted: str) -> str:
    """Why there is no such op, as far as can be told."""
    names = _names()
    if "::" not in wanted:
        like = sorted({_short(n) for n in names if _short(n).partition("::")[2] == wanted})
        meant = f", such as {_listed(like)}" if like else ""
        return f"check_op: `{wanted}` is no name of an op; write `namespace::name`{meant}"
    overloads = sorted(name for name in names if _short(name) == _short(wanted))
    if overloads:
        return f"check_op: there is no op `{wanted}`; its overloads are {_listed(overloads)}"
    namespace = wanted.partition("::")[0]
    inside = sorted({_short(name) for name in names if name.startswith(f"{namespace}::")})
    near = difflib.get_close_matches(_short(wanted), inside, n=_MOST_NAMED)
    if inside:
        return (
            f"check_op: there is no op `{wanted}`; in `{namespace}` there is "
            f"{_listed(near or inside)}"
        )
    return (
        f"check_op: there is no op `{wanted}`, nor any other in `{namespace}`; define it first, "
        f"and import the module or load the library that does"
    )


def _listed(names: list[str]) -> str:
    more = len(names) - _MOST_NAMED
    text = ", ".join(f"`{name}`" for name in names[:_MOST_NAMED])
    return f"{text} and {more} more" if more > 0 else text
