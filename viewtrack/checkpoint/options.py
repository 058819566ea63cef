"""What a guard of a checkpointed region may be told, and what it does when it finds something."""

from __future__ import annotations

import logging
import sys
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from ..errors import MutatedTensorError
from ..mutation_text import Mutation, mutation_error
from ..op_names import allowed_names
from ..site import is_user_file
from ..watch import Watch, is_allowed

log = logging.getLogger(__name__)

Check = Literal["storage", "content", "off"]
OnMutation = Literal["raise", "warn"] | Callable[[MutatedTensorError], Any]

_SUBJECT = "a tensor cached by selective checkpointing"
_ALLOW = "add '{op}' to allow="


@dataclass(frozen=True, slots=True)
class Options:
    """How a region is guarded.

    Attributes:
        check: ``"storage"``, ``"content"`` or ``"off"``.
        allow: the names of ops whose writes are right, with or without their overload.
        on_mutation: ``"raise"``, ``"warn"``, or what to call with the error.
        check_inputs: whether the region's inputs are watched as well.
    """

    check: Check = "storage"
    allow: frozenset[str] = field(default_factory=frozenset)
    on_mutation: OnMutation = "raise"
    check_inputs: bool = False

    @property
    def content(self) -> bool:
        """Whether bytes decide, and not writes."""
        return self.check == "content"

    def mutation_of(
        self, watches: Iterable[Watch], t: torch.Tensor | None = None
    ) -> Mutation | None:
        """What reached a kept tensor through any of its parts, less what is allowed.

        Args:
            watches: the watches on it and its parts.
            t: the tensor, where a watch keeps a counter only.
        """
        for watch in watches:
            writes, more = watch.writes(t)
            writes = [write for write in writes if not is_allowed(write, self.allow)]
            if writes:
                return Mutation(watch, writes, more)
        return None

    def noted_on(self, watch: Watch) -> Mutation | None:
        """The writes that a mode saw reach a kept tensor, less what is allowed."""
        writes = [write for write in watch.noted() if not is_allowed(write, self.allow)]
        return Mutation(watch, writes) if writes else None

    def report(self, mutations: Sequence[Mutation], cause: BaseException | None = None) -> None:
        """Raise, warn or call, as was asked for."""
        self.react(mutation_error(_SUBJECT, mutations, _ALLOW), cause)

    def react(self, error: MutatedTensorError, cause: BaseException | None = None) -> None:
        """Raise, warn or call with an error that is made."""
        if self.on_mutation == "raise":
            raise error from cause
        if self.on_mutation == "warn":
            warnings.warn(str(error), stacklevel=_levels_to_user_code())
        else:
            self.on_mutation(error)


def _levels_to_user_code() -> int:
    """How far above its caller the first frame of user code is, as ``stacklevel`` counts."""
    frame, level = sys._getframe(1), 1
    while frame.f_back is not None and not is_user_file(frame.f_code.co_filename):
        frame, level = frame.f_back, level + 1
    return level


def make_options(
    check: Check,
    allow: Mapping[Any, str] | Iterable[Any] | None,
    on_mutation: OnMutation,
    check_inputs: bool,
) -> Options:
    """Check what a user passed.

    Raises:
        ValueError: `check` or `on_mutation` has none of its values, or `allow` names no op.
        TypeError: `allow` is no list or mapping of ops.
    """
    if check == "storage" and allow is None and on_mutation == "raise" and not check_inputs:
        return _DEFAULT  # made for every region
    if check not in ("storage", "content", "off"):
        raise ValueError(f"`check` must be 'storage', 'content' or 'off', got {check!r}")
    if on_mutation not in ("raise", "warn") and not callable(on_mutation):
        raise ValueError(
            f"`on_mutation` must be 'raise', 'warn' or a callable, got {on_mutation!r}"
        )
    return Options(check, allowed_names(allow), on_mutation, check_inputs)


_DEFAULT = Options()
