"""What correct_aliasing adds to a trivial wrapper's handler, against torch's own helper.

Each side calls the helper alone, with what the handler of such a wrapper passes it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import return_and_correct_aliasing
from torch.utils._pytree import tree_map_only

import viewtrack
from benchmarks.registry import Side, pair

aten = torch.ops.aten


class Wrapper(torch.Tensor):
    """A wrapper as users write one, around one tensor."""

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> Wrapper:
        return torch.Tensor._make_wrapper_subclass(
            cls, inner.shape, strides=inner.stride(), dtype=inner.dtype
        )

    def __init__(self, inner: torch.Tensor) -> None:
        self.inner = inner

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        inner_args = tree_map_only(cls, lambda t: t.inner, args)
        return tree_map_only(torch.Tensor, cls, func(*inner_args, **(kwargs or {})))


class Declaring(Wrapper):
    """One that declares its inner tensor, whose counters are then kept too."""

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["inner"], None


def _sides(cls: type[Wrapper], func: Callable[..., Any], *args: Any) -> tuple[Side, Side]:
    wrapped = tuple(cls(a) if isinstance(a, torch.Tensor) else a for a in args)
    # What a handler would pass; made here, since handlers are not what is measured.
    out = cls(func(*args))
    call = (func, wrapped, {}, out)
    return (
        Side(viewtrack.correct_aliasing, call, _in_handler),
        Side(return_and_correct_aliasing, call, _in_handler),
    )


def _in_handler() -> Any:
    """Handlers run with autograd's keys excluded."""
    return torch._C._ExcludeDispatchKeyGuard(
        torch._C.DispatchKeySet(torch._C.DispatchKey.ADInplaceOrView)
        | torch._C.DispatchKeySet(torch._C.DispatchKey.AutogradFunctionality)
    )


@pair("correct_aliasing of an in-place op", target=0.20)
def _in_place() -> tuple[Side, Side]:
    return _sides(Wrapper, aten.add_.Tensor, torch.rand(4, 4), torch.rand(4, 4))


@pair("correct_aliasing of a view op", target=0.70)
def _view() -> tuple[Side, Side]:
    return _sides(Wrapper, aten.view.default, torch.rand(4, 4), [16])


@pair("correct_aliasing of a functional op", target=1.0)
def _functional() -> tuple[Side, Side]:
    return _sides(Wrapper, aten.add.Tensor, torch.rand(4, 4), torch.rand(4, 4))


@pair("correct_aliasing of a view op, inner tensors declared", target=4.0, note="keeps counters")
def _view_with_counters() -> tuple[Side, Side]:
    return _sides(Declaring, aten.view.default, torch.rand(4, 4), [16])
