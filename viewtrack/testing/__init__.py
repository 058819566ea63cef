"""Conformance checks for users' own ops, modes and subclasses, with stock torch as the judge."""

from .below import compare_below
from .compare import Difference, compare

__all__ = ["Difference", "compare", "compare_below"]
