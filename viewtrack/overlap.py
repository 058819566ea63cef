"""Whether two strided regions of one storage have a byte in common, or one lies in the other.

The exact answer to the first: do ``offset + sum(index * stride)`` of the one and of the other come
to the same byte for some indices? It is a bounded linear equation, solved by depth-first search
over the dimensions, largest stride first, as in numpy's ``solve_diophantine``.
"""

from __future__ import annotations

import math

import torch

from .ledger import Region

# A dimension: how far one step goes, and how many steps there are beyond the first place.
_Dim = tuple[int, int]


def region_of(t: torch.Tensor) -> Region | None:
    """The part of its storage that a strided tensor covers now; None for other layouts."""
    if t.layout is not torch.strided:
        return None
    try:
        return Region(int(t.storage_offset()), tuple(t.size()), tuple(t.stride()), t.element_size())
    except (RuntimeError, NotImplementedError):
        return None


def overlaps(a: Region | None, b: Region | None) -> bool:
    """Whether regions `a` and `b` of one storage overlap; an unknown region is all of it."""
    if a is None or b is None:
        return True
    if 0 in a.size or 0 in b.size:
        return False
    # Items of one size lie on one grid, which is coarser than bytes and quicker to search.
    width_a, width_b = (1, 1) if a.itemsize == b.itemsize else (a.itemsize, b.itemsize)
    # `place in a - place in b == 0`, with b's dimensions mirrored so that every step goes up.
    dims_b = _dims(b, width_b)
    target = b.offset * width_b - a.offset * width_a + sum(step * count for step, count in dims_b)
    counts: dict[int, int] = {}
    for step, count in (*_dims(a, width_a), *dims_b):  # equal steps add up to one dimension
        counts[step] = counts.get(step, 0) + count
    return _solvable(sorted(counts.items(), reverse=True), 0, target)


def covers(a: Region | None, b: Region | None) -> bool:
    """Whether every byte of `b` is surely one of `a`: they are equal, or `a` has no gap."""
    if a is None or b is None:
        return a is b
    if a == b or 0 in b.size:
        return True
    if 0 in a.size:
        return False
    span_a, span_b = _span(a), _span(b)
    places = math.prod(count + 1 for _, count in _dims(a, 1))
    dense = span_a[1] - span_a[0] == places * a.itemsize and not _repeats(a)
    return dense and span_a[0] <= span_b[0] and span_b[1] <= span_a[1]


def _span(region: Region) -> tuple[int, int]:
    """The first byte, and the one beyond the last."""
    reach = sum(step * count for step, count in _dims(region, region.itemsize))
    start = region.offset * region.itemsize
    return start, start + reach + 1


def _repeats(region: Region) -> bool:
    """Whether a place may be there twice: a step is no longer than the shorter ones reach."""
    reach = 0
    for step, count in sorted(_dims(region, 1)):
        if step <= reach:
            return True
        reach += step * count
    return False


def _dims(region: Region, width: int) -> list[_Dim]:
    dims = [
        (stride * width, size - 1) for size, stride in zip(region.size, region.stride, strict=True)
    ]
    return [dim for dim in (*dims, (1, width - 1)) if dim[0] and dim[1]]  # last: an item's bytes


def _solvable(dims: list[_Dim], start: int, target: int) -> bool:
    """Whether ``sum(count * step) == target`` for some counts from 0 to each dimension's own."""
    if start == len(dims):
        return target == 0
    rest = dims[start:]
    reach = sum(step * count for step, count in rest)
    if not 0 <= target <= reach or target % math.gcd(*(step for step, _ in rest)):
        return False
    step, count = dims[start]
    least = max(0, -((reach - step * count - target) // step))  # the rest must reach what is left
    most = min(count, target // step)
    return any(_solvable(dims, start + 1, target - step * n) for n in range(most, least - 1, -1))
