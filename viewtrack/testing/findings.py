"""`Finding`: what `check_op` has to say."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from ..site import Site

KINDS = {
    "undeclared alias": "an output lies in the memory of an argument, undeclared",
    "undeclared write": "an argument is written, or gets other sizes or memory, undeclared",
    "stray write": "memory is written that no argument covers",
    "no view": "an output that is declared a view is none",
    "unmarked view": "a declared view does not share the version counter of its base",
    "outputs alias": "two outputs lie in the same memory, undeclared",
    "kept memory": "an output lies in memory that an earlier call returned or was given",
    "missing bump": "a declared write moves no version counter",
    "missing return": "a written argument is not returned where the schema says so",
    "wrong output": "the outputs are not those of the schema, in number or in kind",
    "error": "the call raises",
    "unwritten": "a note: an argument that is declared written was written for no input",
    "resized": "a note: a written argument got other sizes, or other memory",
    "no output": "a note: one of several outputs is None",
    "no memory": "a note: an argument has no memory that could be looked at",
}
"""Every kind of finding, and what it means."""

_NOTES = frozenset(("unwritten", "resized", "no output", "no memory"))


@dataclass(frozen=True, slots=True)
class Finding:
    """Something that an op does and its schema does not say, or the other way round.

    Attributes:
        op: the op, ``"mylib::name"``.
        kind: ``"undeclared alias"``, ``"undeclared write"``, ``"stray write"``, ``"no view"``,
            ``"unmarked view"``, ``"outputs alias"``, ``"kept memory"``, ``"missing bump"``,
            ``"missing return"``, ``"wrong output"`` or ``"error"``; of notes ``"unwritten"``,
            ``"resized"``, ``"no output"`` or ``"no memory"``.
        argument: the argument that it is about, or None.
        output: the output that it is about, counted from 0, or None.
        input: which of the inputs showed it, counted from 0.
        site: the line that called `check_op`.
        definition: ``file:line`` of the op's body, or of its registration; None if unknown.
        message: what happened, and the mend.
    """

    op: str
    kind: str
    argument: str | None
    output: int | None
    input: int
    site: Site
    definition: str | None
    message: str

    @property
    def is_note(self) -> bool:
        """Whether it may be meant so, and is nothing that a correct op cannot show."""
        return self.kind in _NOTES

    def __str__(self) -> str:
        return self.text(f"input {self.input}, called at {self.site}")

    def text(self, place: str) -> str:
        """The finding as a sentence.

        Args:
            place: what to say of the call.
        """
        defined = f"; defined at {self.definition}" if self.definition else ""
        note = "note: " if self.is_note else ""
        return f"{note}`{self.op}` {self.message} ({place}{defined})"


def once(findings: Iterable[Finding]) -> list[Finding]:
    """The findings without those that a later input, or a later call, shows again."""
    first: dict[tuple[str | None, ...], Finding] = {}
    for finding in findings:
        text = finding.message if finding.kind == "error" else None
        key = (finding.kind, finding.argument, str(finding.output), text)
        first.setdefault(key, finding)
    return list(first.values())
