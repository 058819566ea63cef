"""The record of a tensor that somebody keeps, as a report tells it."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .site import AtSite, Site


@dataclass(frozen=True, slots=True)
class Saved(AtSite):
    """Where a kept tensor comes from.

    Attributes:
        op: the op that made it, ``aten.mm.default``, or the label that it was saved under.
        dtype: its dtype.
        shape: its shape.
        site: the line that saved it.
    """

    op: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    site: Site
