"""The base of our dispatch modes: torch, and dynamo, leave their handlers alone. Private torch.

Under the rules of the package; tried on torch 2.6.0, 2.9.1, 2.13.0, 2.14.1 and 2.15.0.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from .dynamo import skip_dynamo

if TYPE_CHECKING:
    from typing_extensions import Self


class QuietMode(TorchDispatchMode):
    """A mode whose handler torch does not wrap.

    From 2.13 on torch wraps every handler in a dynamo-disable that costs 0.8 microseconds a call
    and imports torch._dynamo at the first op, unless `_should_skip_dynamo` says no. Ours tells
    dynamo at no cost to pass it over: where that breaks a graph, it would trace the handler.
    """

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()  # type: ignore[no-untyped-call]
        if "__torch_dispatch__" in cls.__dict__:
            skip_dynamo(cls.__dict__["__torch_dispatch__"])

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def __enter__(self) -> Self:
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *exc: object) -> None:
        super().__exit__(*exc)  # type: ignore[no-untyped-call]

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False


def is_dynamo_disable(function: Any) -> bool:
    """Whether it is torch's dynamo-disable around another function, its ``__wrapped__``."""
    return getattr(function, "__code__", None) is _DISABLE_CODE


_DISABLE_CODE = torch._disable_dynamo(lambda: None).__code__  # type: ignore[attr-defined]
