"""What a body is like, found out by running it once on fake tensors.

A body that reads memory would fail midway in a trace and spoil it, or crash on a tensor that has
none; one that hides its views would silently lose their gradient. So it is tried before compilers
and transforms of torch.func look into it: in a thread of its own, where none of them is active.
"""

from __future__ import annotations

import logging
import threading
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch

from .. import _torch
from .._torch import library as _torch_library
from ..plan import plan_of
from .relations import base_of_output, is_marked
from .spec import Spec

log = logging.getLogger(__name__)


@dataclass(slots=True)
class Traits:
    """What a body is like.

    Attributes:
        untraceable: the error of a body that reads memory, which no tensor has while it is traced.
        hides_views: whether autograd finds no views in it where the schema has them.
    """

    untraceable: Exception | None = None
    hides_views: bool = False


_untraceable: WeakKeyDictionary[Spec, Traits] = WeakKeyDictionary()
_known: WeakKeyDictionary[Spec, dict[Any, Traits]] = WeakKeyDictionary()
_MOST_KNOWN = 256  # calls of one op; the position in a cache, say, may never be the same again


def inspected(spec: Spec, tensors: list[torch.Tensor], args: Any, kwargs: Any) -> Traits:
    """What the body is like, found out at the first call with such arguments.

    A body may branch on numbers and shapes, so what one call tells of views holds for its like
    only. One that reads memory in a call is taken to do so in all that follow.
    """
    traits = _untraceable.get(spec)
    if traits is not None:
        return traits
    known, key = _known.setdefault(spec, {}), _key(args, kwargs)
    traits = known.get(key)
    if traits is None:
        trial = _Trial(spec, tensors, args, kwargs)
        traits = trial.traits()
        if traits.untraceable is not None:
            _untraceable[spec] = traits
        elif trial.is_conclusive:
            if len(known) >= _MOST_KNOWN:
                known.clear()
            known[key] = traits
    return traits


def _key(*values: Any) -> Any:
    """What a body can branch on without reading memory."""
    return tuple(_keyed(value) for value in values)


def _keyed(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        sizes = [_torch_library.hint(n) for n in (*value.shape, *value.stride())]
        return (value.dtype, value.device, value.requires_grad, *sizes)
    if isinstance(value, (list, tuple)):
        return tuple(map(_keyed, value))
    if isinstance(value, dict):
        return tuple((name, _keyed(v)) for name, v in value.items())
    value = _torch_library.hint(value)
    return type(value), value  # True is 1 for a dict


def does_nothing(spec: Spec, tensors: list[torch.Tensor], args: Any, kwargs: Any) -> bool:
    """Whether the body, called like this, surely writes none of its arguments.

    A raw kernel may do so unseen, and an op on ``x.data`` unseen by autograd; neither is sure.
    """
    trial = _Trial(spec, tensors, args, kwargs)
    return trial.error is None and not trial.has_written


class _Trial:
    """One run of the body on fake tensors."""

    def __init__(self, spec: Spec, tensors: list[torch.Tensor], args: Any, kwargs: Any) -> None:
        self.spec = spec
        self.error: Exception | None = None
        self.has_written = False
        self._out: Any = None
        self._tensors = tensors
        self._given = (args, kwargs)
        thread = threading.Thread(target=self._run)
        thread.start()
        thread.join()

    @property
    def is_conclusive(self) -> bool:
        """Whether the error, if any, is due to the body and not to a call that makes no sense."""
        return self.error is None or self.spec.is_trivial or _is_about_memory(self.error)

    def traits(self) -> Traits:
        """What this run tells of the body."""
        spec = self.spec
        if self.error is None:
            return Traits(None, self._hides_views())
        if not self.is_conclusive:
            return Traits()
        log.info(
            "the body of %s (%s) cannot be traced, so it is opaque to compilers: %s",
            spec.name,
            spec.where,
            self.error,
        )
        return Traits(self.error)

    def _hides_views(self) -> bool:
        args, kwargs = self._given
        leaves = [leaf for leaf in self.spec.leaves(self._out) if leaf.index in self.spec.views]
        pairs = [(leaf.t, base_of_output(self.spec, leaf, args, kwargs)) for leaf in leaves]
        return any(base is not None and not is_marked(t, base) for t, base in pairs)

    def _run(self) -> None:
        mode, fakes = _torch_library.fake_like(self._tensors)
        stand_ins = {id(t): fake for t, fake in zip(self._tensors, fakes, strict=True)}
        self._given = _swapped(self._given, stand_ins)
        args, kwargs = self._given
        storages = {fake.untyped_storage()._cdata for fake in fakes}
        try:
            with mode, _Writes(storages) as writes:
                self._out = self.spec.run_body(args, kwargs)
            self.has_written = writes.found
        except Exception as error:
            self.error = error


class _Writes(_torch.QuietMode):
    """Notices any write to some storages."""

    def __init__(self, storages: set[int]) -> None:
        super().__init__()
        self.storages = storages
        self.found = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        for argument in plan_of(func).writes:
            for t in argument.tensors(args, kwargs):
                self.found |= t.untyped_storage()._cdata in self.storages
        return func(*args, **kwargs)


def _swapped(value: Any, stand_ins: dict[int, torch.Tensor]) -> Any:
    if isinstance(value, (list, tuple)):
        return type(value)(_swapped(v, stand_ins) for v in value)
    if isinstance(value, dict):
        return {key: _swapped(v, stand_ins) for key, v in value.items()}
    if isinstance(value, torch.Tensor):
        return stand_ins[id(value)]
    return _torch_library.hint(value)


def _is_about_memory(error: Exception) -> bool:
    words = ("data pointer", "numpy()", "storage", "DLPack", "data-dependent", "DataDependent")
    text = f"{type(error).__name__}: {error}"
    return any(word in text for word in words)
