"""Lines of a test file, by a comment at their end."""

from __future__ import annotations


def line_of(file: str, mark: str) -> int:
    """The number of the first line of `file` that ends with ``# mark``."""
    with open(file) as source:
        return next(n for n, line in enumerate(source, 1) if line.rstrip().endswith(f"# {mark}"))
