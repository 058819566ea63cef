"""``python -m viewtrack run``: runs a program under a tracker and reports on it."""

from __future__ import annotations

import argparse
import os
import sys
from typing import Any

from .. import checkpoint
from ..errors import ViewTrackError
from ..report import Recorder, Report, to_json, to_text
from ..report.text import LIMIT
from . import output
from .report import add_options
from .script import Program, hide_own_frames

DESCRIPTION = """\
Run a Python program as `python` would, and report what it did with views and writes:

  hazards              a tensor that a dispatch mode or a saved-tensor hook kept, that was written,
                       and that was then used again: what was kept, and the lines that wrote it
  views below autograd made by a `__torch_dispatch__` handler, by op and line
  writes               by op, argument and line
  undeclared aliases   ops that returned memory of an argument, which their schema does not say
  ops                  how often each was called

It is on the thread that runs the program, and names the other threads that were started. With
--guard-saved a write to what autograd saved for backward raises, also through `.data`.

The report goes to stderr when the program has ended, however it ended. The exit status is that of
the program.
"""

EPILOG = """\
examples:
  python -m viewtrack run train.py --epochs 1
  python -m viewtrack run -o report.txt --json report.json -m mypackage.train --epochs 1
"""


def add_parser(commands: Any) -> None:
    """Add the command to the subparsers of the command line."""
    parser = commands.add_parser(
        "run",
        help="run a program and report on it",
        description=DESCRIPTION,
        epilog=EPILOG,
        usage="%(prog)s [options] (script.py | - | -m module) [args ...]",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    _add_tracking_options(parser)
    parser.add_argument("--json", metavar="FILE", help="write the report there as JSON too")
    add_options(parser)
    parser.add_argument(
        "-m", dest="module", nargs=argparse.REMAINDER, help="run a module, as `python -m` does"
    )
    parser.add_argument(
        "script",
        nargs="?",
        help="the script, folder or archive to run; `-` reads a script from stdin",
    )
    parser.add_argument("args", nargs=argparse.REMAINDER, help="its arguments")
    parser.set_defaults(execute=execute, parser=parser)


def _add_tracking_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--record",
        choices=("none", "site", "stack"),
        default="site",
        help="what to keep of each write: nothing, which is faster and finds no hazards; op and "
        "line (the default); or the whole Python stack",
    )
    parser.add_argument(
        "--guard-checkpoint",
        action="store_true",
        help="put the guarded contexts of viewtrack.checkpoint in the place of torch's selective "
        "checkpointing: a write to a tensor that it cached raises, with the line that wrote",
    )
    parser.add_argument(
        "--guard-saved",
        action="store_true",
        help="guard what autograd saves for backward, as viewtrack.guard_saved_tensors does: "
        "backward raises if it was written, through .data too, with the line that wrote",
    )


def execute(args: argparse.Namespace) -> int:
    """Run the command."""
    try:
        program = _program(args)
        for path in (args.output, args.json):
            if path is not None:
                output.check_writable(path, force=args.force)
    except (ViewTrackError, OSError) as error:
        args.parser.error(str(error))
    if args.guard_checkpoint:
        checkpoint.install()
    recorder = Recorder(args.record, guard_saved=args.guard_saved)
    owner, ended = os.getpid(), "exit status 0"
    try:
        with recorder:
            program.run()
    except BaseException as error:
        ended = _ended(error)
        hide_own_frames()
        raise
    finally:
        if os.getpid() == owner:  # and not in a child that the program forked
            _write(recorder.report(str(program), ended), args)
    return 0


def _program(args: argparse.Namespace) -> Program:
    if args.module is None:
        if args.script is None:
            raise ViewTrackError("name a script to run, or a module with -m")
        return Program(args.script, args.args)
    if not args.module:
        raise ViewTrackError("name a module after -m")
    return Program(args.module[0], args.module[1:], is_module=True)


def _ended(error: BaseException) -> str:
    """How an exception that ends the program is told in the report."""
    if not isinstance(error, SystemExit):
        return f"{type(error).__name__}: {error}".partition("\n")[0].removesuffix(": ")
    if error.code is None:
        return "exit status 0"
    return f"exit status {error.code if isinstance(error.code, int) else 1}"


def _write(report: Report, args: argparse.Namespace) -> None:
    text = to_text(report, None if args.all else LIMIT)
    if args.output is None:
        sys.stdout.flush()
        sys.stderr.write(f"\n{text}")
    else:
        output.write(args.output, text, force=args.force)
        print(f"viewtrack: wrote `{args.output}`", file=sys.stderr)
    if args.json is not None:
        output.write(args.json, to_json(report), force=args.force)
        print(
            f"viewtrack: wrote `{args.json}`; next: python -m viewtrack report {args.json}",
            file=sys.stderr,
        )
