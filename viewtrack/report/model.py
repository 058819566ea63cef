"""What a report says, whatever it is written as."""

from __future__ import annotations

from dataclasses import dataclass

from ..mode import Record
from ..site import Site
from ..smuggled import Hazard


@dataclass(frozen=True, slots=True)
class OpRow:
    """An op, and how often it reached the bottom of the stack of dispatch modes."""

    op: str
    count: int


@dataclass(frozen=True, slots=True)
class ViewRow:
    """A view op that handlers issued, below autograd, from one line."""

    op: str
    site: Site
    count: int


@dataclass(frozen=True, slots=True)
class WriteRow:
    """Writes to one argument of an op, from one line."""

    op: str
    argument: str
    site: Site
    count: int


@dataclass(frozen=True, slots=True)
class Alias:
    """An op that returned memory of its argument without its schema saying so."""

    op: str
    site: Site


@dataclass(frozen=True, slots=True)
class HazardRow:
    """A hazard, as it was first found, and how often it was."""

    hazard: Hazard
    count: int


@dataclass(frozen=True, slots=True)
class Report:
    """What a tracked program did.

    Attributes:
        program: the program and its arguments.
        ended: how it ended, ``exit status 0``.
        torch: the version of torch.
        record: what was recorded of each write. With ``"none"`` there are no lines, and hazards
            were not looked for.
        hazards: in the order in which they were found.
        views: views made below autograd, the most frequent first.
        writes: the most frequent first.
        aliases: in the order in which they were found.
        ops: the most frequent first.
        threads: the names of threads that the program started, whose ops are not in the report.
        processes: how many processes it forked, whose ops are not in it either.
    """

    program: str
    ended: str
    torch: str
    record: Record
    hazards: tuple[HazardRow, ...]
    views: tuple[ViewRow, ...]
    writes: tuple[WriteRow, ...]
    aliases: tuple[Alias, ...]
    ops: tuple[OpRow, ...]
    threads: tuple[str, ...] = ()
    processes: int = 0
