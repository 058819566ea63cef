"""Runs the benchmarks: one table of ratios, and a JSON file."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from benchmarks.output import table, write_json
from benchmarks.registry import REGISTRY, Pair, Quantity
from benchmarks.timing import Result, measure_pair, measure_quantity

MODULES = (
    "bench_view",
    "bench_track",
    "bench_handler",
    "bench_training",
    "bench_subclass",
    "bench_library",
    "bench_checkpoint",
    "bench_import",
)


def load() -> dict[str, Pair | Quantity]:
    """Imports every module of benchmarks, which registers what is in it."""
    for module in MODULES:
        importlib.import_module(f"benchmarks.{module}")
    return REGISTRY


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("--only", metavar="TEXT", default="", help="benchmarks with TEXT in a name")
    parser.add_argument("--rounds", type=int, default=201, help="rounds per pair (default 201)")
    parser.add_argument(
        "--block-ms", type=float, default=2.0, help="length of one timed block (default 2 ms)"
    )
    parser.add_argument("--json", type=Path, default=Path("benchmarks.json"), metavar="PATH")
    parser.add_argument("--list", action="store_true", help="list the names and stop")
    parser.add_argument(
        "--check", action="store_true", help="exit with status 1 where a target is missed"
    )
    return parser.parse_args(argv)


def _measure(benchmark: Pair | Quantity, options: argparse.Namespace) -> Result:
    if isinstance(benchmark, Quantity):
        return measure_quantity(benchmark)
    return measure_pair(benchmark, rounds=options.rounds, block_ms=options.block_ms)


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit status."""
    options = _arguments(argv)
    chosen = [benchmark for name, benchmark in load().items() if options.only in name]
    if not chosen:
        print(f"no benchmark has `{options.only}` in its name; --list tells the names")
        return 2
    if options.list:
        print("\n".join(benchmark.name for benchmark in chosen))
        return 0
    torch.set_num_threads(1)
    results = []
    for benchmark in chosen:
        print(f"measuring {benchmark.name}", file=sys.stderr)
        results.append(_measure(benchmark, options))
    print(table(results))
    write_json(results, options.json)
    print(f"wrote {options.json}")
    return int(options.check and not all(result.met for result in results))


if __name__ == "__main__":
    sys.exit(main())
