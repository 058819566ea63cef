"""viewtrack: the truth about views and writes below autograd."""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import TYPE_CHECKING

from ._torch import CreationMeta
from .detach import detach_
from .errors import AliasingError, AutogradMetadataError, MutatedTensorError, ViewTrackError
from .explain import explain
from .guard import MutationGuard, protect
from .guard_saved import guard_saved_tensors
from .handler import tracked
from .info import ViewInfo, version, view_info, with_tracking
from .ledger import storage_version
from .mode import Tracker, track
from .subclass import TrackedTensor, correct_aliasing
from .view import mark_as_view, share_version

if TYPE_CHECKING:
    from . import checkpoint, library, testing

__version__ = "0.1.0"

# Loaded when they are first named, so that a program pays for what it uses.
_LAZY = ("checkpoint", "library", "testing")


def __getattr__(name: str) -> ModuleType:
    if name in _LAZY:
        return importlib.import_module(f".{name}", __name__)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


__all__ = [
    "AliasingError",
    "AutogradMetadataError",
    "CreationMeta",
    "MutatedTensorError",
    "MutationGuard",
    "TrackedTensor",
    "Tracker",
    "ViewInfo",
    "ViewTrackError",
    "checkpoint",
    "correct_aliasing",
    "detach_",
    "explain",
    "guard_saved_tensors",
    "library",
    "mark_as_view",
    "protect",
    "share_version",
    "storage_version",
    "testing",
    "track",
    "tracked",
    "version",
    "view_info",
    "with_tracking",
]
