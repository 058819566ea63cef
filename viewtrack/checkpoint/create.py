"""`create_selective_checkpoint_contexts`: torch's function, with a cache that is guarded."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from typing import Any

from torch.utils import checkpoint as torch_checkpoint

from .._torch import HigherOrderOperator, OpOverload
from .._torch import guard as _torch_guard
from ..op_names import ops_named
from .cache import Cache
from .contexts import CachedMode, CachingMode, CheckedCachedMode, Policy
from .options import Check, OnMutation, make_options

Contexts = tuple[AbstractContextManager[Any], AbstractContextManager[Any]]

stock_contexts: Callable[..., Contexts] = torch_checkpoint.create_selective_checkpoint_contexts
"""Torch's own function, also where `install` has put ours in its place."""


def create_selective_checkpoint_contexts(
    policy_fn_or_list: Any,
    allow_cache_entry_mutation: bool = False,
    *,
    check: Check = "storage",
    allow: Mapping[Any, str] | Iterable[Any] | None = None,
    on_mutation: OnMutation = "raise",
    check_inputs: bool = False,
) -> Contexts:
    """Torch's function of this name, with a cache that no write reaches unseen.

    Use it as ``functools.partial(create_selective_checkpoint_contexts, policy)`` for the
    ``context_fn`` of `torch.utils.checkpoint.checkpoint`. Where torch compares one version counter,
    this finds every write to the bytes of a kept tensor, through whatever alias, and says which
    line did it. Results, gradients and memory are torch's. Under ``torch.compile`` it hands over to
    torch's own function.

    Args:
        policy_fn_or_list: a policy, called as torch calls it, which returns a CheckpointPolicy or a
            bool; or a list of OpOverloads to save, or of their names (``"aten.mm.default"``; all
            overloads for ``"aten.mm"``). Names of ops of other libraries need not be defined.
        allow_cache_entry_mutation: as ``check="off"``.
        check: ``"storage"`` finds the writes of every op that declares what it writes, through any
            alias. ``"content"`` compares bytes, and so finds numpy, raw pointers and undeclared
            writes too, and does not mind a write of equal bytes. ``"off"`` finds none.
        allow: ops whose writes are right, each with the reason: ``{"aten.relu_": "idempotent"}``.
        on_mutation: ``"raise"``, ``"warn"``, or what to call with the error; after the last two the
            recompute goes on with the changed tensor.
        check_inputs: also find what the forward changed of the tensors that it did not make, and of
            the attributes of modules: the recompute starts from what they are by then.

    Returns:
        Two context managers, for the forward and for the recompute.

    Raises:
        TypeError: `policy_fn_or_list` is neither callable nor a list.
        ValueError: an item of the list is no OpOverload, or names none, or an argument has none of
            its values.
    """
    policy_fn_or_list = _with_ops(policy_fn_or_list)
    if _torch_guard.is_compiling():
        return stock_contexts(policy_fn_or_list, allow_cache_entry_mutation)
    level: Check = "off" if allow_cache_entry_mutation else check
    cache = Cache(make_options(level, allow, on_mutation, check_inputs))
    policy = _policy(policy_fn_or_list)
    recompute = CachedMode if cache.inputs is None else CheckedCachedMode
    return CachingMode(cache, policy), recompute(cache, policy)


def _policy(policy_fn_or_list: Any) -> Policy:
    if isinstance(policy_fn_or_list, list):
        ops = policy_fn_or_list
        if not all(isinstance(op, (OpOverload, HigherOrderOperator)) for op in ops):
            stock_contexts(ops)  # raises what torch raises
        return ops
    if not callable(policy_fn_or_list):
        stock_contexts(policy_fn_or_list)
    policy: Policy = policy_fn_or_list
    return policy


def _with_ops(policy_fn_or_list: Any) -> Any:
    """A list with the ops that its names stand for, or a policy, where one is not defined yet."""
    if not isinstance(policy_fn_or_list, list):
        return policy_fn_or_list
    if not any(isinstance(op, str) for op in policy_fn_or_list):
        return policy_fn_or_list
    ops: list[Any] = []
    unknown: set[str] = set()
    for op in policy_fn_or_list:
        found = ops_named(op) if isinstance(op, str) else [op]
        ops += found
        if not found:
            unknown.add(op.replace("::", "."))
    _policy(ops)  # raises if one is no op
    if not unknown:
        return ops
    return lambda context, func, *args, **kwargs: func in ops or str(func) in unknown
