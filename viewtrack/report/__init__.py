"""Reports: what a tracked program did. One model, and what it can be written as."""

from .as_json import from_json, to_json
from .model import Alias, HazardRow, OpRow, Report, ViewRow, WriteRow
from .recorder import Recorder
from .text import to_text

__all__ = [
    "Alias",
    "HazardRow",
    "OpRow",
    "Recorder",
    "Report",
    "ViewRow",
    "WriteRow",
    "from_json",
    "to_json",
    "to_text",
]
