"""Handlers of single ops, which C++ calls in place of those of modes and subclasses.

Torch has them under the name of rules (``torch.library.register_torch_dispatch``). Before it calls
a handler it looks for a rule, by a function whose code is exchanged while a tracker is active.

* Our own modes, and `tracked` ones, have a handler for each op that way. C++ calls it without
  making a method of it, and it need not look up what the op asks for: a tenth of what a mode costs.
* A rule of somebody else's may have any name, and who stands in front of a mode's handler
  (`mode_frames.py`, `handler_calls.py`, `full_modes.py`) is not asked before it is called. So a
  function stands for it that asks them, has the name of a handler, and keeps what it was given.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import MethodType
from typing import Any

from ._torch.dynamo import skip_dynamo
from ._torch.rules import find_rule
from .code_exchange import CodeExchange, copy_of

Rule = Callable[[Any, Any, Any, Any, Any], Any]

_HANDLER = "__torch_dispatch__"


class OfOps(dict[Any, Rule]):
    """Functions by the builtin inside an OpOverload: hashing the OpOverload itself runs Python.

    They can be made anew, and are: a builtin cannot be pickled, but a handler that keeps these can.
    """

    def __reduce__(self) -> Any:
        return OfOps, ()


of_modes: dict[type, OfOps] = {}
"""Handlers of ours, by the class of the mode.

Modes of exactly that class have them; where there is none, C++ calls ``__torch_dispatch__``.
"""

_stock_find = copy_of(find_rule)


class _Here(threading.local):
    """The rule that whoever stands in front of a mode's handler is to call in place of it."""

    rule: Rule | None = None


_here = _Here()


def behind(mode: Any, displaced: Any) -> Any:
    """What is to be called by whoever stands in front of a mode's handler.

    Args:
        mode: the mode.
        displaced: the attribute of the mode that was there before, or None.

    Returns:
        A bound method: of the next one who stands there, of the rule that C++ would call, or
        `displaced`. None is for the handler of the class.
    """
    if stands_in_front(displaced):
        return displaced
    # Once: what the rule itself passes on to the handler is for the handler.
    rule, _here.rule = _here.rule, None
    return displaced if rule is None else MethodType(rule, mode)


def stands_in_front(method: Any) -> bool:
    """Whether somebody who stands in front of a mode's handler put this attribute there."""
    return hasattr(getattr(method, "__func__", None), "displaced")


_ABSENT = object()


def _standing_for(rule: Rule) -> Any:
    @skip_dynamo
    def __torch_dispatch__(
        owner: Any, func: Any, types: Any, args: Any, kwargs: Any = _ABSENT
    ) -> Any:
        if kwargs is _ABSENT:  # C++ asks a subclass's rule that declines again, without the class
            return rule(owner, func, types, args)  # type: ignore[call-arg]
        front = None if isinstance(owner, type) else vars(owner).get(_HANDLER)
        if not stands_in_front(front):
            return rule(owner, func, types, args, kwargs)
        outer, _here.rule = _here.rule, rule
        try:
            return front(func, types, args, kwargs)  # type: ignore[misc]
        finally:
            _here.rule = outer

    return __torch_dispatch__


@skip_dynamo
def _find(
    op: Any,
    torch_dispatch_class: type,
    of_modes: dict[type, OfOps] = of_modes,
    stock_find: Callable[[Any, type], Rule | None] = _stock_find,
    standing_for: Callable[[Rule], Rule] = _standing_for,
) -> Rule | None:
    # With the globals of torch's module.
    ours = of_modes.get(torch_dispatch_class)
    if ours is not None and (rule := ours.get(op._op)) is not None:
        return rule
    rule = stock_find(op, torch_dispatch_class)
    return rule if rule is None else standing_for(rule)


exchange = CodeExchange((find_rule, _find))
"""Acquired by whoever needs to know of handlers, or has a mode in `of_modes`."""

_lock = threading.Lock()
_lent: list[tuple[int, type]] = []  # the id of each mode, and the class that it had then


def lend(mode: Any, of_ops: OfOps) -> None:
    """Let modes of exactly the class of one have handlers of single ops, until it is taken back."""
    mode_class = type(mode)
    with _lock:
        _lent.append((id(mode), mode_class))
        of_modes[mode_class] = of_ops
    exchange.acquire()


def take_back(mode: Any, mode_class: type) -> None:
    """Undo one `lend` for a mode that had that class, if there was one."""
    lent = id(mode), mode_class
    with _lock:
        if lent not in _lent:
            return
        _lent.remove(lent)
        if all(cls is not mode_class for _, cls in _lent):
            del of_modes[mode_class]
    exchange.release()


def run_other(mode: Any, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
    """Do what C++ would do if a mode had no handlers of single ops in `of_modes`."""
    rule = _stock_find(func, type(mode))
    if rule is not None:
        return _standing_for(rule)(mode, func, types, args, kwargs)
    return mode.__torch_dispatch__(func, types, args, kwargs)
