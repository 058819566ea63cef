"""Run the comparisons over torch's whole OpInfo database.

Each call is made on stock torch and in three settings: under `track`, under a dispatch mode that
does nothing, and under such a mode inside `track`. So what any mode changes is told apart from what
the tracker does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

from ..mode import track
from .below import APART_ON_PURPOSE, below_differences
from .call import Call
from .compare import Difference, differences, is_steady
from .modes import NoOpMode
from .observation import Under, observe
from .opinfo import calls, database

BETTER_THAN_STOCK = {
    (
        "kron",
        "out",
    ): "the result is written through `_unsafe_view`, whose counter stock torch keeps "
    "apart, so that a write to the `out=` tensor goes unseen",
}
"""Where the tracker moves a counter that stock torch ought to move: op, variant, and why."""

# `linalg.lstsq` gives other last bits once in twelve calls.
_RUNS = 100


@contextmanager
def _tracked_mode() -> Any:
    with ExitStack() as stack:
        stack.enter_context(track(record="none"))
        stack.enter_context(NoOpMode())
        yield


@dataclass
class Findings:
    """What a sweep found.

    Attributes:
        ops: how many entries of the database were run.
        calls: how many calls were compared.
        beyond: what differs under `track`, or under a mode inside it, and not under a mode alone.
        below: what differs when a handler issues the call.
        of_any_mode: what differs under any mode, `track` included.
        mended: how many differences of a mode alone there are not under `track`.
        failed: calls that could not be compared, with the reason.
    """

    ops: int = 0
    calls: int = 0
    beyond: list[Difference] = field(default_factory=list)
    below: list[Difference] = field(default_factory=list)
    of_any_mode: list[Difference] = field(default_factory=list)
    mended: int = 0
    failed: list[str] = field(default_factory=list)

    def text(self) -> str:
        """The findings as a report."""
        lines = [f"{self.ops} ops, {self.calls} calls"]
        for title, found in (
            ("beyond a mode that does nothing", self.beyond),
            ("below autograd", self.below),
            ("under any mode", self.of_any_mode),
        ):
            lines += [f"\n{len(found)} differences {title}", *map(_brief, found)]
        lines += [f"\n{self.mended} differences of a mode that does nothing are mended"]
        lines += [f"\n{len(self.failed)} calls not compared", *self.failed]
        return "\n".join(lines) + "\n"


def sweep(
    name_contains: str = "",
    samples: int | None = None,
    every: int = 1,
    progress: Callable[[str], None] = lambda name: None,
) -> Findings:
    """Compare the calls of torch's OpInfo database, foreach entries included.

    Args:
        name_contains: take only ops with this in their name.
        samples: how many samples of each op and dtype to take; all of them by default.
        every: take only every so many ops.
        progress: called with the name of each op.
    """
    findings = Findings()
    for op in database(name_contains)[::every]:
        progress(op.full_name)
        findings.ops += 1
        sweep_calls(calls(op, samples), op.name, findings)
    return findings


def sweep_calls(tried: Iterable[Call], op_name: str, findings: Findings) -> None:
    """Compare calls of one op, and add what is found to `findings`."""
    for call in tried:
        findings.calls += 1
        try:
            _sweep_call(call, op_name, findings)
        except Exception as error:
            findings.failed.append(f"{call.name}: {type(error).__name__}: {error}")


def _sweep_call(call: Call, op_name: str, findings: Findings) -> None:
    expected = observe(call)

    def differing(under: Under) -> list[Difference]:
        return differences(call.name, expected, lambda: observe(call, under))

    plain = {d.what for d in differing(NoOpMode)}
    tracked = {d.what: d for d in [*differing(_tracked_mode), *differing(track)]}
    again = {d.what for d in [*differing(_tracked_mode), *differing(track)]} if tracked else set()
    steady = [
        d
        for d in tracked.values()
        if d.what in again and is_steady(call, d, runs=6 if d.what in plain else _RUNS)
    ]
    findings.of_any_mode += [d for d in steady if d.what in plain]
    findings.mended += len(plain - set(tracked))
    if (op_name, call.variant) not in BETTER_THAN_STOCK:
        findings.beyond += [d for d in steady if d.what not in plain]
        findings.below += below_differences(call, apart=op_name in APART_ON_PURPOSE)


def _brief(difference: Difference) -> str:
    text = " ".join(str(difference).split())
    return text if len(text) <= 240 else text[:237] + "..."
