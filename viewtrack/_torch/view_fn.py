"""A Python view_fn inside a native view, for `mark_as_view`.

Under the rules of the package; tried on torch 2.6.0, 2.9.1, 2.13.0 and 2.14.1.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch

from . import _C, CARRIER, answering, aten, key_set, only_inplace_or_view

_NESTED_VIEW = aten._nested_view_from_buffer.default


class _Carrier(torch.Tensor):
    """Carries a Python view_fn inside a native ViewFunc.

    The ViewFunc of _nested_view_from_buffer keeps the three tensors it was called with and calls
    the op again to replay. Given a carrier, the replay dispatches to the kernel below, which
    applies the carried function; the ViewFunc owns the carrier, so its life is the view's.
    """

    replay: Callable[[torch.Tensor], torch.Tensor]
    __torch_function__ = _C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, replay: Callable[[torch.Tensor], torch.Tensor]) -> _Carrier:
        self: _Carrier = torch.Tensor._make_wrapper_subclass(
            cls, (0,), dtype=torch.int64, _extra_dispatch_keys=key_set(CARRIER)
        )
        self.replay = replay
        return self

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        # Reached where the carrier key is excluded, that is below autograd.
        if func is _NESTED_VIEW:
            return _replay(*args)
        return NotImplemented


def _replay(self: torch.Tensor, carrier: _Carrier, *_: Any) -> torch.Tensor:
    return carrier.replay(self)


_libraries: list[torch.library.Library] = []
_registering = threading.Lock()


def _register_replay() -> None:
    with _registering:
        if not _libraries:
            lib = torch.library.Library("aten", "IMPL")
            lib.impl("_nested_view_from_buffer", _replay, CARRIER)
            _libraries.append(lib)


def as_view_with_fn(
    t: torch.Tensor, base: torch.Tensor, replay: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    """Native ``as_view(base, t)`` with a Python view_fn, and without an Autograd kernel.

    t gets no grad_fn; `take_history` gives it one.
    """
    if not _libraries:
        _register_replay()
    carrier = _Carrier(replay)
    with only_inplace_or_view():
        answering(_NESTED_VIEW, t, _NESTED_VIEW, base, carrier, carrier, carrier)
