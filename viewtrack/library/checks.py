"""Whether a body did what its schema says. Looked at in every call, which costs little."""

from __future__ import annotations

from typing import Any

import torch

from .. import _torch
from .._torch import library as _torch_library
from .._torch.dynamo import skip_dynamo
from ..errors import AliasingError, ViewTrackError
from ..info import version
from .inspection import inspected
from .relations import is_wrapper
from .signature import check_signature
from .spec import Body, Leaf, Spec

_increment_version = torch.autograd.graph.increment_version

Inputs = list[tuple[str, torch.Tensor]]


def checked_body(spec: Spec, fn: Body, what: str = "body") -> Body:
    """`fn`, called with all arguments, whose outputs are laid out as the schema says.

    Args:
        spec: the op.
        fn: the user's function.
        what: what it is to the op, for errors.

    Raises:
        ViewTrackError: it does not take the arguments of the schema.
    """
    check_signature(spec.schema, f"`{spec.name}` ({spec.where})", fn, what)

    def body(*args: Any, **kwargs: Any) -> Any:
        args, kwargs = spec.completed(args, kwargs)
        written = [t for _, t in spec.writes(args, kwargs)]
        before = [version(t) for t in written]
        out = fn(*args, **kwargs)
        try:
            return _laid_out(spec, out, args, kwargs)
        except ViewTrackError:
            count(written, before)  # what is refused has been written all the same
            raise

    skip_dynamo(body)
    return body


def _laid_out(spec: Spec, out: Any, args: Any, kwargs: Any) -> Any:
    count = spec.plan.returns
    if count == 0:
        if out is not None:
            raise _bad_return(
                spec,
                f"returned {_kind(out)} and its schema `-> ()`",
                "leave out the `return`, or declare the output",
            )
        return None
    if count > 1 and not (isinstance(out, (tuple, list)) and len(out) == count):
        raise _bad_return(
            spec,
            f"returned {_kind(out)} where its schema has {count} outputs",
            f"return a tuple of {count}",
        )
    outputs = list(spec.outputs(out))
    for index, value in enumerate(outputs):
        if index in spec.written:
            _check_returned_argument(spec, index, value, args, kwargs)
        else:
            outputs[index] = _output(spec, index, value, args, kwargs)
    return spec.packed(outputs)


def _check_returned_argument(spec: Spec, index: int, value: Any, args: Any, kwargs: Any) -> None:
    argument = spec.written[index].arguments[0]
    given = argument.of(args, kwargs)
    if argument.is_list and isinstance(value, (list, tuple)) and given is not None:
        same = len(value) == len(given) and all(map(_is, value, given))
    else:
        same = value is given
    if not same:
        raise _bad_alias(
            spec,
            f"returned {_kind(value)} as output {index}, which its schema calls the "
            f"argument `{argument.name}` itself",
            f"end it with `return {argument.name}`",
            argument=argument.name,
            output=index,
        )


def _is(a: Any, b: Any) -> bool:
    return a is b


def _output(spec: Spec, index: int, value: Any, args: Any, kwargs: Any) -> Any:
    declared = spec.returned[index]
    if not declared.is_tensor or (value is None and declared.is_optional):
        return value
    if not isinstance(value, (list, tuple) if declared.is_list else torch.Tensor):
        kind = "a list of tensors" if declared.is_list else "a tensor"
        raise _bad_return(
            spec,
            f"returned {_kind(value)} as output {index}, which its schema calls {kind}",
            f"return {kind}",
            output=index,
        )
    if index not in spec.views:
        return list(value) if declared.is_list else value
    given = spec.tensors(args, kwargs)
    if declared.is_list:
        return [_torch_library.alias(t) if _is_any(t, given) else t for t in value]
    # An op such as `contiguous` returns its argument where there is nothing to do.
    return _torch_library.alias(value) if _is_any(value, given) else value  # type: ignore[arg-type]


def _is_any(t: Any, candidates: list[torch.Tensor]) -> bool:
    return any(t is c for c in candidates)


# ------------------------------------------------------------------------------ aliases


def check_aliases(spec: Spec, args: Any, kwargs: Any, out: Any) -> None:
    """Compare the memory of the outputs with what the schema says.

    Raises:
        AliasingError: they differ.
    """
    fresh: list[Leaf] = []
    for leaf in spec.leaves(out):
        if leaf.index in spec.views:
            _check_view(spec, leaf, args, kwargs)
        elif leaf.index not in spec.written:
            fresh.append(leaf)
    if fresh:
        inputs = [(a.name, t) for a in spec.plan.arguments for t in a.tensors(args, kwargs)]
        for leaf in fresh:
            _check_fresh(spec, leaf, inputs)
    for i, leaf in enumerate(fresh):
        for other in fresh[:i]:
            if share_storage(leaf.t, other.t):
                raise _bad_alias(
                    spec,
                    f"returned {other} and {leaf} in one storage of "
                    f"{leaf.t.untyped_storage().nbytes()} bytes, which its schema "
                    f"does not say",
                    f"return `.clone()` of {leaf}, or an op that returns the first alone "
                    f"and view it outside",
                    output=leaf.index,
                )


