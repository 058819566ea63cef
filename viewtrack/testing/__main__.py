"""``python -m viewtrack.testing``: the conformance sweep, and the table that is made by one."""

from __future__ import annotations

import argparse
import sys

import torch

from .aliases import MODULE, find_undeclared, known_calls, source
from .sweep import sweep


def main(argv: list[str] | None = None) -> int:
    """Run a sweep; the exit status is 1 if it found what it should not."""
    parser = argparse.ArgumentParser(prog="python -m viewtrack.testing", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    ops = commands.add_parser("ops", help="compare torch's OpInfo database with stock torch")
    ops.add_argument("--name", default="", help="only ops with this in their name")
    ops.add_argument("--samples", type=int, help="samples of each op and dtype; all by default")
    ops.add_argument("--every", type=int, default=1, help="only every so many ops")
    aliases = commands.add_parser("aliases", help="find ATen ops that return memory undeclared")
    aliases.add_argument("--samples", type=int, help="as above")
    aliases.add_argument("--write", action="store_true", help=f"write {MODULE.name}")
    options = parser.parse_args(argv)
    torch.set_num_threads(1)
    return _ops(options) if options.command == "ops" else _aliases(options)


def _ops(options: argparse.Namespace) -> int:
    def progress(name: str) -> None:
        sys.stderr.write(f"{name}\n")

    findings = sweep(options.name, options.samples, options.every, progress)
    sys.stdout.write(f"torch {torch.__version__}: {findings.text()}")
    return int(bool(findings.beyond or findings.below or findings.failed))


def _aliases(options: argparse.Namespace) -> int:
    text = source(find_undeclared(known_calls(samples=options.samples)))
    if options.write:
        MODULE.write_text(text)
    else:
        sys.stdout.write(text)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
