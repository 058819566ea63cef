"""A note on torch's own errors about in-place ops: which lines wrote.

Autograd raises them above every dispatch mode, and they name neither the tensor nor the line that
wrote to it. When one leaves a tracker, the tensors at hand where it was raised are looked up in the
ledger. The error itself is not changed.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import TracebackType

import torch

from .ledger import Write, key_of, ledger
from .site import is_user_file

_FRAMES, _WRITES = 3, 5


def note_writes(error: BaseException | None, traceback: TracebackType | None) -> None:
    """Add the writes to the tensors at hand to an error about a tensor that was modified in place.

    Python 3.10 has no notes; there nothing happens.
    """
    if not isinstance(error, RuntimeError) or not hasattr(error, "add_note"):
        return
    if "modified" not in str(error) or "inplace" not in str(error).replace("-", ""):
        return
    found: dict[int, tuple[list[str], list[Write]]] = {}
    for name, t in _at_hand(traceback):
        writes = ledger.writes(t)
        if writes:
            found.setdefault(key_of(t), ([], writes[-_WRITES:]))[0].append(name)
    if found:
        error.add_note("viewtrack: what wrote to the tensors at hand there:")
    for names, writes in found.values():
        for write in writes:
            error.add_note(
                f"  {write.op}({write.argument}) at {write.site}, version "
                f"{write.version_before} -> {write.version_after}, to the memory of "
                f"{', '.join(f'`{name}`' for name in dict.fromkeys(names))}"
            )


def _at_hand(traceback: TracebackType | None) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors that the innermost frames of the user's program name."""
    frames = []
    while traceback is not None:
        if is_user_file(traceback.tb_frame.f_code.co_filename):
            frames.append(traceback.tb_frame)
        traceback = traceback.tb_next
    for frame in reversed(frames[-_FRAMES:]):
        for name, value in list(frame.f_locals.items()):
            if isinstance(value, torch.Tensor):
                yield name, value
