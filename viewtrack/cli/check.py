"""``python -m viewtrack check``: does an op do what its schema says?"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from typing import Any

from ..errors import ViewTrackError

DESCRIPTION = (
    "Compare what an op does to memory and version counters with what its schema says. The inputs "
    "are made up from the schema, in several shapes and strides, unless --inputs gives others. The "
    "exit status is 1 if anything differs."
)


def add_parser(commands: Any) -> None:
    """Add the command to the subparsers of the command line."""
    parser = commands.add_parser("check", help="check a custom op", description=DESCRIPTION)
    parser.add_argument("op", help="the op, `mylib::name` or `mylib::name.overload`")
    parser.add_argument(
        "-i", "--import", dest="modules", action="append", default=[], metavar="MODULE",
        help="import a module that defines the op first; may be given several times",
    )  # fmt: skip
    parser.add_argument(
        "--inputs", metavar="MODULE:FUNCTION",
        help="a function that returns the inputs, as a list of tuples of arguments",
    )  # fmt: skip
    parser.set_defaults(execute=execute, parser=parser)


def execute(args: argparse.Namespace) -> int:
    """Run the command."""
    from ..testing.check_op import check_op, overload_of
    from ..testing.op_inputs import inputs_for

    sys.path.insert(0, os.getcwd())  # as `python -m` and `python file.py` have it
    try:
        for module in args.modules:
            importlib.import_module(module)
        op = overload_of(args.op)
        inputs = _load(args.inputs)() if args.inputs else inputs_for(op)
        findings = check_op(op, *inputs)
    except (ImportError, AttributeError, ViewTrackError) as error:
        args.parser.error(str(error))
    for finding in findings:
        print(finding)
    print(f"{args.op}: {len(findings) or 'no'} finding{'' if len(findings) == 1 else 's'} over "
          f"{len(inputs)} inputs")  # fmt: skip
    return 1 if findings else 0


def _load(path: str) -> Any:
    module, _, name = path.partition(":")
    return getattr(importlib.import_module(module), name)
