"""Files that commands write: never over one that is there, unless told to."""

from __future__ import annotations

import os
from pathlib import Path

from ..errors import ViewTrackError


class OutputError(ViewTrackError):
    """A file cannot be written."""


def check_writable(path: str, *, force: bool) -> None:
    """Refuse a path that cannot be written, before the work is done.

    Raises:
        OutputError: the file exists and `force` is not given, or its folder does not exist.
    """
    if os.path.isdir(path):
        raise OutputError(f"`{path}` is a folder; name a file")
    if os.path.exists(path) and not force:
        raise OutputError(f"`{path}` exists already; pass -f to write over it")
    folder = os.path.dirname(path) or "."
    if not os.path.isdir(folder):
        raise OutputError(f"there is no folder `{folder}` to write `{path}` in; make it first")


def write(path: str, text: str, *, force: bool) -> None:
    """Write a file whole.

    Raises:
        OutputError: the file has come into being meanwhile and `force` is not given.
    """
    try:
        with Path(path).open("w" if force else "x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError as error:
        raise OutputError(f"`{path}` exists already; pass -f to write over it") from error
