"""Putting the guarded contexts in the place of torch's, for a whole program."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch.utils import checkpoint as torch_checkpoint

from .create import Contexts, create_selective_checkpoint_contexts, stock_contexts
from .options import Check, OnMutation, make_options

_NAME = "create_selective_checkpoint_contexts"


def install(
    *,
    check: Check = "storage",
    allow: Mapping[Any, str] | Iterable[Any] | None = None,
    on_mutation: OnMutation = "raise",
    check_inputs: bool = False,
) -> None:
    """Let ``torch.utils.checkpoint.create_selective_checkpoint_contexts`` make guarded contexts.

    Call it before frameworks are imported, for they bind torch's name when they are;
    ``python -m viewtrack run --guard-checkpoint`` does. Pairs that a framework makes by hand are
    not reached: wrap those in `guard`. Called again, it replaces the arguments.

    Args:
        check: as for `create_selective_checkpoint_contexts`.
        allow: as there.
        on_mutation: as there.
        check_inputs: as there.

    Raises:
        ValueError: an argument has none of its values.
    """
    make_options(check, allow, on_mutation, check_inputs)

    def guarded(policy_fn_or_list: Any, allow_cache_entry_mutation: bool = False) -> Contexts:
        return create_selective_checkpoint_contexts(
            policy_fn_or_list,
            allow_cache_entry_mutation,
            check=check,
            allow=allow,
            on_mutation=on_mutation,
            check_inputs=check_inputs,
        )

    guarded.__name__ = guarded.__qualname__ = _NAME
    guarded.__doc__ = stock_contexts.__doc__
    setattr(torch_checkpoint, _NAME, guarded)


def uninstall() -> None:
    """Put torch's own function back. What bound ours in the meantime keeps it."""
    setattr(torch_checkpoint, _NAME, stock_contexts)
