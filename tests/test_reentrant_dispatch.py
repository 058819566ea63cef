"""A handler that goes above autograd again is counted by the kernels up there, and only there."""

from __future__ import annotations

from types import FunctionType
from typing import Any

import pytest
import torch

import viewtrack as vt


class Reentrant(torch.Tensor):
    """Adds in place three times in its handler: below autograd, above it, and below it again."""

    inner: torch.Tensor
    seen: dict[str, Any]

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> Reentrant:
        self: Reentrant = torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)
        self.inner = inner
        return self

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        below, above = torch.ones(3), torch.ones(3, requires_grad=True)
        below.add_(1)
        with torch.overrides.enable_reentrant_dispatch():
            result = above * 1
            result.add_(1)
            view = result.view(3)
            view.mul_(2)
        below.add_(1)
        cls.seen = {
            "below": below._version,
            "above": result._version,
            "view": view._base is result,
            "path": (result, above),
        }
        return func(args[0].inner)


class OtherName(Reentrant):
    __torch_dispatch__ = classmethod(lambda cls, *given: cls.handle(*given))  # type: ignore[assignment]

    @classmethod
    def handle(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _renamed(cls, func, types, args, kwargs)


_code = Reentrant.__torch_dispatch__.__func__.__code__  # type: ignore[attr-defined]
_renamed = FunctionType(_code.replace(co_name="handle"), globals())


@pytest.mark.parametrize("cls", [Reentrant, OtherName])
def test_counts_once_above_and_below(cls: type[Reentrant]) -> None:
    cls(torch.ones(2)).exp()
    stock = cls.seen
    with vt.track():
        cls(torch.ones(2)).exp()
    tracked = cls.seen
    assert (stock["above"], stock["below"]) == (2, 0)
    assert (tracked["above"], tracked["below"]) == (2, 2)
    assert stock["view"]
    assert tracked["view"]
    for result, leaf in (stock["path"], tracked["path"]):
        assert torch.autograd.grad(result.sum(), leaf)[0].tolist() == [2, 2, 2]


def test_a_tracker_entered_in_a_handler_is_below_autograd() -> None:
    class Entering(Reentrant):
        @classmethod
        def __torch_dispatch__(
            cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            with vt.track():
                t = torch.ones(3)
                t.add_(1)
            cls.seen = {"below": t._version}
            return func(args[0].inner)

    Entering(torch.ones(2)).exp()
    assert Entering.seen == {"below": 1}
