"""Conformance checks for users' own ops, modes and subclasses, with stock torch as the judge."""

from .below import compare_below
from .check_op import check_op
from .compare import Difference, compare
from .findings import Finding
from .subclass_conformance import SubclassConformance

__all__ = ["Difference", "Finding", "SubclassConformance", "check_op", "compare", "compare_below"]
