"""`tracked`: native view marking and version bumps inside somebody's ``__torch_dispatch__``.

The dispatcher excludes ADInplaceOrView before it calls a handler. A tracked handler runs with the
key back on, so each op that it issues passes through its own native kernel: views are marked, the
counters of what is written move. What has to be put right around that is in `handler_run.py`.
"""

from __future__ import annotations

import functools
import inspect
import sys
from typing import Any, TypeVar

import torch

from . import _torch, rules
from ._torch import ADINPLACEORVIEW, is_excluded
from ._torch.dynamo import skip_dynamo
from ._torch.rules import rules_of
from .anchors import drop_anchor, weigh_anchor
from .handler_run import Handler, is_recorded, recorded, run_for
from .handler_signature import check_signature, takes_func_first

T = TypeVar("T")

_NAME = "__torch_dispatch__"


def tracked(target: T) -> T:
    """Let the ops that a handler issues be tracked natively, without a `track` around.

    In a decorated handler views are real views (``_is_view()``, ``_base``, a shared version
    counter) and writes move the counters, as above autograd. What the handler returns is made
    acceptable to the native kernel above it, and a write that it passes on is counted once.

    A view that the handler returns is exchanged for an alias of it, so what the handler keeps and
    what the caller gets are two objects then. The counter of a new tensor need not begin at 0: many
    ops write their results in place, which autograd hides from itself and not from a handler. A
    class that derives from a decorated one and has a handler of its own is to be decorated too.

    Args:
        target: a ``TorchDispatchMode`` class, a tensor subclass with a ``__torch_dispatch__`` (both
            are changed in place), or a handler: a function that takes ``(func, types, args,
            kwargs)``, or those after ``self`` or ``cls``; also as a classmethod or staticmethod.

    Returns:
        The class, or a handler with the same signature.

    Raises:
        TypeError: `target` is none of these.
    """
    if isinstance(target, type):
        _track_class(target)
        return target
    if isinstance(target, (classmethod, staticmethod)):
        takes_owner = isinstance(target, classmethod)
        return type(target)(_tracked(target.__func__, takes_owner))
    if not callable(target):
        raise TypeError(
            f"tracked: expected a class with a `{_NAME}` or a handler, "
            f"got {type(target).__name__} {target!r}"
        )
    return _tracked(target, not takes_func_first(target))  # type: ignore[return-value]


# Torch's own, which no op gets through.
_OF_NOBODY = [
    inspect.getattr_static(cls, _NAME) for cls in (torch.Tensor, _torch.TorchDispatchMode)
]


def _track_class(cls: type) -> None:
    handler = inspect.getattr_static(cls, _NAME, None)
    if handler is None or any(handler is torchs for torchs in _OF_NOBODY):
        raise TypeError(
            f"tracked: class `{cls.__qualname__}` has no `{_NAME}` of its own; decorate a "
            f"TorchDispatchMode or a tensor subclass that defines one"
        )
    if isinstance(handler, (classmethod, staticmethod)):
        takes_owner = isinstance(handler, classmethod)
        wrapped: Any = type(handler)(_tracked(handler.__func__, takes_owner))
    else:
        wrapped = _tracked(_undisabled(handler), takes_owner=True)
    setattr(cls, _NAME, wrapped)
    if issubclass(cls, _torch.TorchDispatchMode):
        _prepare_entering(cls, wrapped)


def _prepare_entering(cls: Any, handler: Any) -> None:
    """While a mode of the class is entered, have C++ call handlers of single ops where it can.

    And note the frame that enters it, so that no look for handlers goes past it.
    """
    rules_of_ops: Any = getattr(handler, "rules", rules.OfOps())  # a classmethod has none
    enter, leave = cls.__dict__.get("__enter__"), cls.__dict__.get("__exit__")

    def __enter__(self: Any) -> Any:
        entered = enter(self) if enter else super(cls, self).__enter__()
        drop_anchor(sys._getframe(1))
        if type(self) is cls:
            rules.lend(self, rules_of_ops)
        return entered

    def __exit__(self: Any, *error: Any) -> Any:
        weigh_anchor(sys._getframe(1))
        try:
            return leave(self, *error) if leave else super(cls, self).__exit__(*error)
        finally:
            rules.take_back(self, cls)  # it may have been given another class since

    cls.__enter__ = functools.wraps(cls.__enter__)(__enter__)
    cls.__exit__ = functools.wraps(cls.__exit__)(__exit__)


def _undisabled(handler: Any) -> Any:
    """The handler of a mode without torch's dynamo-disable (2.13 on): ours does as much, sooner."""
    while _torch.is_dynamo_disable(handler):
        handler = handler.__wrapped__
    return handler


def _tracked(handler: Handler, takes_owner: bool) -> Handler:
    check_signature(handler, takes_owner)
    return (_tracked_method if takes_owner else _tracked_function)(handler)


def _tracked_function(handler: Handler) -> Handler:
    method = _tracked_method(_with_owner(handler), depth=2)

    @functools.wraps(handler)
    def tracked_handler(func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return method(None, func, types, args, kwargs)

    return skip_dynamo(tracked_handler)


def _with_owner(handler: Handler) -> Handler:
    # Of this name, since a handler is known to be tracked by its caller's.
    def tracked_handler(_: None, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        return handler(func, types, args, kwargs)

    return skip_dynamo(tracked_handler)


def _tracked_method(handler: Handler, depth: int = 1) -> Handler:
    runs, rules_of_ops = rules.OfOps(), rules.OfOps()

    @functools.wraps(handler)
    def tracked_handler(
        owner: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        try:
            run = runs[func._op]
        except (KeyError, AttributeError):
            if not is_excluded(ADINPLACEORVIEW):
                return handler(owner, func, types, args, kwargs)
            if is_recorded(sys._getframe(depth), func, types, args):
                return recorded(owner, func, types, args, kwargs, handler)
            run = run_for(func, handler, depth + 1)
            if isinstance(func, _torch.OpOverload) and func.namespace == "aten":
                # An op of somebody else's may get an ADInplaceOrView kernel later.
                runs[func._op] = run
                rules_of_ops[func._op] = _rule_for(func, run, tracked_handler)
        return run(owner, func, types, args, kwargs)

    tracked_handler.rules = rules_of_ops  # type: ignore[attr-defined]
    return skip_dynamo(tracked_handler)


def _rule_for(func: Any, run: Handler, tracked_handler: Handler) -> rules.Rule:
    """What C++ may call for an op in place of a mode's handler: it takes the shortest way."""
    others = rules_of(func)

    @skip_dynamo
    def rule(mode: Any, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        # Somebody may stand in front of the handler, or have exchanged it.
        own = getattr(mode.__torch_dispatch__, "__func__", None) is tracked_handler
        if others or not own:
            return rules.run_other(mode, func, types, args, kwargs)
        return run(mode, func, types, args, kwargs)

    return rule
