"""Modes that keep tensors, in the ways programs do."""

from collections import deque

import torch
from torch.utils._python_dispatch import TorchDispatchMode

aten = torch.ops.aten
MM = aten.mm.default


class Keep(TorchDispatchMode):
    """Runs every op, and keeps what `how` makes of the results of `op`."""

    def __init__(self, how, op=MM):
        super().__init__()
        self.how, self.op, self.kept = how, op, deque()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if func is self.op:
            self.kept.append(self.how(out))
        return out


class HandOut(TorchDispatchMode):
    """Answers `op` with what a `Keep` kept, in order."""

    def __init__(self, keep, how=lambda t: t):
        super().__init__()
        self.keep, self.how = keep, how

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is self.keep.op:
            return self.how(self.keep.kept.popleft())
        return func(*args, **(kwargs or {}))


def detached(t):
    return t.detach()
