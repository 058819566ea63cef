"""`mark_as_view` and what can be asked of a view.

`mark_as_view` is the Python face of C++ ``as_view`` (VariableTypeUtils.h). It has the native
kernels mark a tensor that we choose; `_torch` tells how. Two things are done around that:

* as_strided alone cannot express a view of another dtype, or with another conj or neg bit, so such
  views are marked as as_strided of a native view that has them (`_relative`);
* a view_fn is captured by a native ViewFunc (`view_fn.py`).
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from . import _torch
from ._torch import (
    AUTOGRAD,
    CreationMeta,
    as_view_strided,
    is_excluded,
    torch_function_modes,
)
from ._torch.dynamo import break_graph
from .aliasing import brief, shares_storage
from .errors import AutogradMetadataError, ViewTrackError
from .markable import (
    check_memory,
    check_metadata,
    check_tensors,
    checked_creation_meta,
    metadata_message,
    native,
    propagated,
    refined,
)
from .nested import fn_for_nested, set_storage_of
from .view_fn import WITHOUT_HISTORY, Replay, ViewFn, mark_with_fn

_STRIDED = torch.strided
_DEFAULT = CreationMeta.DEFAULT
# Both leave __torch_function__ to torch.
_PLAIN_TYPES = (torch.Tensor, torch.nn.Parameter)


@dataclass(frozen=True, slots=True)
class Mark:
    """What native metadata does not tell about a tensor that we marked."""

    base: weakref.ref[torch.Tensor]
    is_bw_differentiable: bool
    is_fw_differentiable: bool
    view_fn: ViewFn | None


marks: Any = WeakTensorKeyDictionary()


@break_graph
def mark_as_view(
    t: torch.Tensor,
    base: torch.Tensor,
    is_bw_differentiable: bool = True,
    is_fw_differentiable: bool = True,
    view_fn: ViewFn | None = None,
    creation_meta: Any = CreationMeta.DEFAULT,
    *,
    alias_storage: bool = False,
) -> torch.Tensor:
    """Make `t` a view of `base` for autograd, in place, as C++ ``as_view`` does.

    Works above and below autograd (in a ``__torch_dispatch__`` handler, in a custom op's kernel).
    From then on `t` shares `base`'s version counter; with a differentiable flag it is also a view:
    in-place ops on either reach the gradients (or tangents) of the other.

    Semantics: NOTE [ Autograd View Variables ] and NOTE [ View + Inplace detection ] in
    torch/csrc/autograd/variable.h, ``as_view`` in VariableTypeUtils.h, RFC-0007 for forward mode,
    pytorch issue 96319 for the signature.

    Args:
        t: a tensor of any shape and dtype without autograd metadata, that shares storage with
            `base` (as an alias made below autograd, by ``detach()`` or by ``set_()`` does). Mark it
            before views of it are taken: those that it has already stay views of `t` alone, with
            the counter it had.
        base: the tensor that `t` views. If it is a view itself, `t` becomes a view of its base,
            and inherits its creation_meta unless another one is given.
        is_bw_differentiable: whether gradients flow between the two.
        is_fw_differentiable: whether tangents flow between the two. With `is_bw_differentiable`
            False, which no native op has, this reaches as far as one forward-AD level: inside
            ``dual_level()`` the two get tangents that alias (`base` a zero one where it had none),
            so tangents flow both ways by in-place ops; a tangent that appears on one of them in
            another level does not reach the other.
        view_fn: makes the view from a base of the same shape: ``view_fn(base)`` must alias its
            argument and have t's shape and dtype. The native engine replays it after in-place ops
            on `base` or on `t`, and in ``t._view_func``; its own autograd counts. Without it, the
            engine replays by as_strided of t's geometry, or by the nested view of base's memory
            that `t` is. It lives as long as the view does, and must not refer to `t`.
        creation_meta: why in-place ops on `t` are to be refused, if they are. Under NO_GRAD_MODE
            and INFERENCE_MODE `t` has no grad_fn, as native views made in those modes. As in C++,
            the grad mode in which this is called does not count.
        alias_storage: point t's storage at base's first (sizes, strides and offset are kept), for
            wrapper subclasses and copies that do not share memory yet.

    Returns:
        `t`, the same object. If `base` is an inference tensor, `t` is left as it is, as native
        does; if both flags are False, `t` shares the counter and gets no other metadata.

    Raises:
        AutogradMetadataError: `t` already carries autograd metadata.
        AliasingError: `t` and `base` do not share storage, or `t` does not fit into it.
        ViewTrackError: `t` is `base`, or autograd has no way from `base` to `t` without a view_fn.
        ValueError: a creation_meta on a view that is not backward differentiable.
        TypeError: an argument of the wrong type.
    """
    if (
        view_fn is None
        and creation_meta is _DEFAULT
        and is_bw_differentiable
        and is_fw_differentiable
        and not alias_storage
        and _is_plain(t, base)
        and _mark_plain(t, base)
    ):
        return t
    check_tensors(t, base)
    if base.is_inference():
        return t
    if view_fn is not None and not callable(view_fn):
        raise TypeError(f"mark_as_view: `view_fn` must be callable, got {type(view_fn).__name__}")
    creation_meta = checked_creation_meta(creation_meta, is_bw_differentiable)
    check_metadata(t, base)
    check_memory(t, base, alias_storage)
    if view_fn is None and is_bw_differentiable:
        view_fn = fn_for_nested(t, base)
    # Marking never looks at storage, so that comes last: whatever raises before left t as it was.
    if is_bw_differentiable and is_fw_differentiable and view_fn is None:
        _mark_strided(t, base, creation_meta)
    else:
        _mark_other(t, base, is_bw_differentiable, is_fw_differentiable, view_fn, creation_meta)
    if alias_storage and not shares_storage(t, base):
        set_storage_of(t, base)
    return t


@break_graph
def share_version(t: torch.Tensor, base: torch.Tensor) -> torch.Tensor:
    """Let `t` share `base`'s version counter and nothing else: a non-differentiable view.

    The same as `mark_as_view` with both flags False (C++: make_variable_non_differentiable_view).

    Args:
        t: a tensor of any shape and dtype without autograd metadata, in base's storage.
        base: the tensor whose counter `t` is to share.

    Returns:
        `t`, the same object.

    Raises:
        ViewTrackError: as `mark_as_view` does.
    """
    return mark_as_view(t, base, False, False)


# ------------------------------------------------------------------------------ marking


def _is_plain(t: torch.Tensor, base: torch.Tensor) -> bool:
    """Whether t passes all checks but the native one for metadata, and as_strided expresses it.

    True of most calls. A False only means the long way round, where errors are raised.
    """
    try:
        return (
            type(t) is Tensor
            and type(base) in _PLAIN_TYPES
            and t is not base
            and base._base is not t
            and t.dtype is base.dtype
            and base.layout is _STRIDED
            and not (t.is_conj() or t.is_neg() or base.is_conj() or base.is_neg())
            and not (t.is_inference() or base.is_inference())
            and (storage := t.untyped_storage()) is base.untyped_storage()
            and (t.storage_offset() + t.numel()) * t.itemsize <= storage.nbytes()
            and not torch_function_modes()
        )
    except (RuntimeError, NotImplementedError):  # no storage of its own: sparse, nested
        return False


def _mark_plain(t: torch.Tensor, base: torch.Tensor) -> bool:
    """Mark t, unless one of the two turns out to be nested."""
    below = is_excluded(AUTOGRAD)  # as inference mode is, too
    if not torch.is_grad_enabled() or (below and torch.is_inference_mode_enabled()):
        if t.is_nested or base.is_nested:
            return False
        _mark_strided(t, base, _DEFAULT)
        return True
    try:
        if below:
            with _torch.above_autograd():
                as_view_strided(t, base)
        else:
            as_view_strided(t, base)
    except RuntimeError as error:
        if t.is_nested or base.is_nested:
            return False
        raise refined(error, t) from None
    return True


def _mark_strided(t: torch.Tensor, base: torch.Tensor, creation_meta: Any) -> None:
    plain = (
        t.dtype is base.dtype
        and t.layout is base.layout is torch.strided
        and t.is_conj() == base.is_conj()
        and t.is_neg() == base.is_neg()
    )
    history = creation_meta not in WITHOUT_HISTORY
    with _torch.above_autograd(), _torch.no_torch_function(), torch.set_grad_enabled(history):
        relative = base if plain else _relative(t, base)
        final = propagated(base, creation_meta)
        native(as_view_strided, t, relative)
        if _torch.creation_meta(t) is not final:
            _torch.set_creation_meta(t, final)


def _mark_other(
    t: torch.Tensor,
    base: torch.Tensor,
    is_bw: bool,
    is_fw: bool,
    view_fn: ViewFn | None,
    creation_meta: Any,
) -> None:
    with _torch.no_torch_function():
        if not is_bw:
            _mark_without_backward(t, base, is_fw)
        else:
            with _torch.above_autograd(), torch.enable_grad():
                # as_view finds no forward view of _fw_primal's result at base, and makes none.
                relative = base if is_fw else _torch.fw_primal(base)
            if view_fn is None:
                _mark_strided(t, relative, creation_meta)
            else:
                mark_with_fn(t, relative, Replay(view_fn, t, base), creation_meta)
    marks[t] = Mark(weakref.ref(base), is_bw, is_fw, view_fn)


def _mark_without_backward(t: torch.Tensor, base: torch.Tensor, is_fw: bool) -> None:
    # Native takes a tensor with metadata here, and drops it.
    if t.grad is not None or _torch.tangent(t) is not None:
        raise AutogradMetadataError(metadata_message(t))
    tangents = _aliased_tangents(t, base) if is_fw and _torch.forward_ad_level() >= 0 else None
    _torch.as_view_version_only(t, base)
    if tangents is not None:
        base_tangent, tangent = tangents
        if base_tangent is not None:
            _torch.set_tangent(base, base_tangent)
        _torch.set_tangent(t, tangent)


def _aliased_tangents(
    t: torch.Tensor, base: torch.Tensor
) -> tuple[torch.Tensor | None, torch.Tensor]:
    """A tangent for base where it has none, and one for t that lies in base's."""
    with _torch.above_autograd(), torch.no_grad():
        have = _torch.tangent(base)
        tangent = have if have is not None else torch.zeros_like(base)
        offset = tangent.storage_offset() + t.storage_offset() - base.storage_offset()
        return tangent if have is None else None, tangent.as_strided(t.size(), t.stride(), offset)


def _relative(t: torch.Tensor, base: torch.Tensor) -> torch.Tensor:
    """A native view of base with t's dtype, conj bit and neg bit."""
    if t.layout is not torch.strided or base.layout is not torch.strided:
        raise ViewTrackError(
            f"mark_as_view: autograd has no way from `base` ({base.layout}) to `t` ({t.layout}) by "
            f"itself; give a view_fn, or pass is_bw_differentiable=False, "
            f"is_fw_differentiable=False to share the version counter only"
        )
    view = base
    if t.dtype is not base.dtype:
        if base.is_complex() and t.dtype is base.dtype.to_real():
            view = torch.view_as_real(base.conj() if base.is_conj() else base)
        elif t.is_complex() and base.dtype is t.dtype.to_real():
            pairs = (*t.size(), 2), (*(2 * n for n in t.stride()), 1), 2 * t.storage_offset()
            view = torch.view_as_complex(base.as_strided(*pairs))
        else:
            raise ViewTrackError(
                f"mark_as_view: `t` ({brief(t)}) reads the bytes of `base` ({brief(base)}) as "
                f"another dtype, and no gradient flows through that; pass "
                f"is_bw_differentiable=False, is_fw_differentiable=False, as native does for "
                f"`view(dtype)`, or give a view_fn"
            )
    if t.is_conj() != view.is_conj():
        view = view.conj()
    if t.is_neg() != view.is_neg():
        view = _torch.neg_view(view)
    return view
