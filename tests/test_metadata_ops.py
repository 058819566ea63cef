"""In-place ops that change what a tensor shows, and not its bytes, move its counter by one.

Above autograd and in a handler; a view of the old storage shows what it showed.
"""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
from handlers import On

import viewtrack as vt

OPS = {
    "resize_": lambda t: t.resize_(3, 1, 1),
    "resize_ larger": lambda t: t.resize_(50),
    "resize_as_": lambda t: t.resize_as_(torch.zeros(2, 2)),
    "set_": lambda t: t.set_(torch.zeros(4)),
    "set_ storage": lambda t: t.set_(torch.zeros(4).untyped_storage()),
    "as_strided_": lambda t: t.as_strided_((2,), (2,)),
    "transpose_": lambda t: t.unsqueeze_(0).transpose_(0, 1),
    "squeeze_": lambda t: t.squeeze_(),
    "detach_": lambda t: t.detach_(),
}
MOVES = {"transpose_": 2, "detach_": 0}  # two ops; detach_ changes nothing of the values


def moved(op: Any) -> Any:
    """What an op does to a tensor's counter, and to a view of its old storage."""

    def action(t: torch.Tensor) -> tuple[int, bool]:
        view = t[2:5]
        before, shown = vt.version(t), view.tolist()
        op(t)
        return vt.version(t) - before, view.tolist() == shown

    return action


@pytest.mark.parametrize("name", OPS)
@pytest.mark.parametrize("where", ["stock", "track", "handler"])
def test_moves_the_counter_by_as_much_everywhere(name: str, where: str) -> None:
    action = moved(OPS[name])
    if where == "handler":
        with vt.track(), On(torch.ops.aten.exp.default, lambda out: action(out.detach())) as mode:
            torch.arange(9.0).exp()
        (seen,) = mode.kept
    else:
        with vt.track() if where == "track" else contextlib.nullcontext():
            seen = action(torch.arange(9.0))
    assert seen == (MOVES.get(name, 1), True)


def test_a_view_of_the_old_storage_keeps_its_counter() -> None:
    """`set_` gives the tensor another storage; the old one's views are not written."""
    with vt.track():
        t = torch.arange(4.0)
        view = t.detach()
        t.set_(torch.zeros(4))
    assert view.tolist() == [0, 1, 2, 3]
    assert vt.storage_version(view) == 0
