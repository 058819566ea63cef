"""What a call did to the memory of its arguments, byte by byte.

Whole storages are compared, and not only what the arguments cover: a kernel that takes a tensor for
contiguous, or starts at the wrong address, writes beside it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from ..info import version
from ..ledger import Region
from ..overlap import region_of
from ..plan import Argument
from .copies import Copies, Fence, is_plain, parts_of


class Given:
    """A tensor that a call was given, as it was before the call.

    Attributes:
        argument: the argument that it is, or is in.
        label: how a message names it: ``x``, or ``xs[1]`` in a list.
        t: the tensor.
        version: its version.
        region: what it covered of its storage.
        written: whether its elements have other bytes after the call.
    """

    def __init__(self, argument: Argument, label: str, t: torch.Tensor) -> None:
        self.argument = argument
        self.label = label
        self.t = t
        self.version = version(t)
        self.region = region_of(t)
        self.written = False
        self._looks = _looks(t)

    @property
    def was_reshaped(self) -> bool:
        """Whether it has other sizes, strides, or another place in memory now."""
        return bool(_looks(self.t)[:-1] != self._looks[:-1])

    @property
    def was_exchanged(self) -> bool:
        """Whether it has another storage now."""
        return bool(_looks(self.t)[-1] != self._looks[-1])


def _looks(t: torch.Tensor) -> tuple[Any, ...]:
    if t.layout is not torch.strided:
        return (tuple(t.size()), t.layout, None)
    try:
        where = t.untyped_storage()._cdata
        return (tuple(t.size()), tuple(t.stride()), t.storage_offset(), t.dtype, where)
    except (RuntimeError, NotImplementedError):
        return (None,)


@dataclass(frozen=True)
class Stray:
    """A write beside all arguments.

    Attributes:
        near: the argument in whose storage, or beside whose storage, it is.
        first: the first byte, counted from the first of the argument's elements.
    """

    near: Given
    first: int

    def __str__(self) -> str:
        width = self.near.t.element_size()
        first = self.first // width * width  # a float's first bytes may be as they were by chance
        if first < 0:
            return f"{-first} bytes before its first element"
        return f"{first} bytes after the start of its first element"


class Memory:
    """The memory of a call's arguments as it is before the call.

    Args:
        given: the tensors that the call gets.
        copies: what they are in.

    Attributes:
        unseen: tensors that have no memory to look at: meta tensors, some wrappers.
    """

    def __init__(self, given: list[Given], copies: Copies) -> None:
        self.unseen: list[Given] = []
        self._elements: list[tuple[Given, torch.Tensor]] = []
        by_storage: dict[int, list[Given]] = {}
        for one in given:
            if is_plain(one.t) and one.t.device.type != "meta":
                by_storage.setdefault(one.t.untyped_storage()._cdata, []).append(one)
            else:
                self._note_elements(one)
        self._storages = [
            _Storage(among, copies.fences.get(key)) for key, among in by_storage.items()
        ]

    def _note_elements(self, one: Given) -> None:
        content = elements(one.t)
        if content is None:
            self.unseen.append(one)
        else:
            self._elements.append((one, content))

    def compare(self) -> Iterator[Stray]:
        """See what has changed: sets `Given.written`, and yields what lies beside them all.

        What is in the memory of an argument that is declared written counts for that one alone.
        """
        for one, before in self._elements:
            now = elements(one.t)
            one.written = now is not None and not _same(before, now)
        for storage in self._storages:
            yield from storage.compare()


class _Storage:
    def __init__(self, given: list[Given], fence: Fence | None) -> None:
        self._given = given
        self._fence = fence
        self._storage = given[0].t.untyped_storage()
        self._before = _whole(self._storage).clone()

    def compare(self) -> Iterator[Stray]:
        now = _whole(self._storage)
        size = min(len(now), len(self._before))
        changed = now[:size] != self._before[:size]
        declared = self._covered([g for g in self._given if g.argument.is_write], changed)
        for one in self._given:
            mine = self._covered([one], changed)
            reached = changed & mine
            if not one.argument.is_write:
                reached &= ~declared
            one.written = bool(reached.any())
        near = min(self._given, key=lambda g: not g.argument.is_write)
        yield from self._beside(changed & ~self._covered(self._given, changed), near)
        harmed = self._fence.harmed() if self._fence is not None else None
        if harmed is not None:
            yield Stray(near, harmed - _start(near))

    def _beside(self, stray: torch.Tensor, near: Given) -> Iterator[Stray]:
        places = stray.nonzero()
        if len(places):
            yield Stray(near, int(places[0]) - _start(near))

    def _covered(self, given: list[Given], like: torch.Tensor) -> torch.Tensor:
        """Which bytes of the storage these tensors cover."""
        covered = torch.zeros(len(self._before), dtype=torch.bool, device=like.device)
        for one in given:
            if one.region is not None and one.t.numel() and 0 not in one.region.size:
                _mark(covered, one.region)
        return covered[: len(like)]


def _mark(covered: torch.Tensor, region: Region) -> None:
    width = region.itemsize
    stride = [step * width for step in region.stride]
    part = covered.as_strided((*region.size, width), (*stride, 1), region.offset * width)
    part.fill_(True)  # which does not mind that places of an expanded tensor are one


def _start(one: Given) -> int:
    return one.region.offset * one.region.itemsize if one.region is not None else 0


def _whole(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def elements(t: torch.Tensor) -> torch.Tensor | None:
    """A copy of the bytes of t's elements, or of those of its parts; None if they are unknown."""
    with torch.no_grad():
        parts = parts_of(t.detach())
        if not parts and t.layout not in (torch.strided, torch.jagged):
            parts = [t.detach().to_dense()]  # mkldnn
        if not parts or any(part.device.type == "meta" for part in parts):
            return None
        return torch.cat([_bytes(part) for part in parts])


def _bytes(t: torch.Tensor) -> torch.Tensor:
    plain = t.resolve_conj().resolve_neg()
    return plain.contiguous().clone().view(-1).view(torch.uint8)


def _same(before: torch.Tensor, now: torch.Tensor) -> bool:
    return before.shape == now.shape and torch.equal(before, now)
