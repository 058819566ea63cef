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
from .._torch import fakes as _fakes
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
        captures: whether it uses a tensor that it was not given, which no trace can have in it.
        captures_grad: whether autograd records what it does with such a tensor.
        reads_captured: whether it asks for the numbers in such a tensor, as ``item`` does.
    """

    untraceable: Exception | None = None
    hides_views: bool = False
    captures: bool = False
    captures_grad: bool = False
    reads_captured: bool = False


_MOST_KNOWN = 256  # calls of one op; the position in a cache, say, may never be the same again
_known: WeakKeyDictionary[Spec, dict[Any, Traits]] = WeakKeyDictionary()
_raw: WeakKeyDictionary[Spec, dict[Any, bool]] = WeakKeyDictionary()


def inspected(spec: Spec, tensors: list[torch.Tensor], args: Any, kwargs: Any) -> Traits:
    """What the body is like, found out at the first call with such arguments.

    A body may branch on numbers, shapes and whether autograd records, so what one call tells holds
    for its like only.
    """
    known, key = _known.setdefault(spec, {}), _key(args, kwargs)
    traits = known.get(key)
    if traits is None:
        trial = _Trial(spec, tensors, args, kwargs)
        traits = trial.traits()
        if trial.is_conclusive:
            _remember(known, key, traits)
    return traits


def note_raw(spec: Spec, args: Any, kwargs: Any) -> None:
    """Note that autograd was not let into the body in a call, since it used numpy."""
    _remember(_raw.setdefault(spec, {}), _key(args, kwargs), True)


def is_raw(spec: Spec, args: Any, kwargs: Any) -> bool:
    """Whether `note_raw` was told of a call like this one."""
    noted = _raw.get(spec)
    return noted is not None and _key(args, kwargs) in noted


def _remember(known: dict[Any, Any], key: Any, value: Any) -> None:
    if len(known) >= _MOST_KNOWN:
        known.clear()
    known[key] = value


def _key(*values: Any) -> Any:
    """What a body can branch on without reading memory."""
    modes = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
    return (*modes, *(_keyed(value) for value in values))


def _keyed(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        sizes = (*value.shape, *value.stride(), value.storage_offset())
        bits = value.requires_grad, value.is_conj(), value.is_neg()
        return (value.dtype, value.device, *bits, *map(_torch_library.hint, sizes))
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
        self.hides_views = False
        self.captured: dict[str, bool] = {}
        self._tensors = tensors
        self._given = (args, kwargs)
        self._recording = _torch_library.recording_as_here()
        self._inference = torch.is_inference_mode_enabled()
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
            return Traits(None, self.hides_views, **self.captured)
        if not self.is_conclusive:
            return Traits(None, False, **self.captured)
        log.info(
            "the body of %s (%s) cannot be traced, so it is opaque to compilers: %s",
            spec.name,
            spec.where,
            self.error,
        )
        return Traits(self.error)

    def _run(self) -> None:
        mode, fakes = _torch_library.fake_like(self._tensors)
        stand_ins = {id(t): fake for t, fake in zip(self._tensors, fakes, strict=True)}
        args, kwargs = _swapped(self._given, stand_ins)
        storages = {fake.untyped_storage()._cdata for fake in fakes}
        try:
            with torch.inference_mode(self._inference), self._recording():
                with mode, _fakes.real_allowed(mode), _Looking(storages) as seen:
                    try:
                        out = self.spec.run_body(args, kwargs)
                    finally:
                        self.has_written = seen.writes
                        self.captured = seen.captured
                self.hides_views = _hides_views(self.spec, args, kwargs, out)
        except Exception as error:
            self.error = error


def _hides_views(spec: Spec, args: Any, kwargs: Any, out: Any) -> bool:
    leaves = [leaf for leaf in spec.leaves(out) if leaf.index in spec.views]
    pairs = [(leaf, base_of_output(spec, leaf, args, kwargs)) for leaf in leaves]
    return any(base is not None and not is_marked(leaf, base) for leaf, base in pairs)


class _Looking(_torch.QuietMode):
    """Notices any write to some storages, and any use of a tensor that is not fake."""

    def __init__(self, storages: set[int]) -> None:
        super().__init__()
        self.storages = storages
        self.writes = False
        self.captured: dict[str, bool] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        for argument in plan_of(func).writes:
            for t in argument.tensors(args, kwargs):
                self.writes |= t.untyped_storage()._cdata in self.storages
        if not _fakes.is_lift(func):  # what `torch.tensor` makes is lifted
            leaves = _torch.tree_leaves((args, kwargs))
            tensors = [t for t in leaves if isinstance(t, torch.Tensor)]
            real = [t for t in tensors if not _torch_library.is_fake(t)]
            if real:
                self.captured["captures"] = True
                if torch.is_grad_enabled() and any(t.requires_grad for t in real):
                    self.captured["captures_grad"] = True
            if len(real) == len(tensors) > 0 and torch.Tag.data_dependent_output in getattr(
                func, "tags", ()
            ):
                self.captured["reads_captured"] = True
                with _torch_library.without_modes():
                    return func(*args, **kwargs)
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
