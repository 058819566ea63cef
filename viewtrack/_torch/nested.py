"""Nested tensors of layout strided: private torch that tells where their parts lie.

Under the rules of the package; tried on torch 2.6.0, 2.9.1, 2.13.0, 2.14.1 and 2.15.0.
"""

from __future__ import annotations

from typing import Any

import torch

from . import key_set

KEYS = key_set("NestedTensor", "AutogradNestedTensor")
"""What makes autograd choose the formulas of nested tensors, as a jagged one has it."""

values_of_jagged = torch._nested_get_values
"""The buffer of a jagged nested tensor, as a view; ``values`` itself has a formula for strided."""

Geometry = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def is_strided_nested(t: torch.Tensor) -> bool:
    """Whether t is a nested tensor of C++, which has no sizes and strides of its own."""
    return t.is_nested and t.layout is torch.strided


def geometry(t: torch.Tensor) -> Geometry:
    """Sizes and strides of the parts of a nested tensor, a row for each, and their offsets.

    Relies on the offsets being counted from the start of the storage.
    """
    return (
        t._nested_tensor_size(),
        t._nested_tensor_strides(),
        t._nested_tensor_storage_offsets(),
    )


def places(t: torch.Tensor) -> list[tuple[list[int], list[int], int]]:
    """The size, stride and offset of each part of a nested tensor."""
    sizes, strides, offsets = geometry(t)
    return list(zip(sizes.tolist(), strides.tolist(), offsets.tolist(), strict=True))


def view_of_buffer(buffer: torch.Tensor, where: Geometry) -> torch.Tensor:
    """The nested tensor in a flat buffer that begins where its storage does, as a native view.

    Relies on the NestedViewFromBuffer formula for its gradient.
    """
    nested: Any = torch._nested_view_from_buffer
    view: torch.Tensor = nested(buffer, *where)
    return view
