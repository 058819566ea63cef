"""`check_op`, and `python -m viewtrack check`: each fault is planted, and found with its place."""

import ctypes
import sys

import pytest
import torch
from library_ops import HEADS, RAW, axpy_, fresh, memset

from viewtrack import ViewTrackError, library
from viewtrack.testing import check_op
from viewtrack.testing.copies import Copies, share_memory

_lib = torch.library.Library("vtcheck", "DEF")


def defined(schema, body, key="CPU"):
    """An op without any kernel of ours."""
    _lib.define(schema)
    name = schema.split("(")[0]
    _lib.impl(name, body, key)
    return getattr(torch.ops.vtcheck, name).default


def _raw_zero(x):
    memset(x)


def _numpy_alias(x):
    return torch.from_numpy(x.detach().numpy())


def _two(x):
    y = x * 2
    return y, y.view(-1)


def _raw_zero_and_return(x):
    memset(x)
    return x


FAULTS = {
    "undeclared raw write": (
        defined("peek(Tensor x) -> ()", _raw_zero), ("undeclared write", "x", None)),
    "undeclared write": (
        defined("add(Tensor x) -> Tensor", lambda x: x.add_(1).clone()),
        ("undeclared write", "x", None)),
    "undeclared alias": (
        defined("flat(Tensor x) -> Tensor", lambda x: x.view(-1)), ("undeclared alias", "x", 0)),
    "undeclared alias by numpy": (
        defined("array(Tensor x) -> Tensor", _numpy_alias), ("undeclared alias", "x", 0)),
    "a copy": (
        defined("copy(Tensor(a) x) -> Tensor(a)", lambda x: x.clone()), ("no view", "x", 0)),
    "a view that autograd does not know": (
        defined("head(Tensor(a) x) -> Tensor(a)", lambda x: x[:1]), ("unmarked view", "x", 0)),
    "outputs that alias": (
        defined("two(Tensor x) -> (Tensor, Tensor)", _two), ("outputs alias", None, 1)),
    "a raw write that nobody counts": (
        defined("zero_(Tensor(a!) x) -> Tensor(a!)", _raw_zero_and_return),
        ("missing bump", "x", None)),
    "another tensor in the place of self": (
        defined("out(Tensor(a!) x) -> Tensor(a!)", lambda x: x.add_(1).clone()),
        ("missing return", "x", 0)),
}  # fmt: skip


@pytest.mark.parametrize(("op", "fault"), FAULTS.values(), ids=FAULTS)
def test_a_fault_is_found_and_placed(op, fault):
    x = torch.arange(1.0, 5)
    line = sys._getframe().f_lineno + 1
    findings = check_op(op, (x,))
    assert fault in [(f.kind, f.argument, f.output) for f in findings]
    finding = next(f for f in findings if f.kind == fault[0])
    assert (finding.op, finding.input, finding.site.lineno) == (op.name(), 0, line)
    said = str(finding)
    assert f"`{op.name()}`" in said
    assert f"{__file__}:{line}" in said
    if fault[1]:
        assert f"`{fault[1]}`" in said
    if fault[2] is not None:
        assert f"output {fault[2]}" in said
    assert x.tolist() == [1, 2, 3, 4]


def test_a_bump_that_is_lost_under_a_mode_only():
    op = defined("inner_(Tensor(a!) x) -> ()", lambda x: x.add_(1) and None, _EXPLICIT)
    (finding,) = check_op(op, (torch.ones(()),))
    assert finding.kind == "missing bump"
    assert "under a dispatch mode" in finding.message


_EXPLICIT = "CompositeExplicitAutograd"


def test_an_op_that_aliases_for_some_inputs_only():
    op = defined("dense(Tensor x) -> Tensor", lambda x: x.contiguous())
    strided = torch.ones(2, 3).t()
    assert check_op(op, (strided,)) == []
    (finding,) = check_op(op, (strided,), (torch.ones(2, 3),))
    assert (finding.kind, finding.input) == ("undeclared alias", 1)


def test_the_custom_op_of_case_29():
    @torch.library.custom_op("vtlib::clears", mutates_args=())
    def clears(x: torch.Tensor) -> None:
        ctypes.memset(x.data_ptr(), 0, x.numel() * 4)

    (finding,) = check_op(clears, (torch.ones(2),))
    assert finding.kind == "undeclared write"
    assert "`vtlib::clears` changed argument `x`" in str(finding)
    assert "mutates_args=('x',)" in str(finding)


