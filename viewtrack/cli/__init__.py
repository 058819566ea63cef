"""The command line: ``python -m viewtrack COMMAND``. One module for each command."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from . import check, report, run

COMMANDS = (run, report, check)


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command.

    Args:
        argv: the arguments; None for those of the process.

    Returns:
        The exit status. What a program that is run raises, `SystemExit` included, passes through.
    """
    args = make_parser().parse_args(argv)
    status: int = args.execute(args)
    return status


def make_parser() -> argparse.ArgumentParser:
    """The parser of all commands."""
    parser = argparse.ArgumentParser(
        prog="python -m viewtrack",
        description="Tells the truth about views and writes where PyTorch stops looking.",
    )
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    for command in COMMANDS:
        command.add_parser(commands)
    return parser
