"""Ways to draw one and the same view relation, with native PyTorch first: it is the oracle.

A test that takes a maker says what native does; every other maker must then do just that.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import viewtrack as vt

ViewFn = Callable[[torch.Tensor], torch.Tensor]

# What native says, by kind; the messages are made in handle_view_on_rebase and check_inplace.
NO_GRAD = "no_grad mode and is being modified inplace with grad mode enabled"
NO_GRAD_INDIRECT = "no_grad mode and its base or another view of its base has been modified inplace"
INFERENCE = "inference mode and is being modified inplace in normal mode"
MULTI_OUTPUT = "output of a function that returns multiple views"
CUSTOM_FUNCTION = "created inside a custom Function"
INDIRECT = "its base or another view of its base has been modified inplace"
LEAF = "a leaf Variable that requires grad is being used in an in-place operation"
VIEW_OF_LEAF = "a view of a leaf Variable that requires grad is being used in an in-place operation"


def bare_alias(base: torch.Tensor, fn: ViewFn) -> torch.Tensor:
    """Storage and geometry of `fn(base)`, no autograd metadata and a counter of its own."""
    return fn(base.detach()).data


def below_autograd(body: Callable[[], Any]) -> Any:
    """Run `body` inside a `__torch_dispatch__` handler and smuggle its result out."""
    results = []

    class Smuggler(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            results.append(body())
            return func(*args, **(kwargs or {}))

    trigger = torch.zeros(())
    with Smuggler():
        trigger.sin()
    (result,) = results
    return result


def native_creation_meta() -> vt.CreationMeta:
    """What the native kernel of a single-output view op passes to as_view here and now."""
    if torch.is_inference_mode_enabled():
        return vt.CreationMeta.INFERENCE_MODE
    if not torch.is_grad_enabled():
        return vt.CreationMeta.NO_GRAD_MODE
    return vt.CreationMeta.DEFAULT


def share_a_counter(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether a write to either moves the counter of the other, told by making such writes."""
    before = a._version, b._version
    torch.autograd.graph.increment_version(a)
    torch.autograd.graph.increment_version(b)
    return (a._version, b._version) == (before[0] + 2, before[1] + 2)


@dataclass(frozen=True)
class Maker:
    """One way to make a view of `base` that relates to it as `fn(base)` does."""

    name: str
    draw: Callable[[torch.Tensor, ViewFn, vt.CreationMeta], torch.Tensor]

    def __call__(
        self, base: torch.Tensor, fn: ViewFn, creation_meta: vt.CreationMeta | None = None
    ) -> torch.Tensor:
        return self.draw(base, fn, creation_meta or native_creation_meta())

    @property
    def native(self) -> bool:
        return self.name == "native"


def _marked(base, fn, creation_meta):
    return vt.mark_as_view(bare_alias(base, fn), base, creation_meta=creation_meta)


def _view_fn(base, fn, creation_meta):
    alias = bare_alias(base, fn)
    return vt.mark_as_view(alias, base, view_fn=fn, creation_meta=creation_meta)


def _marked_below(base, fn, creation_meta):
    return below_autograd(lambda: vt.mark_as_view(fn(base), base, creation_meta=creation_meta))


def _view_fn_below(base, fn, creation_meta):
    return below_autograd(
        lambda: vt.mark_as_view(fn(base), base, view_fn=fn, creation_meta=creation_meta)
    )


def _tracked(base, fn, creation_meta):
    with vt.track():
        view = below_autograd(lambda: fn(base))
    return vt.mark_as_view(view, base, creation_meta=creation_meta)


NATIVE = Maker("native", lambda base, fn, creation_meta: fn(base))
MARKED = Maker("marked", _marked)
VIEW_FN = Maker("view_fn", _view_fn)
MARKED_BELOW = Maker("marked_below", _marked_below)
VIEW_FN_BELOW = Maker("view_fn_below", _view_fn_below)
TRACKED = Maker("tracked", _tracked)

OURS = (MARKED, VIEW_FN, MARKED_BELOW, VIEW_FN_BELOW, TRACKED)
ALL = (NATIVE, *OURS)

every_maker = pytest.mark.parametrize("make", ALL, ids=lambda maker: maker.name)
our_makers = pytest.mark.parametrize("make", OURS, ids=lambda maker: maker.name)
