"""Wrapper subclasses: right aliasing and counters for anybody's, and one to build on."""

from .correct import correct_aliasing

__all__ = ["correct_aliasing"]
