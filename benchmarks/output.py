"""The table that a person reads and the JSON file that a program reads."""

from __future__ import annotations

import dataclasses
import datetime
import json
import os
import platform
from pathlib import Path
from typing import Any

import torch

from benchmarks.timing import Result

HEADER = ("benchmark", "value", "target", "", "middle half", "ours", "reference")


def _microseconds(ns: float | None) -> str:
    return "" if ns is None else f"{ns / 1e3:.2f} us"


def _row(result: Result) -> tuple[str, ...]:
    unit = f" {result.unit}" if result.unit else ""
    return (
        result.name,
        f"{result.value:.3f}{unit}",
        f"{result.target:g}{unit}",
        "ok" if result.met else "MISSED",
        f"{result.low:.3f}..{result.high:.3f}",
        _microseconds(result.ours_ns),
        _microseconds(result.reference_ns),
    )


def table(results: list[Result]) -> str:
    """One line per benchmark, the first column flush left and the others flush right."""
    rows = [HEADER, *map(_row, results)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(HEADER))]
    lines = []
    for row in rows:
        name, *cells = row
        padded = [cell.rjust(width) for cell, width in zip(cells, widths[1:], strict=True)]
        lines.append("  ".join([name.ljust(widths[0]), *padded]).rstrip())
    lines.insert(1, "-" * max(map(len, lines)))
    return "\n".join(lines)


def environment() -> dict[str, Any]:
    """What the numbers depend on besides the code."""
    return {
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "machine": platform.machine(),
        "cpus": os.cpu_count(),
        "torch_threads": torch.get_num_threads(),
    }


def write_json(results: list[Result], path: Path) -> None:
    """Writes every result and the environment, replacing an earlier file."""
    rows = [{**dataclasses.asdict(result), "met": result.met} for result in results]
    text = json.dumps({"environment": environment(), "results": rows}, indent=2)
    path.write_text(text + "\n", encoding="utf-8")
