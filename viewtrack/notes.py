"""Notes on torch's own errors about in-place ops: which lines wrote, and which made the view.

Autograd raises them above every dispatch mode, and they name neither the tensor nor the lines. When
one leaves a tracker, the tensors at hand where it was raised are looked up in the ledger. The error
itself is not changed.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from types import FrameType, TracebackType

import torch

from ._torch import creation_meta
from .ledger import Write, key_of, ledger
from .site import Site, is_user_file, site_at, with_source

_FRAMES, _WRITES = 3, 5

REFUSED = {
    "IN_CUSTOM_FUNCTION": "it was made in a custom autograd.Function; clone it in forward",
    "MULTI_OUTPUT_NODE": "it is one of several views that one op returned; use an op that returns "
    "one view (`select`, `narrow`), or the out-of-place op",
    "NO_GRAD_MODE": "it was made under no_grad; make it, and write it, in the same grad mode",
    "INFERENCE_MODE": "it was made in inference_mode; make it outside",
}
"""Why native refuses to write a view, and what to do, by its creation_meta."""

# What the texts of native have for each; several of them mention no_grad mode.
_KINDS = (
    ("multiple views", "MULTI_OUTPUT_NODE"),
    ("custom Function", "IN_CUSTOM_FUNCTION"),
    ("no_grad mode", "NO_GRAD_MODE"),
    ("inference mode", "INFERENCE_MODE"),
)

_CONSTRUCTED = (
    "viewtrack: torch refuses this under any dispatch mode, and a tracker is one; "
    "`t.as_subclass(cls)` makes a tensor of a subclass all the same"
)


def add_notes(error: BaseException | None, traceback: TracebackType | None) -> None:
    """Tell what is known of the tensors at hand, if the error is about an in-place op.

    Python 3.10 has no notes; there nothing happens.
    """
    if not isinstance(error, RuntimeError) or not hasattr(error, "add_note"):
        return
    text = str(error)
    if "modified" in text and "inplace" in text.replace("-", ""):
        lines = _refused(text, traceback) if "is being modified" in text else _writes(traceback)
    elif "detach views in-place" in text:
        lines = _not_detached(traceback)
    elif text.startswith("Creating a new Tensor subclass"):
        lines = iter((_CONSTRUCTED,))
    else:
        return
    told = set(getattr(error, "__notes__", ()))  # by a tracker inside of this one
    for line in lines:
        if line not in told:
            error.add_note(line)


def made_at(t: torch.Tensor) -> list[tuple[str, Site]]:
    """The ops that returned lists of views of t's storage, with their lines, the last one first."""
    entry = ledger.entry(t)
    pieces = entry.pieces if entry is not None else ()
    return [(op, site_at(place)) for op, place in reversed(pieces)]


def _writes(traceback: TracebackType | None) -> Iterator[str]:
    found: dict[int, tuple[list[str], list[Write]]] = {}
    for name, t in _at_hand(traceback):
        writes = ledger.writes(t)
        if writes:
            found.setdefault(key_of(t), ([], writes[-_WRITES:]))[0].append(name)
    if found:
        yield "viewtrack: what wrote to the tensors at hand there:"
    for names, writes in found.values():
        for write in writes:
            yield (
                f"  {write.op}({write.argument}) at {write.site}, version "
                f"{write.version_before} -> {write.version_after}, to the memory of {_list(names)}"
            )


def _refused(text: str, traceback: TracebackType | None) -> Iterator[str]:
    """What is known of a view that native refused to write."""
    kind = next((kind for part, kind in _KINDS if part in text), None)
    if kind is None:
        return
    at_hand = list(_at_hand(traceback))
    views = _about(text, [(n, t) for n, t in at_hand if creation_meta(t).name == kind])
    names = f"of the views at hand there, {_list(n for n, _ in views)}" if views else "the view"
    yield f"viewtrack: {names} cannot be written:"
    if kind == "MULTI_OUTPUT_NODE":  # of a view without a name its base may be at hand
        has_history = text.startswith("Output")
        bases = [(n, t) for n, t in at_hand if t.requires_grad or not has_history]
        pieces = [made for _, t in views or bases for made in made_at(t)]
        yield from dict.fromkeys(f"  made      {op} at {with_source(site)}" for op, site in pieces)
    for frame, lineno in _frames(traceback)[-1:]:
        code = frame.f_code
        yield f"  written   at {with_source(Site(code.co_filename, lineno, code.co_name))}"
    yield f"  mend      {REFUSED[kind]}"


def _not_detached(traceback: TracebackType | None) -> Iterator[str]:
    views = [name for name, t in _at_hand(traceback) if t._is_view()]
    if views:
        yield (
            f"viewtrack: of the tensors at hand there, {_list(views)} are views; "
            f"`viewtrack.detach_(t)` detaches a view in place"
        )


def _about(text: str, views: list[tuple[str, torch.Tensor]]) -> list[tuple[str, torch.Tensor]]:
    """Those of the views that an error is about, by grad_fn and number of output; or all."""
    named = re.match(r"Output (\d+) of (\w+) is a view", text)
    if named is None:
        return views
    number, op = int(named[1]), named[2]
    return [(n, t) for n, t in views if t.output_nr == number and _made_by(t, op)] or views


def _made_by(t: torch.Tensor, op: str) -> bool:
    try:
        node = t.grad_fn
    except RuntimeError:  # its base was written since
        return False
    return node is not None and node.name().startswith(op)


def _list(names: Iterator[str] | list[str]) -> str:
    return ", ".join(f"`{name}`" for name in dict.fromkeys(names))


def _frames(traceback: TracebackType | None) -> list[tuple[FrameType, int]]:
    """The innermost frames of the user's program, outermost first, with the lines they were at."""
    frames = []
    while traceback is not None:
        if is_user_file(traceback.tb_frame.f_code.co_filename):
            frames.append((traceback.tb_frame, traceback.tb_lineno))
        traceback = traceback.tb_next
    return frames[-_FRAMES:]


def _at_hand(traceback: TracebackType | None) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors that the innermost frames of the user's program name."""
    for frame, _ in reversed(_frames(traceback)):
        for name, value in list(frame.f_locals.items()):
            if isinstance(value, torch.Tensor):
                yield name, value
