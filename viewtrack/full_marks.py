"""How `full.FullViews` marks a view: by the native kernel of the op that made it.

The op is called again above autograd, and answered with the view. So flags, creation_meta and
grad_fn are native.

A composite op has no such kernel. It is made of other ops, and it is these that make its outputs.
So it is called once more above autograd, where we see which op made each output, and of what: a
piece of `chunk` is one of `split`, `x.imag` is a `select` of `view_as_real(x)`. That op is then the
one that is called again and answered. Whatever cannot be found out that way is marked by
as_strided, which gives the same gradients.
"""

from __future__ import annotations

import functools
import itertools
import logging
from collections.abc import Callable, Container, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from . import _torch
from ._torch import library as _torch_library
from ._torch.nested import geometry, is_strided_nested
from .ledger import key_of
from .plan import Plan, plan_of
from .view import mark_as_view

log = logging.getLogger(__name__)

_VIEW = torch.ops.aten.view.default
_RESHAPE_ALIAS: Any = torch.ops.aten._reshape_alias.default

# Natively these make a view of what is not contiguous by `_reshape_alias`. Where a mode is active
# they do it by `view`.
_RESHAPES = frozenset(
    {"aten::flatten.using_ints", "aten::ravel", "aten::reshape", "aten::reshape_as"}
)


@dataclass(frozen=True, slots=True)
class Call:
    """One call of an op.

    Attributes:
        func: the op.
        args: its positional arguments.
        kwargs: its keyword arguments.
    """

    func: Any
    args: Any
    kwargs: Any

    def again(self) -> Any:
        """What it returns this time."""
        return self.func(*self.args, **self.kwargs)

    def answered(self, answer: Any) -> None:
        """Have the kernels above the op do to `answer` what they do to its result."""
        call = functools.partial(self.func, **self.kwargs)
        _torch.answering(self.func, answer, call, *self.args)


def mark(call: Call, views: dict[int, torch.Tensor], *, moved: bool) -> None:
    """Make `views` what the outputs of `call` are above autograd.

    Args:
        call: what made them.
        views: those of its outputs that are to be marked, by their places among the tensors there.
        moved: whether sizes, strides or storage of them, or of what they view, were changed since.
    """
    plan = plan_of(call.func)
    _drop_early_marks(views.values())
    _take_histories(call, views, plan)
    # Some may point elsewhere by now, by `set_` or `.data =`, or be marked by somebody else.
    views = {i: t for i, t in views.items() if _is_free(t) and _base_of(t, call, plan) is not None}
    done = _mark_natively(call, views, plan) if views and not moved else ()
    for i, t in views.items():
        if i not in done:
            mark_as_view(t, _base_of(t, call, plan))  # type: ignore[arg-type]


def _drop_early_marks(views: Iterable[torch.Tensor]) -> None:
    """Make those bare whose base was marked as a view after they were.

    In a `tracked` handler native kernels mark views at once, but none marks what a composite op
    returns. What is then a view of that would not reach the base of it.
    """
    for t in views:
        base = t._base
        if base is not None and base._is_view():
            _torch.as_view_version_only(t, base)


def _take_histories(call: Call, views: dict[int, torch.Tensor], plan: Plan) -> None:
    """Give those of `views` a grad_fn that were marked when their base had none."""
    late = {i: t for i, t in views.items() if t._is_view() and t.requires_grad and not t.grad_fn}
    if late and torch.is_grad_enabled():
        with _torch.recording_only():
            _mark_natively(call, late, plan)


def _mark_natively(call: Call, views: dict[int, torch.Tensor], plan: Plan) -> Container[int]:
    """Mark those of `views` that native kernels can mark; they are returned."""
    if plan.is_composite:
        return _mark_by_parts(call, views, plan)
    if not plan.has_native_kernel:
        return ()
    if plan.returns == 1 and not plan.views[0].is_list:
        call.answered(views[0])
    elif plan.is_aten:  # it may be called once more: that cannot be told of other people's ops
        with _torch_library.without_modes():
            call.answered(_with(views, call.again()))
    else:
        return ()
    return views


