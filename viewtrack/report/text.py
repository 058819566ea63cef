"""A report as text."""

from __future__ import annotations

import linecache
import os
from collections.abc import Iterator, Sequence
from itertools import zip_longest

from ..ledger import Write
from ..site import UNKNOWN, Site, is_user_file
from .model import HazardRow, Report

#: How many rows of a table are shown.
LIMIT = 20

HAZARDS = "hazards (kept by a mode or a hook, then written, then used again)"

LOOKED = "in this thread and process; what autograd itself saved is watched by --guard-saved"

#: How many threads are named.
THREADS = 3

#: How many characters of a source line are shown.
SOURCE = 72


def to_text(report: Report, limit: int | None = LIMIT) -> str:
    """The report as text, hazards first.

    Args:
        report: what to write.
        limit: how many rows to show of each table; None for all. Hazards are all shown.
    """
    return "\n".join(_lines(report, limit)).rstrip() + "\n"


def _lines(report: Report, limit: int | None) -> Iterator[str]:
    yield f"viewtrack report on `{report.program}`"
    yield f"torch {report.torch}, record={report.record}" + (
        f", ended with {report.ended}" if report.ended else ""
    )
    yield ""
    yield from _hazards(report)
    yield from _table(
        "views made below autograd",
        [(str(row.count), row.op, _line(row.site)) for row in report.views],
        sum(row.count for row in report.views),
        limit,
    )
    yield from _table(
        "writes",
        [(str(row.count), f"{row.op}({row.argument})", _line(row.site)) for row in report.writes],
        sum(row.count for row in report.writes),
        limit,
    )
    yield from _table(
        "undeclared aliases (ops that return memory of an argument, unsaid by their schema)",
        [(row.op, f"first at {_line(row.site)}") for row in report.aliases],
        len(report.aliases),
        limit,
    )
    yield from _table(
        "ops",
        [(str(row.count), row.op) for row in report.ops],
        sum(row.count for row in report.ops),
        limit,
    )


def _hazards(report: Report) -> Iterator[str]:
    rows = report.hazards
    if report.record == "none":
        yield "hazards: not looked for (record=none)"
    elif not rows:
        yield f"{HAZARDS}: none"
        yield f"  {LOOKED}"
    else:
        yield f"{HAZARDS}: {len(rows)}"
    for number, row in enumerate(rows, 1):
        yield ""
        yield from _hazard(number, row)
    yield ""
    yield from _unseen(report)


def _unseen(report: Report) -> Iterator[str]:
    names, more = report.threads[:THREADS], len(report.threads) - THREADS
    shown = ", ".join([*names, *([f"{more} more"] if more > 0 else [])])
    threads = f"{_number(len(report.threads), 'other thread')} ({shown})" if names else ""
    processes = _number(report.processes, "forked process") if report.processes else ""
    if threads or processes:
        of = " and of ".join(filter(None, (threads, processes)))
        yield f"not in this report: ops, if any, of {of}"
        yield ""


def _number(count: int, what: str) -> str:
    return f"{count} {what}" if count == 1 else f"{count} {what}{'es' if what[-1] == 's' else 's'}"


def _hazard(number: int, row: HazardRow) -> Iterator[str]:
    hazard = row.hazard
    op = f"{hazard.op} -> " if hazard.op else "saved for backward: "
    keeper = [f"by {hazard.keeper}"] if hazard.keeper else []
    yield from _entry(f"{number:3d}  kept", op + hazard.result, hazard.saved, *keeper)
    for write, through in zip_longest(hazard.writes, hazard.through[: len(hazard.writes)]):
        how = f"through {through}, {_moved(write)}" if through else _moved(write)
        yield from _entry("written", f"{write.op}({write.argument})", write.site, how)
    yield from _entry("used", hazard.use, hazard.used, f"{_times(row.count)} in all")
    yield from _entry("mend", _mend(hazard.writes))


def _entry(label: str, what: str, site: Site | None = None, *more: str) -> Iterator[str]:
    indent = 14 * " "
    yield f"{label if label[0] == ' ' else '     ' + label:14}{what}"
    if site is not None:
        yield indent + _line(site)
        callers = [frame for frame in site.stack[1:] if is_user_file(frame[0])]
        yield from (f"{indent}  called from {_where(*frame)}" for frame in callers)
    for line in more:
        yield indent + line


def _moved(write: Write) -> str:
    version = (
        f"version {write.version_before} -> {write.version_after}, "
        if write.version_before is not None
        else ""
    )
    return f"{version}thread {write.thread}"


def _mend(writes: Sequence[Write]) -> str:
    lines = ", ".join(dict.fromkeys(_short(w.site.filename, w.site.lineno) for w in writes))
    return f"write out of place at {lines}, or let a copy be kept"


def _times(count: int) -> str:
    return "once" if count == 1 else f"{count} times"


def _table(
    title: str, rows: Sequence[tuple[str, ...]], total: int, limit: int | None
) -> Iterator[str]:
    yield f"{title}: {total if rows else 'none'}"
    shown = rows if limit is None else rows[:limit]
    widths = [max(map(len, column)) for column in zip(*shown, strict=True)]
    for row in shown:
        first, *rest = row
        cells = [first.rjust(widths[0]) if first.isdigit() else first.ljust(widths[0])]
        cells += [cell.ljust(width) for cell, width in zip(rest, widths[1:], strict=True)]
        yield "  " + "  ".join(cells).rstrip()
    if len(shown) < len(rows):
        yield f"  and {len(rows) - len(shown)} more rows"
    yield ""


def _line(site: Site) -> str:
    """File, line and function of a site, and the source line where it can be read."""
    if site == UNKNOWN or not site.lineno:
        return "line unknown"
    source = " ".join(linecache.getline(site.filename, site.lineno).split())
    if len(source) > SOURCE:
        source = f"{source[: SOURCE - 3]}..."
    return _where(site.filename, site.lineno, site.function) + (f":  {source}" if source else "")


def _where(filename: str, lineno: int, function: str) -> str:
    return f"{_short(filename, lineno)} in {function}"


def _short(filename: str, lineno: int) -> str:
    here = os.getcwd() + os.sep
    return f"{filename.removeprefix(here)}:{lineno}"
