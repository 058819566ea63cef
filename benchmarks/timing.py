"""How a pair is measured.

Both sides run in one process on one thread, in short blocks that alternate, and who goes first
alternates too: whatever slows the machine down for longer than a block slows both. The ratio is
taken within each round and the median over the rounds, so a round that was disturbed drops out.
The clock is the thread's own processor time, which other programs on the machine do not advance.
"""

from __future__ import annotations

import contextlib
import gc
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from benchmarks.registry import Pair, Quantity, Side

Clock = Callable[[], int]


@dataclass(frozen=True)
class Result:
    """A benchmark's outcome; `value` is what `target` bounds, a ratio where `unit` is empty."""

    name: str
    value: float
    target: float
    unit: str
    low: float
    high: float
    ours_ns: float | None
    reference_ns: float | None
    rounds: int
    note: str

    @property
    def met(self) -> bool:
        return self.value <= self.target


@contextlib.contextmanager
def no_gc() -> Iterator[None]:
    """Keeps the collector out of the timed region, as `timeit` does."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def block_ns(side: Side, n: int, clock: Clock) -> int:
    """Time of n calls of one side, in nanoseconds."""
    call = side.call
    arguments = side.arguments(n)
    with side.context(), no_gc():
        start = clock()
        for args in arguments:
            call(*args)
        return clock() - start


def calls_per_block(side: Side, block_ms: float, clock: Clock) -> int:
    """How many calls fill a block."""
    # A first call may import a module or compile something, and would pass for a full block.
    block_ns(side, 1, clock)
    n, wanted = 1, block_ms * 1e6
    while n < 1_000_000:
        elapsed = block_ns(side, n, clock)
        if elapsed >= wanted:
            break
        # Grow by steps: short blocks make each call look dear.
        n = min(n * 8, max(n + 1, int(n * wanted / max(elapsed, 1) * 1.1)))
    return n


def quartiles(samples: list[float]) -> tuple[float, float, float]:
    """Lower quartile, median, upper quartile."""
    if len(samples) < 2:
        return samples[0], samples[0], samples[0]
    low, middle, high = statistics.quantiles(samples, n=4, method="inclusive")
    return low, middle, high


def measure_pair(
    pair: Pair, *, rounds: int, block_ms: float, clock: Clock = time.thread_time_ns
) -> Result:
    """Measures both sides in alternating blocks."""
    sides = pair.build()
    counts = [calls_per_block(side, block_ms, clock) for side in sides]
    per_call: tuple[list[float], list[float]] = ([], [])
    for index in range(rounds):
        order = (0, 1) if index % 2 == 0 else (1, 0)
        for which in order:
            n = counts[which]
            per_call[which].append(block_ns(sides[which], n, clock) / n)
    ratios = [ours / reference for ours, reference in zip(*per_call, strict=True)]
    low, ratio, high = quartiles(ratios)
    return Result(
        name=pair.name,
        value=ratio,
        target=pair.target,
        unit="",
        low=low,
        high=high,
        ours_ns=statistics.median(per_call[0]),
        reference_ns=statistics.median(per_call[1]),
        rounds=rounds,
        note=pair.note,
    )


def measure_quantity(quantity: Quantity) -> Result:
    """Takes the median of the quantity's own number of samples."""
    low, value, high = quartiles([quantity.sample() for _ in range(quantity.repeats)])
    return Result(
        name=quantity.name,
        value=value,
        target=quantity.target,
        unit=quantity.unit,
        low=low,
        high=high,
        ours_ns=None,
        reference_ns=None,
        rounds=quantity.repeats,
        note=quantity.note,
    )
