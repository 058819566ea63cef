"""What one test leaves in PyTorch must not reach the next."""

from __future__ import annotations

import pytest
import torch
from torch.utils import _python_dispatch

FLAGS = (
    "_is_in_torch_dispatch_mode",
    "_is_in_non_infra_torch_dispatch_mode",
    "_is_in_any_mode_without_ignore_compile_internals",
)


@pytest.fixture(autouse=True)
def flags_of_torch():
    """PyTorch keeps one flag for all threads that a mode is on, each mode puts back what it found.

    Modes of several threads, any modes, can so leave it set, and from then on torch 2.6 compiles
    nothing.
    """
    yield
    if torch._C._len_torch_dispatch_stack() == 0:
        for name in FLAGS:
            if hasattr(_python_dispatch, name):
                setattr(_python_dispatch, name, False)
