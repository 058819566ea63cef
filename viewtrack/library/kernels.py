"""The kernels that every op gets, whoever defined it.

From above to below, with what a native op has in its place:

* Autograd (VariableType): refuses what may not be written, notes the call (`call.py`), moves the
  counters of what was written unless the body's own ops have, and in the end sees to it that each
  output has its history: autograd's own, the user's formula, or one that raises when a gradient
  reaches it, since a silent wrong one is worse;
* ADInplaceOrView (ADInplaceOrViewType): counts and marks where no Autograd kernel does, in
  inference mode and in a handler that has this key on. The Autograd kernel does its work else, and
  skips it, to spare a hop;
* BackendSelect, which is below all handlers and is reached from everywhere: runs the backend's
  kernel in the state of the user's call, and compares what came out with the schema. A raw write
  that a handler issued is counted here, as nobody else would.

A transform of torch.func and the tracing of AOTAutograd look into the body instead, as they do for
a CompositeImplicitAutograd op (`traced.py`).
"""

from __future__ import annotations

import sys
from typing import Any

import torch

from .._torch import library as _torch_library
from ..errors import ViewTrackError
from ..info import version
from ..site import locate
from ..view import share_version
from . import traced
from .call import Call, under_way
from .checks import (
    check_aliases,
    check_overlap,
    check_undeclared_writes,
    count,
    explain_refusal,
    overlaps_itself,
    share_storage,
)
from .formula import is_transformed
from .history import check_writable, recorded_at, settle, wants_gradient
from .inspection import is_raw, note_raw
from .relations import note_inside
from .spec import Spec


