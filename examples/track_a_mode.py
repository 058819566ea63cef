"""A dispatch mode that keeps views: under stock torch, under `track`, and `tracked` by itself.

    python examples/track_a_mode.py

On stock torch the kept view has a counter of its own, so whoever keeps it cannot tell that the
program wrote to it. `track()` mends that for everything inside; `tracked` for one mode.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

import viewtrack as vt


class Keep(TorchDispatchMode):
    """Keeps a flat view of what each `mm` returns."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.mm.default:
            self.kept = out.view(-1)
        return out


@vt.tracked
class TrackedKeep(Keep):
    """The same, with ADInplaceOrView on inside its handler."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.mm.default:
            self.kept = out.view(-1)
        return out


def program(mode: Any) -> tuple[torch.Tensor, torch.Tensor]:
    with mode:
        h = torch.ones(2, 2) @ torch.ones(2, 2)
        h.relu_()
        h.mul_(2)
    return h, mode.kept


def show(name: str, h: torch.Tensor, kept: torch.Tensor) -> None:
    print(f"{name:<22} result {vt.version(h)}, kept {vt.version(kept)}, view {kept._is_view()}")


if __name__ == "__main__":
    show("stock torch", *program(Keep()))
    show("tracked", *program(TrackedKeep()))
    with vt.track():
        show("track()", *program(Keep()))
    with vt.track(views="full"):
        h, kept = program(Keep())
        show('track(views="full")', h, kept)
    print("base is the result:", kept._base is h, "- writes known:", vt.storage_version(kept))
    print(vt.explain(kept))
