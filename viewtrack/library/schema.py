"""What a schema may say: which alias annotations make sense, and for which kind of op."""

from __future__ import annotations

import re
from typing import Any

from .._torch import library as _torch_library
from ..errors import ViewTrackError
from ..plan import Plan, plan_of_schema

VIEW, INPLACE, OUT, ANY = "view_op", "inplace_op", "out_op", "op"


def checked_plan(schema: str, kind: str) -> Plan:
    """The plan of an op that is to be defined.

    Args:
        schema: ``"ns::name(Tensor(a) x) -> Tensor(a)"``.
        kind: the function that the caller used, one of the constants above.

    Raises:
        ViewTrackError: the schema cannot be read, or its annotations make no sense for the kind.
    """
    where = f"viewtrack.library.{kind}"
    name = schema.split("(")[0].strip()
    if "::" not in name:
        raise ViewTrackError(
            f"{where}: the schema `{schema}` names no namespace; write `mylib::{name or 'op'}(...)`"
        )
    if name.partition("::")[0] in ("aten", "prim", "prims"):
        raise ViewTrackError(
            f"{where}: `{name}` is in a namespace of torch; use one of your own, as in "
            f"`mylib::{name.partition('::')[2]}`"
        )
    try:
        parsed = _torch_library.parse_schema(schema)
    except RuntimeError as error:
        raise ViewTrackError(f"{where}: cannot read the schema `{schema}`: {error}") from None
    return check_annotations(parsed, kind)


def check_annotations(parsed: Any, kind: str) -> Plan:
    """The plan of a FunctionSchema whose annotations make sense for the kind of op.

    Raises:
        ViewTrackError: they make none.
    """
    plan = plan_of_schema(parsed)
    where = f"viewtrack.library.{kind}: `{plan.qualified}`"
    _check_letters(parsed, plan, where)
    _check_outputs(plan, where)
    _check_kind(plan, kind, where)
    if not plan.views:
        _check_readable(parsed, plan, where)
    return plan


def _check_letters(parsed: Any, plan: Plan, where: str) -> None:
    if any("*" in letters for letters in _all_letters(parsed)):
        raise ViewTrackError(
            f"{where} has a wildcard alias set (*); name the argument that each output views, "
            f"as in `Tensor(a) x -> Tensor(a)`"
        )
    seen: dict[str, str] = {}
    for argument in plan.arguments:
        for letter in argument.alias_set:
            if letter in seen:
                raise ViewTrackError(
                    f"{where}: the arguments `{seen[letter]}` and `{argument.name}` are both in "
                    f"the alias set ({letter}); give each argument a letter of its own"
                )
            seen[letter] = argument.name
    names = [argument.name for argument in parsed.arguments]
    for name in names:
        if names.count(name) > 1:
            raise ViewTrackError(f"{where} has two arguments `{name}`; rename one")
    for argument in parsed.arguments:
        if argument.alias_info is not None and "Tensor" not in str(argument.type):
            raise ViewTrackError(
                f"{where}: `{argument.name}` is no tensor and cannot have an alias set"
            )


def _all_letters(parsed: Any) -> list[set[str]]:
    infos = [a.alias_info for a in (*parsed.arguments, *parsed.returns)]
    # `Tensor(a -> *)` is how ATen writes an argument that is viewed by a list of outputs.
    return [set(i.before_set) for i in infos if i is not None]


def _check_outputs(plan: Plan, where: str) -> None:
    for output in (*plan.views, *plan.written):
        if not output.arguments:
            raise ViewTrackError(
                f"{where}: output {output.index} is in an alias set that no argument is in; "
                f"annotate the argument whose memory it is, as in `Tensor(a) x -> Tensor(a)`"
            )
    for output in plan.written:
        for argument in output.arguments:
            if argument.is_list != output.is_list:
                kinds = ("a list", "one tensor") if output.is_list else ("one tensor", "a list")
                raise ViewTrackError(
                    f"{where}: output {output.index} is {kinds[0]}, and the argument "
                    f"`{argument.name}` that it is marked as is {kinds[1]}; give both the same "
                    f"type, or return nothing (`-> ()`)"
                )
            if not argument.is_write:
                raise ViewTrackError(
                    f"{where}: output {output.index} is marked as written (!) and its argument "
                    f"`{argument.name}` is not; write `Tensor(a!) {argument.name}`, or drop the "
                    f"`!` of the output"
                )
    used = {a.name for output in (*plan.views, *plan.written) for a in output.arguments}
    for argument in plan.arguments:
        if argument.alias_set and not argument.is_write and argument.name not in used:
            raise ViewTrackError(
                f"{where}: no output is in the alias set of `{argument.name}`; annotate the output "
                f"that views it, or write `Tensor {argument.name}`"
            )


def _check_kind(plan: Plan, kind: str, where: str) -> None:
    if kind == VIEW and (plan.writes or not plan.views):
        wrong = "writes an argument" if plan.writes else "returns no view"
        mend = "op" if plan.writes and plan.views else "inplace_op" if plan.writes else "op"
        raise ViewTrackError(
            f"{where} {wrong}; a view op is `Tensor(a) x -> Tensor(a)`. Annotate it so, or use "
            f"viewtrack.library.{mend}"
        )
    if kind in (INPLACE, OUT) and (plan.views or not plan.writes):
        wrong = "returns a view" if plan.views else "writes no argument"
        example = "Tensor(a!) x" if kind == INPLACE else "*, Tensor(a!) out"
        raise ViewTrackError(
            f"{where} {wrong}; an op of this kind is `{example} -> Tensor(a!)`. Annotate it so, or "
            f"use viewtrack.library.{'view_op' if plan.views and not plan.writes else 'op'}"
        )


# ------------------------------------------------------------------------------ the companion


def companion_schema(parsed: Any, plan: Plan) -> str:
    """The schema of the op that compilers are given for an opaque body (`traced.py`).

    It has the same arguments, and of the outputs those that are no arguments.
    """
    # torch prints `Tensor(a!)?[]` in a way that it does not read.
    readable = re.sub(r"Tensor\?(\([^()]*\))", r"Tensor\1?", str(parsed))
    head, _, _ = readable.rpartition(" -> ")
    namespace, _, rest = head.partition("::")
    name, _, arguments = rest.partition("(")
    written = {output.index for output in plan.written}
    fresh = [r for i, r in enumerate(parsed.returns) if i not in written]
    returns = ", ".join(_declared(r.real_type) for r in fresh)
    return f"{namespace}::{name.replace('.', '_')}__opaque({arguments} -> ({returns})"


def _declared(kind: Any) -> str:
    """A type as a schema has it: torch prints `int[]` as `List[int]`."""
    if kind.kind() == "ListType":
        return f"{_declared(kind.getElementType())}[]"
    if kind.kind() == "OptionalType":
        return f"{_declared(kind.getElementType())}?"
    if kind.kind() == "DictType":
        return f"Dict({_declared(kind.getKeyType())}, {_declared(kind.getValueType())})"
    return {"number": "Scalar"}.get(str(kind), str(kind))


def _check_readable(parsed: Any, plan: Plan, where: str) -> None:
    schema = companion_schema(parsed, plan)
    try:
        _torch_library.parse_schema(schema)
    except RuntimeError:
        raise ViewTrackError(
            f"{where} has a type that torch cannot read again as it prints it, in `{schema}`; pass "
            f"and return tensors, numbers, strings, and lists of them"
        ) from None
