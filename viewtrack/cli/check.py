"""``python -m viewtrack check``: do ops do what their schemas say?"""

from __future__ import annotations

import argparse
import faulthandler
import importlib
import importlib.util
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from ..errors import ViewTrackError

DESCRIPTION = """\
Compare what ops do to memory and version counters with what their schemas say. The inputs are made
up from the schema, in several shapes, strides and dtypes, unless --inputs gives others.

The exit status is 0 if nothing differs, 1 if anything does, and 2 if an op cannot be found or
called. What is told as a note changes nothing of it.
"""

EPILOG = """\
examples:
  python -m viewtrack check mylib::first -i mylib.ops
  python -m viewtrack check 'mylib::*' -i build/mylib.so
  python -m viewtrack check ops.py
  python -m viewtrack check mylib::attend -i mylib.ops --inputs mylib.tests:attend_inputs
"""


def add_parser(commands: Any) -> None:
    """Add the command to the subparsers of the command line."""
    parser = commands.add_parser(
        "check",
        help="check custom ops",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "ops", nargs="+", metavar="op",
        help="`mylib::name.overload`, `mylib::name` for all of its overloads, a pattern such as "
        "'mylib::*', or a Python file, for all ops that it defines",
    )  # fmt: skip
    parser.add_argument(
        "-i", "--import", dest="modules", action="append", default=[], metavar="MODULE",
        help="import a module that defines the ops first, run a Python file, or load a library "
        "(.so, .dylib, .dll); may be given several times",
    )  # fmt: skip
    parser.add_argument(
        "--inputs", metavar="MODULE:FUNCTION",
        help="a function that returns the inputs, as a list of tuples of arguments, or of pairs of "
        "such a tuple and a dict of keyword arguments",
    )  # fmt: skip
    parser.add_argument("--notes", action="store_true", help="tell also what a correct op may show")
    parser.set_defaults(execute=execute, parser=parser)


def execute(args: argparse.Namespace) -> int:
    """Run the command."""
    sys.path.insert(0, os.getcwd())  # as `python -m` and `python file.py` have it
    if not faulthandler.is_enabled():
        with suppress(ValueError, OSError):  # stderr is no file
            faulthandler.enable()  # a raw kernel may end the process
    try:
        for module in args.modules:
            _import(module)
        ops = [op for pattern in args.ops for op in _ops(pattern)]
        given = _inputs(args.inputs) if args.inputs else None
    except ViewTrackError as error:
        args.parser.error(str(error))
    statuses = [_check(op, given, args.notes) for op in dict.fromkeys(ops)]
    if len(statuses) > 1:
        print(f"{len(statuses)} ops: {statuses.count(0)} clean, {statuses.count(1)} with findings, "
              f"{statuses.count(2)} not checked")  # fmt: skip
    return 1 if 1 in statuses else max(statuses)


def _check(op: Any, given: Sequence[Any] | None, notes: bool) -> int:
    from ..testing.check_op import check_op
    from ..testing.op_inputs import inputs_for

    name = op.name()
    try:
        if given is None:
            named = inputs_for(op)
            labels, inputs = [f"input: {label}" for label in named], list(named.values())
        else:
            labels, inputs = [f"input {index}" for index in range(len(given))], list(given)
        findings = check_op(op, *inputs, notes=notes)
    except ViewTrackError as error:
        print(f"{name}: not checked: {error}", file=sys.stderr)
        return 2
    for finding in findings:
        print(finding.text(labels[finding.input]))
    count = sum(not finding.is_note for finding in findings)
    print(f"{name}: {count or 'no'} finding{'' if count == 1 else 's'} over {len(inputs)} inputs")
    return 1 if count else 0


def _ops(pattern: str) -> list[Any]:
    from .._torch.library import op_names
    from ..testing.named_ops import ops_named

    if not pattern.endswith(".py"):
        return ops_named(pattern)
    before = set(op_names())
    _import(pattern)
    defined = sorted(name for name in set(op_names()) - before if not name.endswith("__opaque"))
    if not defined:
        raise ViewTrackError(f"`{pattern}` defines no op; name one, and import it by -i {pattern}")
    return [op for name in defined for op in ops_named(name)]


def _import(name: str) -> Any:
    """Import a module, run a file as one, or load a library.

    Raises:
        ViewTrackError: there is no such thing, or it raised.
    """

    def load() -> Any:
        if name.endswith((".so", ".dylib", ".dll")):
            return torch.ops.load_library(name)
        return _run(name) if name.endswith(".py") else importlib.import_module(name)

    return _done(name, load)


def _done(what: str, do: Callable[[], Any]) -> Any:
    """Run what is the user's, and tell its errors apart from ours."""
    try:
        return do()
    except ViewTrackError:
        raise
    except (ModuleNotFoundError, OSError) as error:
        raise ViewTrackError(f"cannot load `{what}`: {error}") from None
    except Exception as error:
        traceback.print_exc()
        raise ViewTrackError(f"`{what}` raised {type(error).__name__}: {error}") from error


def _run(path: str) -> Any:
    file = Path(path).resolve()
    name = file.stem
    if name in sys.modules:
        if getattr(sys.modules[name], "__file__", None) == str(file):
            return sys.modules[name]
        name = f"{name}_checked"  # some other module has the name
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None or not file.exists():
        raise ViewTrackError(f"there is no file `{path}`")
    sys.path.insert(0, str(file.parent))
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _inputs(path: str) -> list[Any]:
    module, _, name = path.rpartition(":")
    make = getattr(_import(module), name, None) if module else None
    if make is None:
        raise ViewTrackError(f"--inputs {path}: there is no such function; write MODULE:FUNCTION")
    return list(_done(path, make))