def test_the_custom_op_of_case_32():
    @torch.library.custom_op("vtlib::twice", mutates_args=())
    def twice(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = x * 2
        return y, y.view(-1)

    (finding,) = check_op(twice, (torch.ones(2, 2),))
    assert (finding.kind, finding.output) == ("outputs alias", 1)
    assert "returned output 0 and output 1 in the same memory" in str(finding)


def test_the_ops_of_case_30():
    head = defined("head30(Tensor(a) x, int n) -> Tensor(a)", lambda x, n: x[:n])
    zero_ = defined("zero30_(Tensor(a!) x) -> Tensor(a!)", _raw_zero_and_return)
    (view,) = check_op(head, (torch.ones(4), 2))
    assert (view.kind, view.argument, view.output) == ("unmarked view", "x", 0)
    assert "viewtrack.library.register('vtcheck::head30')" in str(view)
    (write,) = check_op(zero_, (torch.ones(4),))
    assert (write.kind, write.argument) == ("missing bump", "x")
    for op, given in ((head, (torch.ones(4), 2)), (zero_, (torch.ones(4),))):
        assert check_op(library.register(op), given, notes=True) == []


GOOD = {
    **{name: (op, (torch.ones(4), 2)) for name, op in HEADS.items()},
    **{name: (op, (torch.ones(4),)) for name, op in RAW.items()},
    "axpy_": (axpy_, (torch.ones(4), torch.ones(4))),
    "aten.add_": (torch.ops.aten.add_.Tensor, (torch.ones(4), torch.ones(4))),
    "aten.split": (torch.ops.aten.split.Tensor, (torch.ones(4), 2)),
    "aten.mul.out": (
        torch.ops.aten.mul.out,
        ((torch.ones(4), torch.ones(4)), {"out": torch.zeros(4)}),
    ),
    "aten.relu_": (torch.ops.aten.relu_.default, (torch.ones(4),)),
    "aten.detach": (torch.ops.aten.detach.default, (torch.ones(4),)),
    "aten.view.dtype": (torch.ops.aten.view.dtype, (torch.ones(4), torch.int32)),
    "aten.mm": (torch.ops.aten.mm.default, (torch.ones(2, 2), torch.ones(2, 2))),
}


@pytest.mark.parametrize(("op", "given"), GOOD.values(), ids=GOOD)
def test_a_good_op_gives_no_findings(op, given):
    assert check_op(op, given) == []


def test_register_mends_what_is_found():
    op = defined("mend_(Tensor(a!) x) -> Tensor(a!)", _raw_zero_and_return)
    assert [f.kind for f in check_op(op, (torch.ones(2),))] == ["missing bump"]
    assert check_op(library.register(op), (torch.ones(2),)) == []


def test_what_a_body_is_refused_for_is_a_finding():
    op = library.view_op(fresh("(Tensor(a) x) -> Tensor(a)"), lambda x: x.clone())
    (finding,) = check_op(op, (torch.ones(2),))
    assert finding.kind == "error"
    assert "a view of `x`" in finding.message


def test_arguments_that_share_memory_do_so_in_the_copy():
    x = torch.arange(6.0).view(2, 3)
    a, (b, c) = Copies((x[:, 1:], [x.t(), torch.ones(2)])).arguments
    assert share_memory(a, b)
    assert not share_memory(a, c)
    assert not share_memory(a, x)
    assert (a.stride(), a.storage_offset(), a.tolist()) == ((3, 1), 1, x[:, 1:].tolist())
    a.zero_()
    assert b[1:].sum() == 0


def test_an_argument_in_the_memory_of_a_written_one_is_no_fault():
    op = library.inplace_op(
        fresh("(Tensor(a!) x, Tensor y) -> ()"), lambda x, y: x.add_(y.sum()) and None
    )
    x = torch.ones(())
    assert check_op(op, (x, x.view(1))) == []


def test_what_check_op_refuses():
    with pytest.raises(ViewTrackError, match="no op `vtcheck::absent`; in `vtcheck` there is"):
        check_op("vtcheck::absent", (torch.ones(1),))
    with pytest.raises(ViewTrackError, match="in `vtcheck` there is `vtcheck::array`"):
        check_op("vtcheck::arrey", (torch.ones(1),))
    with pytest.raises(ViewTrackError, match=r"nor any other in `vtnowhere`.*import the module"):
        check_op("vtnowhere::absent", (torch.ones(1),))
    with pytest.raises(ViewTrackError, match=r"overloads are .*`aten::add_.Tensor`"):
        check_op("aten::add_", (torch.ones(1),))
    with pytest.raises(ViewTrackError, match=r"write `namespace::name`, such as .*`vtlib::axpy_`"):
        check_op("axpy_", (torch.ones(1),))
    with pytest.raises(ViewTrackError, match="does not name one op"):
        check_op(torch.ops.aten.add_, (torch.ones(1),))
    with pytest.raises(ViewTrackError, match="at least one input"):
        check_op(torch.ops.aten.relu_.default)
