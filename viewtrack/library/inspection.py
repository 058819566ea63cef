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

from .. import _torch_library
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


_known: WeakKeyDictionary[Spec, Traits] = WeakKeyDictionary()


def inspected(spec: Spec, tensors: list[torch.Tensor], args: Any, kwargs: Any) -> Traits:
    """What the body is like, found out at the first call with such arguments."""
    traits = _known.get(spec)
    if traits is None:
        traits = _known[spec] = Traits()
        thread = threading.Thread(target=_try, args=(spec, traits, tensors, args, kwargs))
        thread.start()
        thread.join()
    return traits


def _try(spec: Spec, traits: Traits, tensors: list[torch.Tensor], args: Any, kwargs: Any) -> None:
    mode, fakes = _torch_library.fake_like(tensors)
    stand_ins = {id(t): fake for t, fake in zip(tensors, fakes, strict=True)}

    def swap(value: Any) -> Any:
        if isinstance(value, (list, tuple)):
            return [swap(v) for v in value]
        if isinstance(value, torch.Tensor):
            return stand_ins[id(value)]
        return _torch_library.hint(value)

    args, kwargs = tuple(map(swap, args)), {k: swap(v) for k, v in kwargs.items()}
    try:
        with mode:
            out = spec.run_body(args, kwargs)
    except Exception as error:
        if spec.is_trivial or _is_about_memory(error):
            traits.untraceable = error
            log.info("the body of %s (%s) cannot be traced, so it is opaque to compilers: %s",
                     spec.name, spec.where, error)  # fmt: skip
        else:
            _known.pop(spec, None)  # the call is wrong, and will say so itself
        return
    for leaf in spec.leaves(out):
        if leaf.index in spec.views:
            base = base_of_output(spec, leaf, args, kwargs)
            traits.hides_views |= base is not None and not is_marked(leaf.t, base)


def _is_about_memory(error: Exception) -> bool:
    words = ("data pointer", "numpy()", "storage", "DLPack", "data-dependent", "DataDependent")
    text = f"{type(error).__name__}: {error}"
    return any(word in text for word in words)
