"""The error family: one root, and one class per kind of trouble a caller may want to catch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


class ViewTrackError(RuntimeError):
    """Anything viewtrack refuses. A ``RuntimeError``, as torch's own refusals are.

    Attributes:
        argument: the argument of an op of ``viewtrack.library`` that its schema and its body
            disagree about, or None.
        output: the output, counted from 0, or None.
    """

    argument: str | None = None
    output: int | None = None


class AutogradMetadataError(ViewTrackError):
    """A tensor that is to be marked as a view already carries autograd metadata."""


class AliasingError(ViewTrackError):
    """What a schema or a caller says about shared memory, and what the memory says, differ."""


class MutatedTensorError(ViewTrackError):
    """A guarded tensor was written before it was used again.

    Its text contains ``has been mutated``, so code that matches the message of torch's own
    selective checkpointing goes on working.

    Attributes:
        saved: the record of what was saved, with ``op``, ``filename``, ``lineno``, ``function``.
        writes: the records of what wrote to it, first the one that reached the bytes, with ``op``,
            ``argument``, ``filename``, ``lineno``, ``function``, ``thread``, ``version_before``
            and ``version_after``.
    """

    def __init__(self, message: str, *, saved: Any = None, writes: Sequence[Any] = ()) -> None:
        super().__init__(message)
        self.saved = saved
        self.writes = tuple(writes)
