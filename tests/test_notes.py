"""torch's own errors about in-place ops say which lines wrote, once they leave a tracker."""

from __future__ import annotations

import sys
import traceback
from contextlib import nullcontext

import pytest
import torch
from handlers import NoOp
from lines import line_of

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
    assert (
        f"{op} at {__file__}:{line_of(__file__, mark)} in {program.__name__}, version 0 -> 1"
        in text
    )


def test_other_errors_are_left_alone() -> None:
    @vt.track()
    def views_too_few_elements() -> None:
        torch.ones(2).add_(1).view(3)

    with pytest.raises(RuntimeError) as error:
        views_too_few_elements()
    assert not getattr(error.value, "__notes__", [])


def normalizes_rows() -> None:
    rows = torch.ones(3, 4, requires_grad=True) * 1
    for row in rows:  # ROWS
        row.clamp_(0, 1)  # ROW EDIT


def writes_a_piece_without_a_name() -> None:
    qkv = torch.ones(2, 6, requires_grad=True) * 1
    other = torch.ones(4)
    other.split(2)
    qkv.chunk(3, dim=1)[0].mul_(2)  # ROWS EDIT


def writes_a_piece_by_what_requires_grad() -> None:
    pieces = torch.ones(4).split(2)  # SPLIT
    first = pieces[0]
    first.mul_(torch.ones((), requires_grad=True))  # SPLIT EDIT


def takes_apart_twice() -> None:
    base = torch.ones(4, requires_grad=True) * 1
    base.split(2)  # FIRST
    for _ in range(3):
        a, b = base.split(2)  # SECOND
    b.mul_(2)  # EDIT OF B
    a.sum()


@pytest.mark.parametrize(
    ("program", "name", "made", "written"),
    [
        (normalizes_rows, "`row`", ["aten.unbind.int ROWS"], "ROW EDIT"),
        (writes_a_piece_without_a_name, "the view", ["aten.split.Tensor ROWS EDIT"], "ROWS EDIT"),
        (
            writes_a_piece_by_what_requires_grad,
            "`first`",
            ["aten.split.Tensor SPLIT"],
            "SPLIT EDIT",
        ),
        (
            takes_apart_twice,
            "`b`",
            ["aten.split.Tensor SECOND", "aten.split.Tensor FIRST"],
            "EDIT OF B",
        ),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_a_refused_piece_is_told_with_the_line_that_made_it(program, name, made, written) -> None:
    with pytest.raises(RuntimeError) as stock:
        program()
    with pytest.raises(RuntimeError) as tracked, vt.track():
        program()
    assert str(tracked.value) == str(stock.value)
    head, *lines, last, mend = tracked.value.__notes__
    assert name in head
    wanted = [
        f"  made      {op} at {__file__}:{line_of(__file__, mark)} in {program.__name__}:"
        for op, mark in (text.split(maxsplit=1) for text in made)
    ]
    assert [line.partition(":  ")[0] + ":" for line in lines] == wanted
    assert (
        f"  written   at {__file__}:{line_of(__file__, written)} in {program.__name__}:  " in last
    )
    assert "`select`" in mend


@pytest.mark.parametrize("program", [normalizes_rows, edits_what_exp_saved])
def test_nested_trackers_tell_it_once(program) -> None:
    with pytest.raises(RuntimeError) as alone, vt.track():
        program()
    with pytest.raises(RuntimeError) as nested, vt.track(), vt.track():
        program()
    assert nested.value.__notes__ == alone.value.__notes__


@pytest.mark.parametrize("lower", [NoOp, nullcontext])
def test_the_line_that_made_it_is_beyond_modes(lower) -> None:
    with pytest.raises(RuntimeError) as error, vt.track(), lower(), NoOp():
        normalizes_rows()
    (made,) = [line for line in error.value.__notes__ if "made  " in line]
    assert f"{__file__}:{line_of(__file__, 'ROWS')} in normalizes_rows:" in made


def test_nothing_is_noted_of_views_without_a_record() -> None:
    with pytest.raises(RuntimeError) as error, vt.track(record="none"):
        normalizes_rows()
    assert not any("made  " in line for line in error.value.__notes__)


def writes_a_view_of_a_function() -> None:
    v = Flip.apply(torch.ones(2, 3, requires_grad=True) + 0)
    v.mul_(2)  # FUNCTION EDIT


def writes_a_view_made_under_no_grad() -> None:
    base = torch.ones(2, requires_grad=True) + 0
    with torch.no_grad():
        v = base[1:]
    v.mul_(2)  # NO GRAD EDIT


def writes_a_view_made_in_inference_mode() -> None:
    base = torch.ones(2, requires_grad=True) + 0
    with torch.inference_mode():
        v = base[1:]
    v.mul_(2)  # INFERENCE EDIT


@pytest.mark.parametrize(
    ("program", "mark", "mend"),
    [
        (writes_a_view_of_a_function, "FUNCTION EDIT", "clone it in forward"),
        (writes_a_view_made_under_no_grad, "NO GRAD EDIT", "in the same grad mode"),
        (writes_a_view_made_in_inference_mode, "INFERENCE EDIT", "make it outside"),
    ],
)
def test_a_refused_view_is_told_with_its_mend(program, mark, mend) -> None:
    with pytest.raises(RuntimeError) as tracked, vt.track():
        program()
    head, written, last = tracked.value.__notes__
    assert "`v` cannot be written" in head
    assert f"{__file__}:{line_of(__file__, mark)} in {program.__name__}:  v.mul_(2)" in written
    assert mend in last


def test_detaching_a_view_in_place_is_told_of_the_way() -> None:
    @vt.track()
    def frees_the_graph() -> None:
        out = torch.ones(2, 3, requires_grad=True).sigmoid().t()
        out.detach_()

    with pytest.raises(RuntimeError) as error:
        frees_the_graph()
    (note,) = error.value.__notes__
    assert "`out`" in note
    assert "viewtrack.detach_" in note


def test_a_subclass_made_by_its_class_is_told_of_the_way() -> None:
    class Mine(torch.Tensor):
        pass

    with pytest.raises(RuntimeError, match="Creating a new Tensor subclass") as error, vt.track():
        Mine(torch.ones(2))
    (note,) = error.value.__notes__
    assert "as_subclass" in note
