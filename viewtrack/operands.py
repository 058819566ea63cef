"""What an op was given and what it gave back: who is whom, and who may share whose counter."""

from __future__ import annotations

from typing import Any

import torch

from . import _torch
from .ledger import key_of
from .plan import Argument, Plan

_detach = _torch.TensorBase.detach
_mode_stack_len = _torch.mode_stack_len


def join_views(plan: Plan, args: Any, kwargs: Any, out: Any) -> None:
    """Give outputs that the schema calls views the counters of their bases."""
    outs = out if plan.returns > 1 else (out,)
    for output in plan.views:
        bases = [t for a in output.arguments for t in a.tensors(args, kwargs)]
        for t in outs[output.index] if output.is_list else (outs[output.index],):
            for base in bases:
                if joinable(t, base) and not is_any(t, bases):
                    _torch.as_view_version_only(t, base)


def undeclared(plan: Plan, args: Any, kwargs: Any, out: Any) -> list[tuple[Any, Any]]:
    """Outputs that lie in the memory of an input, with that input."""
    inputs = [t for a in plan.arguments for t in a.tensors(args, kwargs)]
    found = []
    for t in tensors(out):
        base = None if is_any(t, inputs) else base_among(t, inputs)
        if base is not None:
            found.append((t, base))
    return found


def stripped(out: Any, args: Any) -> Any:
    """The outputs without view metadata, sharing the counters they share. Run it under the guard.

    An output that is an argument keeps what it has.
    """
    if isinstance(out, torch.Tensor):
        return without_metadata(out) if out._is_view() and not is_any(out, args) else out
    if isinstance(out, (list, tuple)):
        return type(out)(stripped(t, args) for t in out)
    return out


def without_metadata(t: torch.Tensor) -> torch.Tensor:
    """An alias of a view without metadata, or where modes below would see that op, t itself.

    In a backward, where torch functions are on, a ``__torch_function__`` would make it a view anew.
    """
    if not _mode_stack_len():
        if type(t) is torch.Tensor:
            return _detach(t)
        with _torch.no_torch_function():
            return _detach(t)
    base = t._base
    if base is not None:
        _torch.as_view_version_only(t, base)
    return t


def tensors(out: Any) -> list[torch.Tensor]:
    """The tensors among an op's outputs."""
    if isinstance(out, torch.Tensor):
        return [out]
    if isinstance(out, (list, tuple)):
        return [t for part in out for t in tensors(part)]
    return []


def is_any(t: Any, candidates: Any) -> bool:
    """Whether t is one of the candidates, or in a list among them."""
    return any(t is c or (isinstance(c, (list, tuple)) and is_any(t, c)) for c in candidates)


def base_among(t: torch.Tensor, inputs: list[Any]) -> Any:
    """The first input in whose memory t lies, or None."""
    key = key_of(t)
    return next((base for base in inputs if key_of(base) == key), None)


def joinable(t: torch.Tensor, base: torch.Tensor) -> bool:
    """Whether t may be given base's counter: it aliases it and has no metadata to lose.

    Of a wrapper's storage nothing can be told, so there the schema is believed.
    """
    if not isinstance(t, torch.Tensor) or t.is_inference() or base.is_inference():
        return False
    if t.requires_grad or t._is_view():
        return False
    return key_of(t) == key_of(base) or (is_wrapper(t) and is_wrapper(base))


def is_wrapper(t: torch.Tensor) -> bool:
    """Whether t is of a class with a ``__torch_dispatch__`` of its own."""
    return type(t).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__


def is_uncounted_of_wrappers(plan: Plan, argument: Argument) -> bool:
    """Whether a write of the op to a wrapper, passed for `argument`, moves the inner counter only.

    Of an op without an ADInplaceOrView kernel, only the inner ops move counters. Those of a fused
    optimizer step move none, of a plain tensor either.
    """
    if plan.qualified.startswith("aten::_fused_"):
        return False
    return argument.is_list or not plan.is_aten


def only_plain(types: Any) -> bool:
    """Whether no subclass takes part: 2.6 names torch.Tensor where C++ asks for a detach."""
    return all(cls is torch.Tensor for cls in types)


def first_tensor(args: Any) -> int | None:
    """The identity of the first tensor among the arguments, or in a list of them."""
    for value in args:
        if isinstance(value, torch.Tensor):
            return id(value)
        if isinstance(value, (list, tuple)) and value and isinstance(value[0], torch.Tensor):
            return id(value[0])
    return None


def is_complex(args: Any) -> bool:
    """Whether the first argument is a complex tensor."""
    return bool(args) and isinstance(args[0], torch.Tensor) and args[0].is_complex()


def any_sparse(args: Any) -> bool:
    """Whether there is a sparse tensor among the arguments, or in a list of them."""
    return any(isinstance(t, torch.Tensor) and is_sparse(t) for t in _torch.tree_leaves(args))


def is_sparse(t: torch.Tensor) -> bool:
    """Whether t is of a sparse layout, COO or compressed."""
    return t.layout in _SPARSE


_SPARSE = {
    torch.sparse_coo,
    torch.sparse_csr,
    torch.sparse_csc,
    torch.sparse_bsr,
    torch.sparse_bsc,
}


def written(plan: Plan, args: Any, kwargs: Any) -> list[tuple[Argument, Any]]:
    """The tensors that the op writes, with the arguments that they were passed for."""
    return [(a, t) for a in plan.writes for t in a.tensors(args, kwargs)]


def with_tensors_for_numbers(plan: Plan, args: Any, error: RuntimeError) -> Any:
    """An op's arguments with tensors where it was given numbers for them, if it failed for that.

    A tensor that TorchScript made of a number, a size say, comes to a handler as a number again,
    which few ops take in its place.

    Args:
        plan: the plan of the op.
        args: the positional arguments that it was called with.
        error: what it raised.

    Returns:
        The positional arguments to call it with, or None if it failed for something else.
    """
    numbers = {a.index for a in plan.arguments if isinstance(a.of(args, {}), (int, float, complex))}
    if not numbers or "Unable to cast" not in str(error):
        return None
    return tuple(torch.tensor(arg) if i in numbers else arg for i, arg in enumerate(args))
