"""What torch reads or writes in a tensor's memory without dispatching an op.

A wrapper has no memory, and C++ code does not ask: it crashes, or gives what lies nowhere. For each
of these methods there is one here that goes to the inner tensor.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch

from .. import _torch
from .._torch import nested
from .counters import share_counter_with_inner

T = TypeVar("T", bound="InnerMemory")

_DATA: Any = vars(_torch.TensorBase)["data"]


class InnerMemory(torch.Tensor):
    """The methods of a tensor that go to memory, for a wrapper around ``_inner``."""

    _inner: torch.Tensor

    def like(self: T, inner: torch.Tensor) -> T:
        """A wrapper such as this one around another inner tensor."""
        raise NotImplementedError

    @property
    def data(self) -> Any:
        """An alias with a counter of its own; what is assigned takes the place of the values."""
        alias = _DATA.__get__(self)
        alias._inner = alias._inner.data
        share_counter_with_inner(alias)
        return alias

    @data.setter
    def data(self, new: Any) -> None:
        if isinstance(new, torch.Tensor) and not isinstance(new, type(self)):
            new = self.like(new)
        _DATA.__set__(self, new)  # refuses what does not fit
        inner = new._inner.data
        self.__dict__.update(without_inner(new))
        self._inner = inner
        share_counter_with_inner(self)

    def values(self) -> torch.Tensor:
        """The values of a sparse tensor, or the buffer of a nested one, as a view."""
        if self._inner.layout is torch.jagged:
            return nested.values_of_jagged(self)
        return super().values()

    def share_memory_(self: T) -> T:
        """Move the inner tensor to shared memory, in place."""
        self._inner.share_memory_()
        return self

    def is_shared(self) -> bool:
        """Whether the inner tensor is in shared memory."""
        return bool(self._inner.is_shared())

    def tolist(self) -> Any:
        """The values as Python numbers, in nested lists."""
        return self._inner.tolist()

    def numpy(self, *, force: bool = False) -> Any:
        """The values as a numpy array that shares the inner tensor's memory, as torch's does."""
        if not force:
            self._check_grad("numpy")
        return self._inner.numpy(force=force)

    def apply_(self: T, callable: Callable[..., Any]) -> T:
        """Apply a Python function to each value in place; as torch's, it moves no counter."""
        self._check_grad("apply_", callable)
        self._inner.apply_(callable)
        return self

    def map_(self: T, tensor: torch.Tensor, callable: Callable[..., Any]) -> T:
        """Apply a Python function of two values in place; as torch's, it moves no counter."""
        self._check_grad("map_", tensor, callable)
        self._inner.map_(_memory_of(tensor), callable)
        return self

    def __dlpack__(self, *args: Any, **kwargs: Any) -> Any:
        self._check_grad("__dlpack__")
        return self._inner.__dlpack__(*args, **kwargs)

    def __dlpack_device__(self) -> Any:
        return self._inner.__dlpack_device__()

    def __format__(self, format_spec: str) -> str:
        if self.dim() == 0:
            return format(self._inner, format_spec)
        return object.__format__(self, format_spec)

    def _check_grad(self, method: str, *args: Any) -> None:
        """Raise torch's own error where it refuses a tensor that requires grad."""
        if self.requires_grad:
            getattr(torch.ones(1, requires_grad=True), method)(*args)


def without_inner(t: Any) -> dict[str, Any]:
    """What a subclass or a user has put on the wrapper."""
    return {key: value for key, value in t.__dict__.items() if key != "_inner"}


def _memory_of(t: torch.Tensor) -> torch.Tensor:
    return _memory_of(t._inner) if isinstance(t, InnerMemory) else t
