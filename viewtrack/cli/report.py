"""``python -m viewtrack report``: shows a report that ``run --json`` wrote."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from ..errors import ViewTrackError
from ..report import from_json, to_text
from ..report.text import LIMIT
from . import output

DESCRIPTION = "Show a report that `python -m viewtrack run --json FILE` wrote."


def add_parser(commands: Any) -> None:
    """Add the command to the subparsers of the command line."""
    parser = commands.add_parser("report", help="show a saved report", description=DESCRIPTION)
    parser.add_argument("file", help="what `run --json` wrote")
    add_options(parser)
    parser.set_defaults(execute=execute, parser=parser)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that say how a report is shown."""
    parser.add_argument("-o", "--output", metavar="FILE", help="write the text there")
    parser.add_argument("-f", "--force", action="store_true", help="write over files that exist")
    parser.add_argument("--all", action="store_true", help=f"all rows, not the first {LIMIT}")


def execute(args: argparse.Namespace) -> int:
    """Run the command."""
    try:
        report = from_json(Path(args.file).read_text(encoding="utf-8"))
        text = to_text(report, None if args.all else LIMIT)
        if args.output is None:
            sys.stdout.write(text)
        else:
            output.check_writable(args.output, force=args.force)
            output.write(args.output, text, force=args.force)
    except (OSError, UnicodeDecodeError, ViewTrackError) as error:
        args.parser.error(str(error))
    return 0
