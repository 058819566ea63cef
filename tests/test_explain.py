"""`explain` tells of a tensor what native metadata, the ledger and check_inplace say."""

from __future__ import annotations

import pytest
import torch

import viewtrack as vt


def line(text: str, title: str) -> str:
    """The line of a text that has a title."""
    return next(part.split(maxsplit=1)[1] for part in text.splitlines() if part.split()[0] == title)


def test_tells_version_base_storage_and_aliases() -> None:
    base = torch.zeros(100, requires_grad=True) * 1
    t = base[:2]
    base.add_(1)
    text = vt.explain(t)
    assert text.splitlines()[0] == "float32[2] on cpu, version 1, requires_grad=True"
    assert line(text, "view").startswith("of float32[100]; gradients and tangents flow")
    assert line(text, "storage") == "8 of 400 bytes used; 0 writes known"
    assert line(text, "aliases") == "float32[100], version 1"
    assert line(text, "writes") == "none"


def test_tells_who_wrote() -> None:
    t = torch.zeros(3)
    with vt.track():
        t.view(3).add_(1)
    written = line(vt.explain(t), "writes")
    assert written.startswith(f"aten.add_.Tensor(self) at {__file__}:")
    assert "in test_tells_who_wrote, version 0 -> 1" in written


def test_tells_of_a_shared_counter_and_of_a_view_fn() -> None:
    base = torch.zeros(4)
    t = vt.share_version(base.detach()[1:].detach(), base)
    assert "only the version counter is shared" in line(vt.explain(t), "view")
    u = vt.mark_as_view(base.detach()[1:].detach(), base, view_fn=lambda b: b[1:])
    assert "by its view_fn" in line(vt.explain(u), "view")


def leaf() -> torch.Tensor:
    return torch.ones(4, requires_grad=True)


def no_grad_view() -> torch.Tensor:
    base = leaf() * 1
    with torch.no_grad():
        return base[1:]


def inference() -> torch.Tensor:
    with torch.inference_mode():
        return torch.ones(2)


CASES = {
    "plain": lambda: torch.ones(4),
    "result": lambda: leaf() * 1,
    "view": lambda: (leaf() * 1)[1:],
    "leaf": leaf,
    "view of leaf": lambda: leaf()[1:],
    "multi-output": lambda: (leaf() * 1).unbind(0)[0],
    "no_grad view": no_grad_view,
    "no_grad view without grad": lambda: torch.no_grad()(torch.Tensor.view)(torch.ones(4), 2, 2),
    "expanded": lambda: torch.ones(1).expand(4),
    "inference": inference,
    "detached": lambda: leaf().detach(),
}


@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("name", CASES)
def test_foretells_what_an_inplace_op_does(name: str, grad: bool) -> None:
    t = CASES[name]()
    with torch.set_grad_enabled(grad):
        said = line(vt.explain(t), "in-place")
        try:
            t.mul_(2)
            refused = False
        except RuntimeError:
            refused = True
    assert said.startswith("refused" if refused else "allowed"), said


def test_a_sparse_tensor_has_no_storage_of_its_own() -> None:
    assert line(vt.explain(torch.eye(2).to_sparse()), "storage") == "none of its own"


def test_tells_which_line_made_a_piece() -> None:
    rows = torch.ones(2, 2, requires_grad=True) * 1
    with vt.track():
        first, _ = rows.unbind()
    told = line(vt.explain(first), "in-place")
    assert told.startswith("refused: it is one of several views")
    assert f"; aten.unbind.int at {__file__}:" in told
