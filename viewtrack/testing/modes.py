"""Dispatch modes to compare with."""

from __future__ import annotations

from typing import Any

from .. import _torch


class NoOpMode(_torch.QuietMode):
    """A dispatch mode that passes every op on."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))
