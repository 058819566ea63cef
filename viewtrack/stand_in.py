"""A frame for handlers of tensor subclasses that leave none.

`site.py` knows by the Python frames whether a handler issued an op. From torch 2.13 on that of
`DTensor` is in C++: what it writes would be taken for the user's, whose writes a kernel above
counts. So the tracker calls the op of a subclass through a frame that looks like its handler's. It
stands for handlers in Python too, whatever their names and whatever they do to their arguments: the
walk passes over what is called from here (`site._is_handler`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor


def with_a_frame(func: Any) -> Callable[..., Any]:
    """The op `func`, called through a frame that looks like a handler's."""

    def run(*args: Any, **kwargs: Any) -> Any:
        return __torch_dispatch__(Tensor, func, (), args, kwargs)

    return run


def __torch_dispatch__(cls: type, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
    return func._op(*args, **kwargs)


CODE = __torch_dispatch__.__code__
"""The code of such frames."""
