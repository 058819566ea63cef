"""Whether a tensor may be marked as a view of another: what is refused, by us and by native."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from . import _torch
from ._torch import CreationMeta
from .aliasing import (
    brief,
    check_can_alias,
    check_fits,
    check_storage,
    has_storage,
    shares_storage,
)
from .errors import AutogradMetadataError, ViewTrackError


def check_tensors(t: object, base: object) -> None:
    """Refuse what is no tensor at all."""
    for name, value in (("t", t), ("base", base)):
        if not isinstance(value, torch.Tensor):
            raise TypeError(
                f"mark_as_view: `{name}` must be a torch.Tensor, got {type(value).__name__}"
            )


def checked_creation_meta(creation_meta: Any, is_bw_differentiable: bool) -> Any:
    """The creation_meta as the member that `is` finds; refuses what native refuses."""
    if not isinstance(creation_meta, CreationMeta):
        raise TypeError(
            f"mark_as_view: `creation_meta` must be a viewtrack.CreationMeta, "
            f"got {type(creation_meta).__name__}"
        )
    creation_meta = _torch.canonical(creation_meta)
    if creation_meta is not CreationMeta.DEFAULT and not is_bw_differentiable:
        raise ValueError(
            "mark_as_view: a view that is not backward differentiable must have "
            "creation_meta=CreationMeta.DEFAULT"
        )
    return creation_meta


def check_metadata(t: torch.Tensor, base: torch.Tensor) -> None:
    """Refuse a `t` that is `base`, has no counter, or that autograd or torch.func knows already."""
    if _torch.is_functorch_wrapped(t) or _torch.is_functorch_wrapped(base):
        raise ViewTrackError(
            "mark_as_view: inside a torch.func transform tensors are wrappers, whose views the "
            "transform keeps track of itself; mark outside of it, or give the op a rule of its own"
        )
    if t is base:
        raise ViewTrackError(
            "mark_as_view: `t` is `base`; a tensor cannot be a view of itself, "
            "pass another alias, for instance `base.detach()`"
        )
    if base._base is t:
        raise ViewTrackError(
            "mark_as_view: `base` is a view of `t`, and a tensor cannot be a view of its own view; "
            "mark `base` as a view of `t`, or both as views of a third tensor"
        )
    if t.is_inference():
        raise ViewTrackError(
            "mark_as_view: `t` is an inference tensor and has no version counter to share; "
            "make it outside torch.inference_mode()"
        )
    if t.requires_grad or t._is_view() or t.grad_fn is not None or t._backward_hooks:
        raise AutogradMetadataError(metadata_message(t))


def check_memory(t: torch.Tensor, base: torch.Tensor, alias_storage: bool) -> None:
    """Refuse a `t` outside of base's storage, or one that would not fit into it."""
    if not alias_storage:
        check_storage(t, base)
        if has_storage(t):
            check_fits(t, t.untyped_storage())
    elif not shares_storage(t, base):
        check_can_alias(t, base)
        check_fits(t, base.untyped_storage())


def metadata_message(t: torch.Tensor) -> str:
    """What autograd metadata t carries, and what to do about it."""
    if t._is_view():  # grad_fn is not read: on a stale view that may raise
        has = "is a view already"
    elif t.requires_grad:
        has = f"requires grad ({f'grad_fn {t.grad_fn.name()}' if t.grad_fn else 'a leaf'})"
    elif t.grad is not None:
        has = "has a `.grad`"
    elif t._backward_hooks:
        has = "has hooks"
    elif _torch.tangent(t) is not None:
        has = "has a tangent"
    else:
        has = "once required grad, or was detached in place"
    return (
        f"mark_as_view: `t` ({brief(t)}) already carries autograd metadata: it {has}; "
        f"pass `t.detach()`, or mark it before autograd sees it"
    )


def native(mark: Callable[..., None], t: torch.Tensor, *args: Any) -> None:
    """Run a native marking of t, with native's refusal in our words."""
    try:
        mark(t, *args)
    except RuntimeError as error:
        raise refined(error, t) from None


def refined(error: RuntimeError, t: torch.Tensor) -> RuntimeError:
    """The error to raise for one of native's."""
    if "autograd metadata" in str(error):
        return AutogradMetadataError(metadata_message(t))
    return error


def propagated(base: torch.Tensor, creation_meta: Any) -> Any:
    """Mirrors ``propagate_creation_meta`` of variable.h."""
    inherited = _torch.creation_meta(base)
    keeps = creation_meta is CreationMeta.DEFAULT or inherited is CreationMeta.INFERENCE_MODE
    return inherited if keeps else creation_meta