def explain_refusal(spec: Spec, error: Exception, args: Any, kwargs: Any) -> None:
    """Say which outputs alias what, where ``torch.library.custom_op`` refused an alias unnamed.

    Its body is run again for that, on clones.

    Raises:
        AliasingError: with the place of the alias.
    """
    body = _torch_library.custom_op_body(spec.name)
    if body is None or "may not alias" not in str(error):
        return
    args, kwargs = _torch.tree_map_only(torch.Tensor, torch.clone, (args, kwargs))
    out = body(*args, **kwargs)
    try:
        check_aliases(spec, args, kwargs, out)
    except AliasingError as located:
        raise located from error


def _check_view(spec: Spec, leaf: Leaf, args: Any, kwargs: Any) -> None:
    arguments = spec.views[leaf.index].arguments
    if any(_mayshare_storage(leaf.t, t) for a in arguments for t in a.tensors(args, kwargs)):
        return
    names = " or ".join(f"`{a.name}`" for a in arguments)
    raise _bad_alias(
        spec,
        f"returned a tensor of its own as {leaf}, which its schema calls a view of {names}",
        f"return a view of {names} for every shape (a copy such as `clone()`, `reshape` or "
        f"`contiguous()` of some strides is none), or drop the alias annotation",
        argument=arguments[0].name,
        output=leaf.index,
    )


def _check_fresh(spec: Spec, leaf: Leaf, inputs: Inputs) -> None:
    for name, t in inputs:
        if leaf.t is t or share_storage(leaf.t, t):
            raise _bad_alias(
                spec,
                f"returned {leaf} in the memory of its argument `{name}`, which its schema does "
                f"not say",
                f"declare it: `Tensor(a) {name} -> Tensor(a)`, or return `.clone()`",
                argument=name,
                output=leaf.index,
            )


def share_storage(t: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors surely share memory."""
    try:
        return _torch.is_alias_of(t, other) and t.untyped_storage().nbytes() > 0
    except (RuntimeError, NotImplementedError):  # no storage: sparse, functorch wrappers
        return False


def _mayshare_storage(t: torch.Tensor, base: torch.Tensor) -> bool:
    """Whether two tensors share memory, as far as can be told."""
    try:
        if is_wrapper(base):
            return True  # it lies in the wrapper's own storage that nobody reads
        return _torch.is_alias_of(t, base)
    except (RuntimeError, NotImplementedError):
        return True


# ------------------------------------------------------------------------------ writes


def check_overlap(spec: Spec, tensors: list[torch.Tensor], args: Any, kwargs: Any) -> None:
    """Refuse to let a raw kernel write a tensor whose elements lie in one place, as `expand` makes.

    Torch ops in a body refuse themselves, or know what they do (``fill_``).

    Raises:
        ViewTrackError: a written argument is such a tensor, and the kernel raw.
    """
    for argument, t in spec.writes(args, kwargs):
        if not overlaps_itself(t):
            continue
        is_seen = t.device.type not in spec.kernel_devices and not spec.opaque
        if is_seen and inspected(spec, tensors, args, kwargs).untraceable is None:
            return
        raise ViewTrackError(
            f"`{spec.name}` ({spec.where}): unsupported operation: more than one element of the "
            f"written-to tensor `{argument.name}` refers to a single memory location (strides "
            f"{t.stride()} of sizes {tuple(t.shape)}), and its kernel is raw. Please clone() the "
            f"tensor before performing the operation"
        )


def overlaps_itself(t: torch.Tensor) -> bool:
    """As far as native's ``has_internal_overlap`` is sure of it."""
    if t.layout is not torch.strided or 0 not in t.stride() or t.numel() == 0 or is_wrapper(t):
        return False
    return any(n > 1 and stride == 0 for n, stride in zip(t.size(), t.stride(), strict=True))


def count(written: list[torch.Tensor], before: list[int | None]) -> None:
    """Move each counter that has not moved."""
    for t, was in zip(written, before, strict=True):
        if was is not None and version(t) == was:
            _increment_version(t)


def check_undeclared_writes(
    spec: Spec, args: Any, kwargs: Any, before: list[int | None], tensors: list[torch.Tensor]
) -> None:
    """Raise if a counter moved that no declared write moves.

    Raises:
        AliasingError: the body wrote an argument that its schema does not call written.
    """
    if all(version(t) == was for t, was in zip(tensors, before, strict=True)):
        return
    written = [t for _, t in spec.writes(args, kwargs)]
    for a in spec.plan.arguments:
        if a.is_write:
            continue
        for t in a.tensors(args, kwargs):
            was = before[next(i for i, given in enumerate(tensors) if given is t)]
            if version(t) != was and not any(share_storage(t, w) for w in written):
                raise _bad_alias(
                    spec,
                    f"wrote its argument `{a.name}`, which its schema does not say",
                    f"declare `Tensor(a!) {a.name}`, or write a clone",
                    argument=a.name,
                )


def _bad_return(spec: Spec, what: str, mend: str, *, output: int | None = None) -> ViewTrackError:
    error = ViewTrackError(f"`{spec.name}` ({spec.where}) {what}; {mend}")
    error.output = output
    return error


def _bad_alias(
    spec: Spec, what: str, mend: str, *, argument: str | None = None, output: int | None = None
) -> AliasingError:
    error = AliasingError(f"`{spec.name}` ({spec.where}) {what}; {mend}")
    error.argument, error.output = argument, output
    return error


def _kind(value: Any) -> str:
    if isinstance(value, (tuple, list)):
        return f"{len(value)} value" + ("" if len(value) == 1 else "s")
    return "another tensor" if isinstance(value, torch.Tensor) else type(value).__name__
