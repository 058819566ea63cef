"""Private torch: which kernels the dispatcher has for an op.

A part of the one room that touches private torch; tried on torch 2.6.0, 2.9.1, 2.13.0 and 2.14.1.
Ops are named as the dispatcher names them, ``"aten::add_.Tensor"``.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

_has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key

_AUTOGRAD_KEYS = (
    "Autograd",
    *(
        f"Autograd{backend}"
        for backend in (
            "CPU",
            "CUDA",
            "Functionality",
            "HPU",
            "IPU",
            "Lazy",
            "MPS",
            "MTIA",
            "Meta",
            "NestedTensor",
            "Other",
            "PrivateUse1",
            "XLA",
            "XPU",
        )
    ),
)


def _has(name: str, key: str) -> bool:
    try:
        return bool(_has_kernel(name, key))
    except RuntimeError:  # an op that the dispatcher query does not know (prim::device)
        return False


def has_native_kernel(name: str) -> bool:
    """Whether the op has an ADInplaceOrView kernel; False if the dispatcher does not know it."""
    return _has(name, "ADInplaceOrView")


def has_composite_kernel(name: str) -> bool:
    """Whether the op is CompositeImplicitAutograd: made of other ops, also for autograd."""
    return _has(name, "CompositeImplicitAutograd")


def has_autograd_kernel(name: str) -> bool:
    """Whether the op has an Autograd kernel of any backend; without one its kernel is recorded."""
    return any(_has(name, key) for key in _AUTOGRAD_KEYS)


def is_made_of_other_ops(name: str) -> bool:
    """Whether the op's kernel calls other ops, below autograd.

    One kernel for all backends does. Of the backends' own, those of `linalg_lstsq` and its like do.
    """
    if "::linalg_" in name or "::_linalg_" in name:
        return True
    explicit = _has(name, "CompositeExplicitAutograd") or _has(
        name, "CompositeExplicitAutogradNonFunctional"
    )
    return explicit and not _has(name, "CPU")


def composite_kernel(op: Any) -> Callable[..., Any]:
    """The CompositeImplicitAutograd kernel of an OpOverload, whatever other kernels it has.

    ``op.decompose`` may run a Python decomposition in its place.
    """
    return functools.partial(op._op_dk, torch._C.DispatchKey.CompositeImplicitAutograd)
