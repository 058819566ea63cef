"""Private torch that wrapper subclasses need; a part of the one room for it.

Tried on torch 2.6.0, 2.9.1, 2.13.0 and 2.14.1.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch._ops import OpOverload

from . import key_set, mode_stack_len
from .guard import no_torch_dispatch

_C: Any = torch._C

make_wrapper: Callable[..., Any] = torch.Tensor._make_wrapper_subclass
"""A tensor of a subclass with sizes, strides and a storage of its own, but no memory."""

no_torch_function_impl: Any = _C._disabled_torch_function_impl
"""The __torch_function__ of a class that wants none."""

is_torch_function_enabled: Callable[[], bool] = _C._is_torch_function_enabled
"""Whether __torch_function__ of subclasses is asked here."""

point_storage: Callable[[torch.Tensor, torch.Tensor], None] = torch._functionalize_unsafe_set
"""Point a tensor's storage at another's; sizes, strides and offset stay."""

increment_version: Callable[[tuple[torch.Tensor, ...]], None] = _C._increment_version
"""Move version counters by one; `torch.autograd.graph.increment_version` looks at types first."""

_BITS = key_set("Conjugate", "Negative", "ZeroTensor")
_BITS_AND_VIEWS = _BITS | key_set("ADInplaceOrView")


def as_below_autograd(inplace_or_view: bool) -> AbstractContextManager[None]:
    """Dispatch inside as a native kernel does that an Autograd kernel has called.

    A handler has the keys of conj and neg bits and of zero tensors excluded as well, so kernels
    that conjugate something inside (``linalg_pinv``) read it as it lies in memory.

    Args:
        inplace_or_view: whether ADInplaceOrView kernels are to run too.
    """
    exclude = _C._dispatch_tls_local_exclude_set()
    guard: AbstractContextManager[None] = _C._ForceDispatchKeyGuard(
        _C._dispatch_tls_local_include_set(),
        exclude - (_BITS_AND_VIEWS if inplace_or_view else _BITS),
    )
    return guard


def set_conj_and_neg(t: torch.Tensor, like: torch.Tensor) -> None:
    """Give the wrapper t the conj and neg bits of `like`, for the kernels above Python to see."""
    _C._set_conj(t, like.is_conj())
    _C._set_neg(t, like.is_neg())


def active_modes() -> list[Any]:
    """The user modes on this thread's stack, the lowest first."""
    return [_C._get_dispatch_stack_at(i) for i in range(mode_stack_len())]


def asks_handler_for_sizes(t: torch.Tensor) -> bool:
    """Whether t is a FunctionalTensor, which has its sizes from the tensor inside."""
    module = sys.modules.get("torch._subclasses.functional_tensor")
    return module is not None and isinstance(t, module.FunctionalTensor)


def run_metadata_op(func: OpOverload, args: Any, kwargs: Any) -> None:
    """Run an op that changes sizes, strides or storage on wrappers themselves.

    Relies on the Meta kernels of such ops (``resize_``, ``set_``, ``t_``), which touch no memory,
    as ``return_and_correct_aliasing`` does.
    """
    was = _C._meta_in_tls_dispatch_include()
    with no_torch_dispatch():
        _C._set_meta_in_tls_dispatch_include(True)
        try:
            func(*args, **kwargs)
        finally:
            _C._set_meta_in_tls_dispatch_include(was)


def grow_storage(t: torch.Tensor, numel: int) -> None:
    """Give the wrapper t, and its base, a storage of at least so many elements after its offset.

    The Meta kernels would move a storage that grows to the meta device, and then no view could be
    made of t any more.
    """
    needed = (t.storage_offset() + numel) * t.element_size()
    if needed > t.untyped_storage().nbytes():
        blank = make_wrapper(type(t), (0,), dtype=t.dtype, device=t.device, storage_size=needed)
        point_storage(t, blank)
        if t._base is not None:
            point_storage(t._base, blank)