class Kernels:
    """The kernels of one op, as ``Library.impl(..., with_keyset=True)`` takes them."""

    def __init__(self, spec: Spec) -> None:
        self.spec = spec

    def autograd(self, keyset: Any, *args: Any, **kwargs: Any) -> Any:
        """Above: refuse, note, redispatch, count, settle."""
        spec = self.spec
        tensors = spec.tensors(args, kwargs)
        needs = wants_gradient(tensors)
        if needs and spec.is_out:
            _refuse_out(spec)
        if traced.looks_through(spec, tensors, args, kwargs, needs):
            return traced.run_body(spec, args, kwargs)
        written = [t for _, t in spec.writes(args, kwargs)]
        if needs and written and torch.is_grad_enabled() and any(t.requires_grad for t in tensors):
            for t in written:
                check_writable(t)
        looks_inside = spec.formula is None and not spec.opaque
        call = Call(spec, tensors, args, kwargs, looks_inside)
        if needs and spec.formula is not None and (not spec.only_views or is_transformed(tensors)):
            return spec.formula.run(call, lambda: _counted(call, keyset, written))
        histories = [recorded_at(t) for t in written] if needs else []
        return settle(call, _counted(call, keyset, written), needs, histories)

    def inplace_or_view(self, keyset: Any, *args: Any, **kwargs: Any) -> Any:
        """In the middle, where no Autograd kernel ran right above: the same without a gradient."""
        spec = self.spec
        tensors = spec.tensors(args, kwargs)
        written = [t for _, t in spec.writes(args, kwargs)]
        call = under_way(spec, tensors, args, kwargs)
        if call is None:
            if traced.looks_through(spec, tensors, args, kwargs, False):
                return traced.run_body(spec, args, kwargs)
            looks_inside = spec.formula is None and not spec.opaque
            call = Call(spec, tensors, args, kwargs, looks_inside)
            return settle(call, _counted(call, keyset, written), False, [])
        # A tracking mode below the Autograd kernel has put this key on again.
        before = [version(t) for t in written]
        with _torch_library.below_inplace_or_view():
            out = spec.op.redispatch(keyset & _torch_library.after_inplace_or_view, *args, **kwargs)
        _share_versions(spec, args, kwargs, out)
        count(written, before)
        return out

    def bottom(self, keyset: Any, *args: Any, **kwargs: Any) -> Any:
        """Below: run the backend's kernel, compare, count what nobody else counts."""
        spec = self.spec
        tensors = spec.tensors(args, kwargs)
        call = under_way(spec, tensors, args, kwargs)
        before = [version(t) for t in tensors]
        written = [t for _, t in spec.writes(args, kwargs)]
        versions = [version(t) for t in written]
        if any(map(overlaps_itself, written)):
            check_overlap(spec, tensors, args, kwargs)
        keyset = keyset & _torch_library.after_backend_select
        if call is not None and call.looks_inside and is_raw(spec, args, kwargs):
            call.looks_inside = False
            call.is_raw = True
        try:
            if call is not None and call.looks_inside:
                out = self._look_inside(call, keyset, before)
            else:
                out = self._run_raw(keyset, args, kwargs)
        except RuntimeError as error:
            explain_refusal(spec, error, args, kwargs)
            raise
        try:
            check_aliases(spec, args, kwargs, out)
            check_undeclared_writes(spec, args, kwargs, before, tensors)
        except ViewTrackError:
            count(written, versions)  # what is refused has been written all the same
            raise
        if call is not None:
            call.note(versions)
            return call.handed_up(out) if call.ran_inside else out
        count_below(spec, args, kwargs, written, versions)
        return out

    def functionalize(self, keyset: Any, *args: Any, **kwargs: Any) -> Any:
        """For compilers: the ATen ops that the body is made of."""
        return traced.functionalize(self.spec, args, kwargs)

    def batched(self, keyset: Any, *args: Any, **kwargs: Any) -> Any:
        """For vmap: the user's rule, or the body."""
        if self.spec.vmap is not None:
            return _torch_library.vmap_by_rule(self.spec.vmap, self.spec.op, args, kwargs)
        traced.check_formula_is_kept(self.spec, self.spec.tensors(args, kwargs))
        return traced.run_body(self.spec, args, kwargs)

    def _look_inside(self, call: Call, keyset: Any, before: list[int | None]) -> Any:
        spec = self.spec
        try:
            return call.run_inside(lambda: self._noted(call, keyset))
        except RuntimeError as error:
            untouched = [version(t) for t in call.tensors] == before
            if "numpy() on Tensor that requires grad" not in str(error) or not untouched:
                raise
            # The kernel is numpy's. Nothing was written yet, so let it run as raw ones do.
            note_raw(spec, call.args, call.kwargs)
            call.looks_inside = False
            call.is_raw = True
            return self._run_raw(keyset, call.args, call.kwargs)

    def _run_raw(self, keyset: Any, args: Any, kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return self.spec.op.redispatch(keyset, *args, **kwargs)
        with torch.no_grad():  # else numpy() refuses what requires grad
            return self.spec.op.redispatch(keyset, *args, **kwargs)

    def _noted(self, call: Call, keyset: Any) -> Any:
        out = self.spec.op.redispatch(keyset, *call.args, **call.kwargs)
        note_inside(call, out)
        return out


def _counted(call: Call, keyset: Any, written: list[torch.Tensor]) -> Any:
    """Redispatch to what is below autograd, and move the counters of what was written."""
    spec, args, kwargs = call.spec, call.args, call.kwargs
    if any(t.is_inference() for t in written) and not torch.is_inference_mode_enabled():
        _refuse_inference_tensor(spec)
    before = [version(t) for t in written]
    with call, _torch_library.below_inplace_or_view():
        if traced.is_opaque_in(spec, call.tensors, args, kwargs):
            out = traced.run_opaque(spec, args, kwargs)
        else:
            out = spec.op.redispatch(keyset & _torch_library.after_inplace_or_view, *args, **kwargs)
    count(written, before)
    return out


def count_below(
    spec: Spec, args: Any, kwargs: Any, written: list[torch.Tensor], before: list[int | None]
) -> None:
    """Count a write that a handler issued, in the frame of a kernel that it reached.

    Unless the handler stands for a native call, whose kernel above will count.
    """
    if written and before == [version(t) for t in written]:
        counted, _, _ = locate(sys._getframe(2), spec.bottom_plan, args, kwargs)
        if not counted:
            count(written, before)


def _share_versions(spec: Spec, args: Any, kwargs: Any, out: Any) -> None:
    for leaf in spec.leaves(out):
        if leaf.index in spec.views and not leaf.t._is_view() and not leaf.t.requires_grad:
            for argument in spec.views[leaf.index].arguments:
                for base in argument.tensors(args, kwargs):
                    if share_storage(leaf.t, base):
                        share_version(leaf.t, base)


def _refuse_inference_tensor(spec: Spec) -> None:
    raise ViewTrackError(
        f"{spec.name}(): Inplace update to inference tensor outside InferenceMode is not allowed; "
        f"make a clone to get a normal tensor before doing inplace update"
    )


def _refuse_out(spec: Spec) -> None:
    raise ViewTrackError(
        f"{spec.name}(): functions with out=... arguments don't support automatic differentiation, "
        f"but one of the arguments requires grad; call it under torch.no_grad()"
    )
