"""Ops by name, as people list them: ``"aten.mm.default"``, ``"aten.mm"``, ``"aten::mm"``."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from ._torch import HigherOrderOperator, OpOverload
from ._torch.library import op_names

# Of these every op is known. Others may be defined later, or not in this build of their library.
_OF_TORCH = ("aten", "prims", "prim")


def allowed_names(allow: Mapping[Any, str] | Iterable[Any] | None) -> frozenset[str]:
    """The names in what a user passed as ``allow=``: of ops, and of what else may change.

    Raises:
        TypeError: it is no mapping or list, or one of its items is neither a name nor an op.
        ValueError: a name in it looks like that of an op of torch's, and is none.
    """
    if allow is None:
        return frozenset()
    if isinstance(allow, str) or not isinstance(allow, Iterable):
        raise TypeError(f"`allow` takes a list of ops, or a mapping to reasons, got {allow!r}")
    names = set()
    for op in allow:
        if not isinstance(op, str) and not _is_op(op):
            raise TypeError(f"`allow` takes ops and their names, got {op!r}")
        name = str(op).replace("::", ".")
        if name.partition(".")[0] in _OF_TORCH:
            ops_named(name)
        names.add(name)
    return frozenset(names)


def _is_op(value: Any) -> bool:
    return isinstance(value, (OpOverload, HigherOrderOperator)) or hasattr(value, "overloads")


def ops_named(name: str) -> list[Any]:
    """The OpOverloads that a name stands for: one, or all of an op; none of an op to be defined.

    Args:
        name: namespace and op, with or without the overload, joined by ``.`` or ``::``.

    Raises:
        ValueError: torch has no such op, and will not.
    """
    namespace, _, rest = name.replace("::", ".").partition(".")
    op, _, overload = rest.partition(".")
    if not op:
        raise ValueError(f"`{name}` names no op; {_nearest(namespace, 'aten')}")
    packet = _get(_get(torch.ops, namespace), op)
    overloads = packet.overloads() if hasattr(packet, "overloads") else []
    wanted = [each for each in overloads if overload in ("", each)]
    if not wanted and namespace in _OF_TORCH:
        known = f"its overloads are {', '.join(overloads)}" if overloads else ""
        raise ValueError(f"`{name}` names no op; {known or _nearest(op, namespace)}")
    return [getattr(packet, each) for each in wanted]


def _get(owner: Any, name: str) -> Any:
    try:
        return getattr(owner, name, None)
    except RuntimeError:
        return None


def _nearest(op: str, namespace: str) -> str:
    names = (name.partition("::") for name in op_names())
    known = {name.partition(".")[0] for space, _, name in names if space == namespace}
    close = difflib.get_close_matches(op, known, n=1, cutoff=0.5)
    return f"did you mean '{namespace}.{close[0]}'?" if close else "write it as 'aten.mm.default'"
