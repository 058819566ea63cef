"""A call that can be made again and again, each time on fresh inputs."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from .. import _torch

Variant = Literal["function", "in-place", "in-place on a view", "out"]


@dataclass(frozen=True)
class Inputs:
    """The inputs of one call.

    Attributes:
        args: positional arguments.
        kwargs: keyword arguments.
        leaves: the tensors that gradients are asked for.
        tensors: all tensors whose state the call may change: arguments, and their bases.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    leaves: tuple[torch.Tensor, ...]
    tensors: tuple[torch.Tensor, ...]


@dataclass(frozen=True)
class Call:
    """A function with the arguments to call it with.

    Attributes:
        fn: any callable that takes tensors.
        args: positional arguments: tensors, and trees that hold tensors; leaves of autograd.
        kwargs: keyword arguments.
        name: how a report names it.
        variant: what the first argument, or the arguments named ``out``, are to be:
            ``"function"``: what was given. ``"in-place"``: copies that autograd made, which may be
            written though they require grad. ``"in-place on a view"``: views of such copies.
        compares_values: False if the result is not determined by the inputs (``empty``).
    """

    fn: Callable[..., Any]
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)
    name: str = ""
    variant: Variant = "function"
    compares_values: bool = True

    def inputs(self, *, requires_grad: bool = True) -> Inputs:
        """Fresh inputs: what shared memory among them still does, and nothing else does.

        Args:
            requires_grad: whether those that require grad still do.
        """
        memo = {
            id(t): t.detach().clone().requires_grad_(t.requires_grad)
            for t in _tensors((self.args, self.kwargs))
            if t.layout is not torch.strided  # deepcopy asks for a storage
        }
        args, kwargs = copy.deepcopy((self.args, self.kwargs), memo)
        if not requires_grad:
            args, kwargs = _torch.tree_map_only(
                torch.Tensor, lambda t: t.requires_grad_(False), (args, kwargs)
            )
        leaves = _tensors((args, kwargs))
        if self.variant in ("in-place", "in-place on a view") and args:
            args = (_torch.tree_map_only(torch.Tensor, self._writable, args[0]), *args[1:])
        passed = _tensors((args, kwargs))
        bases = [t._base for t in passed if t._base is not None]
        tensors = _distinct([*passed, *bases])
        return Inputs(args, kwargs, tuple(t for t in leaves if t.requires_grad), tuple(tensors))

    def _writable(self, t: torch.Tensor) -> torch.Tensor:
        copied = t.clone()
        return copied.view_as(copied) if self.variant == "in-place on a view" else copied


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [t for t in _torch.tree_leaves(tree) if isinstance(t, torch.Tensor)]


def _distinct(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    return list({id(t): t for t in tensors}.values())
