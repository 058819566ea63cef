"""Wrapper subclasses: right aliasing and counters for anybody's, and one to build on."""

from .correct import correct_aliasing
from .tensor import TrackedTensor

__all__ = ["TrackedTensor", "correct_aliasing"]
