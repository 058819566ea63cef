"""`correct_aliasing`: the last line of any ``__torch_dispatch__`` handler.

One step function per kind of op, chosen once from the op's plan. It does what
``torch.utils._python_dispatch.return_and_correct_aliasing`` does, and in addition keeps inner
counters, mends what native kernels refuse, updates the sizes of an out= argument, and answers a
mistake with an error that names it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch

from .. import _torch
from .._torch import subclass as _torch_subclass
from ..aliasing import shares_or_unknown
from ..errors import ViewTrackError
from ..plan import Argument, Output, Plan, plan_of
from ..site import caller, locate
from . import kinds
from .copies import refuse_copies
from .counters import (
    RESIZES,
    count_inner_write,
    counted_above,
    counted_natively,
    increment,
    moves_counters_itself,
    share_inner_counters,
)
from .kinds import is_wrapper, kind_of, parts_of, shares_counters
from .mend import fresh_alias, is_any, needs_mending, normal_alias
from .metadata import change_metadata, follow_resize
from .once import is_counted_below, leave_note

Step = Callable[[Plan, Any, Any, Any, Any], Any]

_kinds, _known_to_alias = kinds.known, kinds.known_to_alias
_point_storage = _torch_subclass.point_storage
_is_inference_mode_enabled = torch.is_inference_mode_enabled
_no_torch_function = _torch.no_torch_function
_is_torch_function_enabled = _torch_subclass.is_torch_function_enabled


def correct_aliasing(func: Any, args: Any, kwargs: Any, out: Any) -> Any:
    """Make what a ``__torch_dispatch__`` handler returns tell the truth about memory.

    Call it last: ``return viewtrack.correct_aliasing(func, args, kwargs, out)``, in the handler of
    a wrapper subclass or of a mode. From the schema of `func`:

    * outputs that view arguments get the storage of their base, lists of outputs too, and the inner
      tensors of a wrapper that declares them (``__tensor_flatten__``) share the counters of the
      base's inner tensors;
    * outputs that are written arguments become those very arguments; a wrapper among them whose
      sizes, strides or storage the op changed is changed too; its inner tensors' counters move, and
      its own where no native kernel above moves it (``_foreach_*``, custom ops);
    * an output with autograd metadata that the native kernel above would refuse, or silently
      overwrite (it requires grad, is a view handed out before, or is the handler's own input) is
      replaced by a fresh alias of it.

    Semantics: the alias annotations of the op's schema; NOTE [ Autograd View Variables ] in
    torch/csrc/autograd/variable.h; ``return_and_correct_aliasing``, which this replaces.

    Args:
        func: the OpOverload that the handler was called for. Higher-order ops go through.
        args: its positional arguments, as the handler was given them.
        kwargs: its keyword arguments, or None.
        out: what the handler is about to return.

    Returns:
        What the handler is to return.

    Raises:
        AliasingError: real tensors of which the schema says that they share memory do not.
        AutogradMetadataError: an output carries metadata and no fresh alias of it can be made.
        ViewTrackError: `out` does not have the outputs that the schema promises.
    """
    try:
        op = func._op
        step, plan = _steps[op]
        if step is _view_of_first:
            # The commonest view, settled here: a call of the step would cost a tenth of the whole.
            base, cls = args[0], type(out)
            if (
                op in _known_to_alias[cls]
                and type(base) is cls
                and out is not base
                and not _is_inference_mode_enabled()
            ):
                with _no_torch_function():  # being asked for a __torch_function__ costs as much
                    if not out.requires_grad and out._base is None:
                        _point_storage(out, base)
                        return out
    except (KeyError, IndexError):
        step, plan = _look_up(func, out)
    except AttributeError:  # a higher-order operator
        return out
    return step(plan, func, args, kwargs, out)


def _look_up(func: Any, out: Any) -> tuple[Step, Plan]:
    if isinstance(out, torch.Tensor):
        kind_of(type(out))
    if func._op not in _steps:
        _steps[func._op] = _choose(func)
    return _steps[func._op]


# ------------------------------------------------------------------------------ functional ops


def _functional(plan: Plan, func: Any, args: Any, kwargs: Any, out: Any) -> Any:
    kind = _kinds.get(type(out))
    if kind is None or not (kind.is_quiet or not _is_torch_function_enabled()):
        return _looked_at(plan, args, out)
    for a in args:
        if a is out:
            return _looked_at(plan, args, out)
    return _looked_at(plan, args, out) if out.requires_grad or out._is_view() else out


def _looked_at(plan: Plan, args: Any, out: Any) -> Any:
    if isinstance(out, torch.Tensor):
        return fresh_alias(out, plan, args) if needs_mending(out, args) else out
    if isinstance(out, (list, tuple)):
        return _mapped(out, lambda t: _looked_at(plan, args, t))
    return out


def _untouched(plan: Plan, func: Any, args: Any, kwargs: Any, out: Any) -> Any:
    """Ops of which nothing is known beforehand; their outputs may lie in their arguments."""
    wrappers = [t for a in plan.arguments for t in a.tensors(args, kwargs) if is_wrapper(t)]
    outs = out if isinstance(out, (list, tuple)) else (out,)
    for t in outs if wrappers else ():
        if is_wrapper(t) and kind_of(type(t)).flattens and not is_any(t, wrappers):
            base = next((w for w in wrappers if type(w) is type(t) and _inner_alias(t, w)), None)
            if base is not None:
                _point_storage(t, base)
    return out


def _mapped(out: Any, change: Callable[[Any], Any]) -> Any:
    """The same list or tuple if nothing in it changes."""
    changed = [change(t) for t in out]
    if all(new is old for new, old in zip(changed, out, strict=True)):
        return out
    return type(out)(changed)


# ------------------------------------------------------------------------------ view ops


def _view_of_first(plan: Plan, func: Any, args: Any, kwargs: Any, out: Any) -> Any:
    """One output that views the first argument, as nearly all view ops have."""
    base: Any = args[0] if args else None
    kind = _kinds.get(type(out))
    if (
        kind is None
        or not (kind.flattens and not kind.counts_itself)
        or type(base) is not type(out)
        or out is base
        or _is_inference_mode_enabled()
    ):
        new = _view(plan, func, args, kwargs, out)
        if kind is not None and kind.is_wrapper and not kind.flattens and type(base) is type(out):
            _known_to_alias[type(out)].add(func._op)
        return new
    with _no_torch_function():
        is_fresh = not out.requires_grad and out._base is None
        if is_fresh:
            _point_storage(out, base)
    if not is_fresh:
        return _view(plan, func, args, kwargs, out)
    if counted_natively() or not share_inner_counters(out, base):
        refuse_copies(plan, plan.views[0], [base], out)
    return out


def _view(plan: Plan, func: Any, args: Any, kwargs: Any, out: Any) -> Any:
    outs = _outputs(plan, out)
    for output in plan.views:
        bases = [t for a in output.arguments for t in a.tensors(args, kwargs)]

        def corrected(t: Any, output: Output = output, bases: Any = bases) -> Any:
            return _corrected_view(plan, output, bases, args, t)

        value = outs[output.index]
        if not output.is_list:
            new = corrected(value)
        elif isinstance(value, (list, tuple)):
            new = _mapped(value, corrected)
        else:
            raise ViewTrackError(_unexpected(plan, output.index, value, "a list of tensors"))
        if new is not value:
            outs = type(outs)(new if i == output.index else v for i, v in enumerate(outs))
    return outs if plan.returns > 1 else outs[0]


def _corrected_view(plan: Plan, output: Output, bases: list[Any], args: Any, t: Any) -> Any:
    if t is None or not bases:
        return t
    if not isinstance(t, torch.Tensor):
        raise ViewTrackError(_unexpected(plan, output.index, t, "a tensor"))
    if needs_mending(t, args):
        t = fresh_alias(t, plan, args)
    base = bases[0]
    if torch.is_inference_mode_enabled() and is_wrapper(t) and not base.is_inference():
        t = normal_alias(t, plan, args)
    if not is_wrapper(t):
        refuse_copies(plan, output, bases, t)
    elif t.device == base.device:
        _point_storage(t, base)
        shares = type(t) is type(base) and shares_counters(type(t)) and not counted_natively()
        if not (shares and share_inner_counters(t, base)):
            refuse_copies(plan, output, bases, t)
    return t


def _perhaps_view(plan: Plan, func: Any, args: Any, kwargs: Any, out: Any) -> Any:
    """A composite op, whose ``Tensor(a)`` says only that it may be a view: reshape, contiguous.

    Below autograd or in inference mode it reaches handlers whole, and nothing above marks it.
    """
    outs = _outputs(plan, out)
    for output in plan.views:
        bases = [t for a in output.arguments for t in a.tensors(args, kwargs)]
        value = outs[output.index]
        for t in value if isinstance(value, (list, tuple)) else (value,):
            new = is_wrapper(t) and bases and not any(t is b for b in bases)
            if new and t.device == bases[0].device and _inner_alias(t, bases[0]):
                _point_storage(t, bases[0])
    return out


def _inner_alias(t: Any, base: Any) -> bool:
    """Whether inner tensors of both share storage; True where that cannot be told."""
    if type(t) is not type(base) or not kind_of(type(t)).flattens:
        return True
    parts = dict(parts_of(base))
    return any(name in parts and shares_or_unknown(p, parts[name]) for name, p in parts_of(t))


# ------------------------------------------------------------------------------ write ops


def _write_to_first(plan: Plan, func: Any, args: Any, kwargs: Any, out: Any) -> Any:
    """A counted in-place op that writes and returns its first argument."""
    if not args:
        return _write(plan, func, args, kwargs, out)
    arg = args[0]
    kind = kind_of(type(arg))
    if kind.counts_itself:
        follow_resize(arg, out)  # addbmm_ grows its argument, for one
    elif kind.is_wrapper:
        count_inner_write(arg)
    return arg


def _write(plan: Plan, func: Any, args: Any, kwargs: Any, out: Any) -> Any:
    written = _wrappers(plan.writes, args, kwargs)
    if written and plan.changes_metadata:
        size = written[0].size()
        change_metadata(func, args, kwargs, written[0])
        if plan.qualified in RESIZES and written[0].size() == size:
            return written[0]
    _count(plan, args, kwargs)
    if not plan.returns:
        return None  # foreach ops; a handler easily returns the list that it was given
    if not plan.written and not plan.views:
        return out
    outs = _outputs(plan, out)
    return _with_arguments(plan, args, kwargs, outs)


def _count(plan: Plan, args: Any, kwargs: Any) -> None:
    """Move the counters of written wrappers' inner tensors, and any that no kernel will."""
    for t in _wrappers(counted_above(plan), args, kwargs):
        count_inner_write(t)
    if not moves_counters_itself(plan) or is_counted_below(plan, args, kwargs):
        return
    above = locate(sys._getframe(1), plan, args, kwargs)[0]
    plain_too = not (
        plan.is_collective or counted_natively() or _is_run_counted(plan, args, kwargs)
    )
    for t in plan.tensors_written(args, kwargs):
        if is_wrapper(t):
            count_inner_write(t)
        if not above and (not kind_of(type(t)).counts_itself if is_wrapper(t) else plain_too):
            increment(t)
    leave_note(plan, args, kwargs)


def _is_run_counted(plan: Plan, args: Any, kwargs: Any) -> bool:
    """Whether the op ran in the handler of a TrackedTensor, which counts plain tensors as well."""
    given = [t for a in plan.arguments for t in a.tensors(args, kwargs)]
    return any(kind_of(type(t)).counts_itself for t in given if is_wrapper(t))


def _wrappers(arguments: tuple[Argument, ...], args: Any, kwargs: Any) -> list[Any]:
    return [t for a in arguments for t in a.tensors(args, kwargs) if is_wrapper(t)]


def _with_arguments(plan: Plan, args: Any, kwargs: Any, outs: Any) -> Any:
    """The outputs, with written arguments in their places."""
    if plan.views:
        outs = _view(plan, None, args, kwargs, outs if plan.returns > 1 else outs[0])
        outs = outs if plan.returns > 1 else (outs,)
    new = list(outs)
    for output in plan.written:
        argument = output.arguments[0]
        value = argument.of(args, kwargs)
        if value is not None:
            if argument.kwarg_only:
                follow_resize(value, new[output.index])
            new[output.index] = value
    if plan.returns == 1:
        return new[0]
    return type(outs)(new)


# ------------------------------------------------------------------------------ choosing


def _choose(func: Any) -> tuple[Step, Plan]:
    plan = plan_of(func)
    if plan.writes:
        simple = (
            plan.has_native_kernel
            and plan.returns == 1
            and not plan.changes_metadata
            and len(plan.writes) == 1
            and len(plan.written) == 1
            and _is_first(plan.writes[0])
        )
        return (_write_to_first if simple else _write), plan
    if plan.views:
        if plan.is_composite or (plan.is_aten and not plan.has_native_kernel):
            return _perhaps_view, plan
        first = plan.views[0]
        simple = plan.returns == 1 and not first.is_list and len(first.arguments) == 1
        return (_view_of_first if simple and _is_first(first.arguments[0]) else _view), plan
    if plan.is_composite or plan.may_alias_undeclared:
        return _untouched, plan
    return _functional, plan


def _is_first(argument: Argument) -> bool:
    return argument.index == 0 and not argument.is_list and not argument.kwarg_only


# Keyed by the builtin inside an OpOverload: hashing the OpOverload itself runs Python.
_steps: dict[Any, tuple[Step, Plan]] = {}


# ------------------------------------------------------------------------------ errors


def _outputs(plan: Plan, out: Any) -> Any:
    """The outputs as a tuple or list, one for each of the schema's."""
    if plan.returns == 1:
        return (out,)
    if isinstance(out, (list, tuple)) and len(out) == plan.returns:
        return out
    raise ViewTrackError(_unexpected(plan, None, out, f"{plan.returns} outputs"))


def _unexpected(plan: Plan, index: int | None, value: Any, wanted: str) -> str:
    where = "" if index is None else f" as output {index}"
    return (
        f"the handler at {caller(4)} returned `{type(value).__name__}`{where} of `{plan.name}`, "
        f"whose schema promises {wanted}; return what the op itself returns"
    )
