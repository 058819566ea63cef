"""viewtrack: the truth about views and writes below autograd."""

from . import checkpoint, library
from ._torch import CreationMeta
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

__version__ = "0.1.0"

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
    "explain",
    "guard_saved_tensors",
    "library",
    "mark_as_view",
    "protect",
    "share_version",
    "storage_version",
    "track",
    "tracked",
    "version",
    "view_info",
    "with_tracking",
]
