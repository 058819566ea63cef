"""torch's own errors about in-place ops say which lines wrote, once they leave a tracker."""

from __future__ import annotations

import sys
import traceback

import pytest
import torch

import viewtrack as vt

pytestmark = pytest.mark.skipif(sys.version_info < (3, 11), reason="Python 3.10 has no notes")


class Flip(torch.autograd.Function):
    """A view with a backward of its own."""

    @staticmethod
    def forward(ctx, m):
        return m.transpose(0, 1)

    @staticmethod
    def backward(ctx, grad):
        return grad.transpose(0, 1)


def line_of(mark: str) -> int:
    with open(__file__) as source:
        return next(n for n, line in enumerate(source, 1) if line.rstrip().endswith(f"# {mark}"))


def edits_the_base_of_a_function_view() -> None:
    m = torch.ones(2, 3, requires_grad=True) + 0
    v = Flip.apply(m)
    m.mul_(-1)  # BASE EDIT
    v.sum().backward()


def edits_what_exp_saved() -> None:
    y = torch.ones(3, requires_grad=True).exp()
    y.detach().view(3).add_(1)  # SAVED EDIT
    y.sum().backward()


@pytest.mark.parametrize(
    ("program", "mark", "op"),
    [
        (edits_the_base_of_a_function_view, "BASE EDIT", "aten.mul_.Tensor(self)"),
        (edits_what_exp_saved, "SAVED EDIT", "aten.add_.Tensor(self)"),
    ],
)
def test_the_error_names_the_line_that_wrote(program, mark, op) -> None:
    with pytest.raises(RuntimeError) as stock:
        program()
    with pytest.raises(RuntimeError) as tracked, vt.track():
        program()
    assert str(tracked.value) == str(stock.value)
    text = "".join(traceback.format_exception(tracked.value))
    assert f"{op} at {__file__}:{line_of(mark)} in {program.__name__}, version 0 -> 1" in text


def test_other_errors_are_left_alone() -> None:
    @vt.track()
    def views_too_few_elements() -> None:
        torch.ones(2).add_(1).view(3)

    with pytest.raises(RuntimeError) as error:
        views_too_few_elements()
    assert not getattr(error.value, "__notes__", [])