def _mark_by_parts(call: Call, views: dict[int, torch.Tensor], plan: Plan) -> Container[int]:
    """Mark the outputs of a composite op by the ops that it is made of."""
    done: set[int] = set()
    with _torch_library.without_modes():
        parts = _Parts()
        try:
            outputs = list(tensors(parts.of(call)))
        except Exception as error:  # as a handler of somebody's tensor may raise
            log.debug("the parts of %s are not known: %s", call.func, error)
            return done
        answers: dict[int, dict[int, torch.Tensor]] = {}
        for i, t in views.items():
            found = parts.made.get(id(outputs[i]))
            if found is not None and _is_like(outputs[i], t):
                number, place = found
                answers.setdefault(number, {})[place] = t
                done.add(i)
        for number, chosen in answers.items():
            part, out = parts.calls[number]
            if isinstance(out, torch.Tensor):
                _native(part, chosen[0], plan).answered(chosen[0])
            else:
                part.answered(_with(chosen, out))
    return done


class _Parts(_torch.QuietMode):
    """Notes the calls that a composite op consists of.

    Attributes:
        calls: the calls, and what they returned.
        made: for each tensor that they made, the number of the call, and its place among the
            tensors that it returned.
    """

    def __init__(self) -> None:
        # No super().__init__(): it makes state that only __enter__ needs, and we never enter.
        self.calls: list[tuple[Call, Any]] = []
        self.made: dict[int, tuple[int, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        call = Call(func, args, kwargs or {})
        if not isinstance(func, _torch.OpOverload) or not _is_repeatable(func):
            raise RuntimeError(f"{func} may not be called once more")
        out = call.again()
        given = {id(t) for t in tensors((args, kwargs))}
        for place, t in enumerate(tensors(out)):
            if id(t) not in given:
                self.made[id(t)] = len(self.calls), place
        self.calls.append((call, out))
        return out

    def of(self, call: Call) -> Any:
        """What `call` returns, with the calls inside noted."""
        _torch.push_mode(self)
        try:
            return call.again()
        finally:
            _torch.pop_mode()


def _is_repeatable(func: _torch.OpOverload) -> bool:
    return not plan_of(func).writes and torch.Tag.nondeterministic_seeded not in func.tags


def _native(part: Call, t: torch.Tensor, plan: Plan) -> Call:
    """The call that stands in for `part` where no mode is active."""
    base = part.args[0]
    if part.func is not _VIEW or plan.qualified not in _RESHAPES or base.is_contiguous():
        return part
    if base.layout is not torch.strided or base.is_meta or _torch.has_python_key(base):
        return part
    return Call(_RESHAPE_ALIAS, (base, t.size(), t.stride()), {})


def _with(views: dict[int, torch.Tensor], out: Any) -> Any:
    """What an op returned, with `views` in place of some of it, and nothing that has metadata."""
    places = itertools.count()

    def exchanged(t: torch.Tensor) -> torch.Tensor:
        view = views.get(next(places))
        return _bare(t) if view is None else view

    return _torch.tree_map_only(torch.Tensor, exchanged, out)


def _bare(t: torch.Tensor) -> torch.Tensor:
    with _torch_library.below_inplace_or_view():
        return t.detach()


def _is_free(t: torch.Tensor) -> bool:
    return not (t._is_view() or t.requires_grad)


def _is_like(t: torch.Tensor, other: torch.Tensor) -> bool:
    if not all(ask(t) == ask(other) for ask in _LIKENESS):
        return False
    if is_strided_nested(t):
        return all(map(torch.equal, geometry(t), geometry(other)))
    if t.size() != other.size():
        return False
    return t.layout is not torch.strided or (
        (t.stride(), t.storage_offset()) == (other.stride(), other.storage_offset())
    )


_LIKENESS: tuple[Callable[[torch.Tensor], Any], ...] = (
    lambda t: t.dtype,
    lambda t: t.layout,
    lambda t: t.is_nested,
    torch.Tensor.is_conj,
    torch.Tensor.is_neg,
)


def _base_of(t: torch.Tensor, call: Call, plan: Plan) -> torch.Tensor | None:
    """The one among an op's arguments that t is a view of.

    It is the one in whose storage t lies. Where one of them has no storage that tells, as wrappers
    and sparse tensors, the schema is believed.
    """
    given = list(tensors((call.args, call.kwargs)))
    key = key_of(t)
    for base in given:
        if key_of(base) == key or _torch.has_python_key(t):
            return base
    if not plan.is_composite:
        viewed: Iterator[torch.Tensor] = (
            b for a in plan.views[0].arguments for b in a.tensors(call.args, call.kwargs)
        )
        for base in viewed:
            if not _torch.has_storage(base) or _torch.has_python_key(base):
                return base
    return None


def tensors(value: Any) -> Iterator[torch.Tensor]:
    """The tensors in nested tuples, lists and dicts, in order."""
    return (t for t in _torch.tree_leaves(value) if isinstance(t, torch.Tensor))
