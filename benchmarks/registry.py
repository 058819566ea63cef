"""What there is to measure.

A benchmark is a function that builds what it compares and is registered under a name and a target:

    @pair("add under track()", target=0.95)
    def _() -> tuple[Side, Side]:
        a, b = torch.ones(4, 4), torch.ones(4, 4)
        return Side(torch.add, (a, b), track), Side(torch.add, (a, b), NoOpMode)

The function runs only when its benchmark does, so importing a module of benchmarks costs nothing.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Side:
    """One of two compared ways: `call(*args)`, many times, inside `context()`.

    The context is entered outside the timed region. Where each call uses its arguments up (a tensor
    can be marked as a view only once), `fresh(n)` makes n argument tuples before the clock starts.
    """

    call: Callable[..., Any]
    args: tuple[Any, ...] = ()
    context: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext
    fresh: Callable[[int], Iterable[tuple[Any, ...]]] | None = None

    def arguments(self, n: int) -> Iterable[tuple[Any, ...]]:
        """The argument tuples of n calls."""
        return itertools.repeat(self.args, n) if self.fresh is None else self.fresh(n)


@dataclass(frozen=True)
class Pair:
    """Two ways of doing the same thing, and the most that ours may cost of the reference."""

    name: str
    target: float
    build: Callable[[], tuple[Side, Side]]
    note: str = ""


@dataclass(frozen=True)
class Quantity:
    """A number that is no ratio of two calls, and the most it may be."""

    name: str
    target: float
    unit: str
    sample: Callable[[], float]
    repeats: int
    note: str = ""


REGISTRY: dict[str, Pair | Quantity] = {}


def register(benchmark: Pair | Quantity) -> None:
    """Adds a benchmark; a name may be taken once."""
    if benchmark.name in REGISTRY:
        raise ValueError(f"a benchmark named `{benchmark.name}` is registered already")
    REGISTRY[benchmark.name] = benchmark


Build = Callable[[], tuple[Side, Side]]


def pair(name: str, *, target: float, note: str = "") -> Callable[[Build], Build]:
    """Registers a function that returns `(ours, reference)`."""

    def decorate(build: Build) -> Build:
        register(Pair(name, target, build, note))
        return build

    return decorate


def quantity(
    name: str, *, target: float, unit: str, repeats: int, note: str = ""
) -> Callable[[Callable[[], float]], Callable[[], float]]:
    """Registers a function that takes one sample of a number."""

    def decorate(sample: Callable[[], float]) -> Callable[[], float]:
        register(Quantity(name, target, unit, sample, repeats, note))
        return sample

    return decorate
