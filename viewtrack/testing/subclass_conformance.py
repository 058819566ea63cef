"""`SubclassConformance`: tests that a wrapper subclass behaves as what it stands for."""

from __future__ import annotations

import unittest
from collections.abc import Set
from typing import Any, ClassVar

import torch

from ..subclass.kinds import kind_of, parts_of
from .subclass_checks import Subject, check_gradients, check_operation, defined_at
from .subclass_table import OPERATIONS, Operation


class SubclassConformance:
    """A mixin for a pytest class that tests a wrapper subclass, one test for each operation.

        class TestMyTensor(viewtrack.testing.SubclassConformance):
            def make(self, inner):
                return MyTensor(inner)

    Each operation of a table (views, lists of views, in-place, out=, foreach and metadata ops) runs
    on the class and on plain tensors. Compared are what the handler itself returns (the very
    argument for a write, an alias of the base's storage for a view), shapes, strides, values,
    ``_is_view``, ``_base``, version counters, and whether writes to a view reach its base. A test
    that fails says in a line each what is wrong.

    Semantics: NOTE [ Autograd View Variables ] in torch/csrc/autograd/variable.h, and the alias
    annotations of each op's schema.

    Attributes:
        unsupported: names of operations that the class is not made for; they are skipped.
        keeps_inner_counters: set it to False for a class that leaves the version counters of its
            inner tensors alone.
        results_are_plain: set it to True for a class whose functional ops give plain tensors, as
            those of quantized weights do.
    """

    unsupported: ClassVar[Set[str]] = frozenset()
    keeps_inner_counters: ClassVar[bool] = True
    results_are_plain: ClassVar[bool] = False

    def make(self, inner: torch.Tensor) -> torch.Tensor:
        """Make a tensor of the class under test. Override it.

        Args:
            inner: a plain tensor of any shape and dtype; the result may take it over.
        """
        raise NotImplementedError(f"`{type(self).__name__}` must define `make(self, inner)`")

    def read(self, t: torch.Tensor) -> torch.Tensor:
        """The values that `t` stands for, as a plain tensor of its shape.

        Override it for a class that does not have ``unwrap()``, nor one inner tensor of its shape.

        Args:
            t: a tensor of the class under test.
        """
        if hasattr(t, "unwrap"):
            inner: torch.Tensor = t.unwrap()
            return inner
        for _, part in parts_of(t) if kind_of(type(t)).flattens else ():
            if part.dtype is t.dtype:
                return part
        raise NotImplementedError(
            f"`{type(self).__name__}` must define `read(self, t)`: `{type(t).__name__}` has no "
            f"`unwrap()` and declares no inner tensor of its dtype"
        )

    def same(self, found: torch.Tensor, expected: torch.Tensor) -> bool:
        """Whether two plain tensors are the same; override it for a class that rounds.

        Args:
            found: the values that a tensor of the class stands for.
            expected: those of a plain tensor, of the same shape.
        """
        return found.dtype is expected.dtype and torch.equal(found, expected)

    def pytest_generate_tests(self, metafunc: Any) -> None:
        """Make a test of each operation; pytest calls it."""
        if "operation" in metafunc.fixturenames:
            ids = [f"{operation.kind}-{operation.name}" for operation in OPERATIONS]
            metafunc.parametrize("operation", OPERATIONS, ids=ids)

    def test_operation(self, operation: Operation) -> None:
        """The operation does what it does on plain tensors."""
        if operation.name in self.unsupported:
            raise unittest.SkipTest(f"`{operation.name}` is listed as unsupported")
        self._report(operation.name, check_operation(operation, self._subject()))

    def test_gradients(self) -> None:
        """Gradients through writes to views are those of plain tensors."""
        if "gradients" in self.unsupported:
            raise unittest.SkipTest("`gradients` is listed as unsupported")
        self._report("gradients", check_gradients(self._subject()))

    def _subject(self) -> Subject:
        return Subject(
            self.make, self.read, self.same, self.keeps_inner_counters, self.results_are_plain
        )

    def _report(self, name: str, problems: list[str]) -> None:
        if problems:
            cls = type(self.make(torch.ones(2, 3)))
            where = f"{cls.__name__} ({defined_at(cls)})"
            raise AssertionError("\n  ".join([f"`{name}` on {where}:", *problems]))
