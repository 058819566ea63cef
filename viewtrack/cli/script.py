"""Runs a script or a module as `python` itself would.

`runpy` is not used: it takes the module it made for `__main__` away again when the script ends,
while threads, `atexit` functions and unpickling may still want it, as they may under `python`.
"""

from __future__ import annotations

import builtins
import importlib.util
import io
import os
import pkgutil
import sys
from collections.abc import Sequence
from importlib.machinery import BuiltinImporter, ModuleSpec, SourceFileLoader
from pathlib import Path
from types import CodeType, ModuleType, TracebackType
from typing import Any

from ..errors import ViewTrackError

STDIN = "-"
PACKAGE = str(Path(__file__).parent.parent) + os.sep


class Program:
    """A script, also from stdin, a module (`-m`), or a directory or archive with a `__main__.py`.

    Args:
        name: the path of the script, ``"-"`` for one that is read from stdin, or the name of the
            module.
        args: what follows it on the command line.
        is_module: whether `name` is the name of a module.

    Raises:
        FileNotFoundError: if there is no such script.
        ModuleNotFoundError: if there is no such module, or it cannot be run.
    """

    def __init__(self, name: str, args: Sequence[str], *, is_module: bool = False) -> None:
        self.name = name
        self.args = list(args)
        self.is_module = is_module
        if not (is_module or name == STDIN or os.path.exists(name)):
            raise FileNotFoundError(f"can't open file `{os.path.abspath(name)}`: no such file")

    def __str__(self) -> str:
        return " ".join([*(["-m"] if self.is_module else []), self.name, *self.args])

    def run(self) -> None:
        """Run it in this process; what it raises, `SystemExit` included, passes through."""
        code, attributes = self._load()
        main = ModuleType("__main__")
        vars(main).update(__builtins__=builtins, __annotations__={}, **attributes)
        sys.argv = [attributes["__file__"] if self.is_module else self.name, *self.args]
        sys.modules["__main__"] = main
        exec(code, vars(main))

    def _load(self) -> tuple[CodeType, dict[str, Any]]:
        if self.is_module:
            return _load_module(self.name)
        if self.name == STDIN:
            return _load_stdin()
        importer = pkgutil.get_importer(self.name)
        if importer is not None and (spec := importer.find_spec("__main__")) is not None:
            _replace_path_entry(os.path.abspath(self.name))
            return _from_spec(spec)
        return _load_script(self.name)


def _load_script(name: str) -> tuple[CodeType, dict[str, Any]]:
    filename = os.path.abspath(name)
    _replace_path_entry(os.path.dirname(os.path.realpath(name)))
    with io.open_code(filename) as file:
        code = compile(file.read(), filename, "exec", dont_inherit=True)
    loader = SourceFileLoader("__main__", filename)
    return code, _attributes(filename, loader=loader)


def _load_stdin() -> tuple[CodeType, dict[str, Any]]:
    _replace_path_entry("")
    name = "<stdin>"
    code = compile(sys.stdin.buffer.read(), name, "exec", dont_inherit=True)
    return code, _attributes(name, loader=BuiltinImporter)


def _load_module(name: str) -> tuple[CodeType, dict[str, Any]]:
    spec = importlib.util.find_spec(name)
    if spec is not None and spec.submodule_search_locations is not None:
        spec = importlib.util.find_spec(f"{name}.__main__")
    if spec is None:
        raise ModuleNotFoundError(f"no module named `{name}`, or it has no `__main__`", name=name)
    return _from_spec(spec)


def _from_spec(spec: ModuleSpec) -> tuple[CodeType, dict[str, Any]]:
    get_code = getattr(spec.loader, "get_code", None)
    code = get_code(spec.name) if get_code is not None else None
    if not isinstance(code, CodeType):
        raise ModuleNotFoundError(f"`{spec.name}` has no Python code to run", name=spec.name)
    return code, _attributes(
        spec.origin, loader=spec.loader, spec=spec, package=spec.parent, cached=spec.cached
    )


def _attributes(
    filename: str | None,
    *,
    loader: Any,
    spec: ModuleSpec | None = None,
    package: str | None = None,
    cached: str | None = None,
) -> dict[str, Any]:
    return {
        "__file__": filename,
        "__loader__": loader,
        "__spec__": spec,
        "__package__": package,
        "__cached__": cached,
    }


def _replace_path_entry(entry: str) -> None:
    """Put the script's folder where `python -m` has put the working directory."""
    if getattr(sys.flags, "safe_path", False):  # from Python 3.11 on: -P, and then neither is there
        return
    sys.path[0] = entry


def hide_own_frames() -> None:
    """Keep viewtrack's frames out of the traceback that ends the program."""
    hook = sys.excepthook

    def hook_without_own_frames(
        kind: type[BaseException], value: BaseException, traceback: TracebackType | None
    ) -> None:
        traceback = program_frames(value, traceback)
        hook(kind, value.with_traceback(traceback), traceback)  # the native hook looks at `value`

    sys.excepthook = hook_without_own_frames


def program_frames(error: BaseException, traceback: TracebackType | None) -> TracebackType | None:
    """The traceback of `error` less our frames and what lies above them.

    The last frame stays if the error may have arisen in it, and not in an op that it called. A
    script that cannot be compiled has no frame at all, as under `python`.
    """
    entries = []
    while traceback is not None:
        entries.append(traceback)
        traceback = traceback.tb_next
    start = [i for i, entry in enumerate(entries) if entry.tb_frame.f_code is Program.run.__code__]
    kept = None
    for entry in reversed(entries[start[0] + 1 :] if start else entries):
        filename = entry.tb_frame.f_code.co_filename
        arose_here = kept is None and filename != __file__ and not _may_be_torch(error)
        if arose_here or not filename.startswith(PACKAGE):
            kept = TracebackType(kept, entry.tb_frame, entry.tb_lasti, entry.tb_lineno)
    return kept


def _may_be_torch(error: BaseException) -> bool:
    """Whether an error is of a kind that ops raise, of which C++ leaves no frame."""
    return isinstance(error, (RuntimeError, IndexError, ValueError)) and not isinstance(
        error, ViewTrackError
    )
