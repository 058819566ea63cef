"""What a class of tensors is to us: plain, or a wrapper, and which tensors it wraps.

A wrapper made by ``_make_wrapper_subclass`` has a storage without memory; its values lie in inner
tensors. A class tells which by ``__tensor_flatten__``, torch's protocol for that. Of a class
without it, an attribute with the wrapper's own shape and dtype is taken for an inner tensor.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from .._torch import subclass as _torch_subclass


@dataclass(frozen=True, slots=True)
class Kind:
    """What is known of a class.

    Attributes:
        is_wrapper: whether it has a ``__torch_dispatch__`` of its own.
        is_quiet: whether its ``__torch_function__`` is never asked.
        flattens: whether it tells its inner tensors by ``__tensor_flatten__``.
        counts_itself: whether its own handler keeps the counters, as that of TrackedTensor does.
    """

    is_wrapper: bool
    is_quiet: bool
    flattens: bool
    counts_itself: bool


known: dict[type, Kind] = {}
"""Each class that was looked at."""

known_to_alias: dict[type, set[Any]] = {}
"""Of each of them, the view ops that need no more than the storage of their base.

None of a class that declares its inner tensors, whose counters are to be shared. Of any other, an
op is looked at once for whether it copies."""


def kind_of(cls: type) -> Kind:
    """The kind of a tensor class, looked at once."""
    kind = known.get(cls)
    if kind is None:
        kind = known[cls] = _look_at(cls)
        known_to_alias[cls] = set()
    return kind


def _look_at(cls: Any) -> Kind:
    is_wrapper = cls.__torch_dispatch__ is not torch.Tensor.__torch_dispatch__
    function = cls.__torch_function__
    return Kind(
        is_wrapper=is_wrapper,
        is_quiet=cls in (torch.Tensor, torch.nn.Parameter)
        or function is _torch_subclass.no_torch_function_impl,
        flattens=is_wrapper and hasattr(cls, "__tensor_flatten__"),
        counts_itself=getattr(cls, "counts_itself", False),
    )


def shares_counters(cls: type) -> bool:
    """Whether the inner tensors of views are to be given the counters of those of the base."""
    kind = kind_of(cls)
    return kind.flattens and not kind.counts_itself


def is_wrapper(t: Any) -> bool:
    """Whether t is a tensor of a class with a ``__torch_dispatch__`` of its own."""
    return isinstance(t, torch.Tensor) and kind_of(type(t)).is_wrapper


def parts_of(t: Any) -> list[tuple[str, torch.Tensor]]:
    """The inner tensors that a wrapper declares by ``__tensor_flatten__``, with their names."""
    names = t.__tensor_flatten__()[0]
    return [(name, part) for name in names if isinstance(part := getattr(t, name), torch.Tensor)]


def likely_parts_of(t: torch.Tensor) -> list[tuple[str, torch.Tensor]]:
    """The inner tensors of a wrapper, also of one that does not declare them."""
    cls = type(t)
    if kind_of(cls).flattens:
        return parts_of(t)
    held = vars(t)
    names = _likely_names.get(cls)
    if names is None:
        names = tuple(name for name, value in held.items() if _is_like(value, t))
        if t.numel() > 1:  # in a scalar's wrapper a scale looks like the inner tensor too
            _likely_names[cls] = names
    return [(name, held[name]) for name in names if isinstance(held.get(name), torch.Tensor)]


def _is_like(value: Any, t: torch.Tensor) -> bool:
    return isinstance(value, torch.Tensor) and value.dtype is t.dtype and value.shape == t.shape


_likely_names: dict[type, tuple[str, ...]] = {}
