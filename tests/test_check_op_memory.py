"""What `check_op` sees of memory: writes beside an argument, memory that an op keeps, fences."""

import ctypes

import numpy as np
import pytest
import torch
from library_ops import RAW, fresh, memset

from viewtrack import library
from viewtrack.testing import check_op
from viewtrack.testing.copies import Copies, Fence, share_memory

_lib = torch.library.Library("vtbeside", "DEF")


def defined(schema, body, key="CPU"):
    """An op without any kernel of ours."""
    _lib.define(schema)
    name = schema.split("(")[0]
    _lib.impl(name, body, key)
    return getattr(torch.ops.vtbeside, name).default


def kinds(findings):
    return [(f.kind, f.argument, f.output) for f in findings]


def nothing(*done):
    """For lambdas of ops that return nothing."""


def zero(t, first, count):
    """Zero `count` floats from the `first` of t on, counted without its strides."""
    ctypes.memset(t.data_ptr() + 4 * first, 0, 4 * count)


def middle():
    return torch.arange(1.0, 17)[4:8]


# Writes beside the argument.


BESIDE = {
    "after a written part": (
        defined("after_(Tensor(a!) x) -> ()", lambda x: zero(x, 0, 6)), middle(), "16 bytes after"),
    "before a part that is only read": (
        defined("before(Tensor x) -> ()", lambda x: zero(x, -2, 2)), middle(), "8 bytes before"),
    "beyond the storage": (
        defined("beyond(Tensor x) -> ()", lambda x: zero(x, 4, 1)), torch.ones(4),
        "16 bytes after"),
    "before the storage": (
        defined("below(Tensor x) -> ()", lambda x: zero(x, -1, 1)), torch.ones(4),
        "4 bytes before"),
    "a strided tensor taken for contiguous": (
        defined("dense_(Tensor(a!) x) -> ()", memset), torch.ones(8)[::2], "4 bytes after"),
    "an expanded tensor taken for contiguous": (
        defined("expanded_(Tensor(a!) x) -> ()", memset), torch.ones(1).expand(3),
        "4 bytes after"),
}  # fmt: skip


@pytest.mark.parametrize(("op", "x", "place"), BESIDE.values(), ids=BESIDE)
def test_a_write_beside_the_argument(op, x, place):
    before = x.clone()
    findings = [f for f in check_op(op, (x,)) if f.kind != "missing bump"]
    assert kinds(findings) == [("stray write", "x", None)]
    assert f"beside argument `x`, {place}" in str(findings[0])
    assert torch.equal(x, before)


def test_the_same_by_numpy():
    def body(x):
        whole = np.lib.stride_tricks.as_strided(x.numpy(), (6,), (4,))
        whole[4:] = 0

    op = defined("numpy(Tensor x) -> ()", body)
    assert kinds(check_op(op, (middle(),))) == [("stray write", "x", None)]


def test_an_op_that_goes_by_the_strides_is_clean():
    op = library.inplace_op(fresh("(Tensor(a!) x) -> ()"), lambda x: nothing(x.zero_()))
    scalars = (torch.ones(()), torch.ones(1)[0])
    assert check_op(op, *((x,) for x in scalars)) == []
    double_ = torch.ops.aten.mul_.Tensor
    inputs = (torch.ones(8)[::2], middle(), torch.ones(4, 4).t()[1:], torch.ones(2, 2)[:, :0])
    assert check_op(double_, *((x, torch.tensor(2.0)) for x in inputs)) == []


@pytest.mark.parametrize("op", RAW.values(), ids=RAW)
def test_raw_kernels_on_what_they_are_made_for_are_clean(op):
    assert check_op(op, (torch.ones(4),), (torch.ones(2, 3),)) == []


def test_the_part_of_another_argument_is_that_argument_s():
    def body(x, y):
        x.zero_()
        y[-1] = 0

    op = defined("both_(Tensor(a!) x, Tensor y) -> ()", body, "CompositeExplicitAutograd")
    whole = torch.ones(6)
    findings = [f for f in check_op(op, (whole[:4], whole[2:])) if f.kind != "missing bump"]
    assert kinds(findings) == [("undeclared write", "y", None)]

    inner = library.inplace_op(
        fresh("(Tensor(a!) x, Tensor y) -> ()"), lambda x, y: nothing(x.zero_())
    )
    assert check_op(inner, (whole[:4], whole[2:])) == []


def test_an_element_of_a_list_is_named():
    op = defined("second(Tensor[] xs) -> ()", lambda xs: zero(xs[1], 0, 1))
    (finding,) = check_op(op, ([torch.ones(2), torch.ones(2)],))
    assert kinds([finding]) == [("undeclared write", "xs", None)]
    assert "`xs[1]`" in str(finding)


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.tensor([float("nan"), 1.0]),
        lambda: torch.tensor([1 + 2j, 3]),
        lambda: torch.tensor([1 + 2j, 3]).conj(),
        lambda: torch.tensor([True, False]),
        lambda: torch.tensor([1.0, 2.0], dtype=torch.bfloat16),
        lambda: torch.eye(2).to_sparse(),
    ],
    ids=["nan", "complex", "conj", "bool", "bfloat16", "sparse"],
)
def test_bytes_of_every_kind_are_compared(make):
    name = f"kind{id(make)}"
    reads = defined(
        f"{name}(Tensor x, bool writes) -> ()", _maybe_write, "CompositeExplicitAutograd"
    )
    assert check_op(reads, (make(), False)) == []
    assert ("undeclared write", "x", None) in kinds(check_op(reads, (make(), True)))


def _maybe_write(x, writes):
    if writes:
        (x.data if x.layout is torch.strided else x._values()).zero_()


def test_minus_zero_is_not_zero():
    op = defined("sign(Tensor x) -> ()", lambda x: nothing(x.data.mul_(-1)))
    (finding,) = [f for f in check_op(op, (torch.zeros(()),)) if f.kind == "undeclared write"]
    assert finding.argument == "x"


def test_a_write_of_the_same_bytes_counts():
    op = defined("touch(Tensor x) -> ()", lambda x: nothing(x.add_(0)), "CompositeExplicitAutograd")
    assert kinds(check_op(op, (torch.ones(2),))) == [("undeclared write", "x", None)]


def test_one_tensor_for_two_arguments():
    op = library.inplace_op(
        fresh("(Tensor(a!) x, Tensor y) -> ()"), lambda x, y: nothing(x.add_(y))
    )
    x = torch.ones(2)
    assert check_op(op, (x, x), (x, x.view(2))) == []
    (a, b), c = Copies(((x, x), x.view(2))).arguments
    assert a is b
    assert c is not a
    assert share_memory(a, c)


def test_sizes_and_memory_of_an_argument():
    op = defined("grow(Tensor x) -> ()", lambda x: nothing(x.resize_(9).zero_()))
    assert kinds(check_op(op, (torch.ones(2),))) == [("undeclared write", "x", None)]
    op = defined("swap(Tensor x) -> ()", lambda x: setattr(x, "data", x + 1))
    (finding,) = check_op(op, (torch.ones(2),))
    assert "gave other sizes, strides or memory to argument `x`" in str(finding)


def test_an_out_tensor_of_other_sizes_is_a_note():
    out = {"out": torch.zeros(9)}
    double = torch.ops.aten.mul.out
    x = torch.ones(2)
    assert check_op(double, ((x, x), out)) == []
    (note,) = check_op(double, ((x, x), out), notes=True)
    assert (note.kind, note.argument, note.is_note) == ("resized", "out", True)
    assert check_op(double, ((x, x), {"out": torch.zeros(2)}), notes=True) == []
    assert check_op(torch.ops.aten.t_.default, (torch.ones(2, 3),), notes=True) == []


def test_a_write_that_is_declared_and_never_done_is_a_note():
    op = library.inplace_op(
        fresh("(Tensor(a!) x, bool go) -> ()"), lambda x, go: nothing(go and x.zero_())
    )
    x = torch.ones(2)
    assert check_op(op, (x, False)) == []
    (note,) = check_op(op, (x, False), notes=True)
    assert (note.kind, note.argument) == ("unwritten", "x")
    assert str(note).startswith("note: `")
    assert check_op(op, (x, False), (x, True), notes=True) == []


# Memory that the op keeps.


def test_a_memoised_output_is_found_however_it_is_keyed():
    for number, key in enumerate((lambda x: x.shape, lambda x: x.data_ptr(), lambda x: x.sum())):
        op = defined(f"memo{number}(Tensor x) -> Tensor", _memoised({}, key))
        (finding,) = check_op(op, (torch.ones(3),))
        assert kinds([finding]) == [("kept memory", None, 0)]
        assert "an earlier call returned as output 0" in str(finding)


def _memoised(memo, key):
    def body(x):
        k = key(x)
        k = float(k) if isinstance(k, torch.Tensor) else k
        return memo.setdefault(k, x * 2)

    return body


def test_a_part_of_what_is_kept_and_an_older_argument():
    kept = torch.ones(4)
    op = defined("part(Tensor x) -> Tensor", lambda x: kept[: len(x)])
    assert kinds(check_op(op, (torch.ones(2),))) == [("kept memory", None, 0)]

    last = []

    def previous(x):
        last.append(x)
        return last[-2] if len(last) > 1 and last[-2] is not x else x + 1

    op = defined("previous(Tensor x) -> Tensor", previous)
    (finding,) = check_op(op, (torch.ones(2),))
    assert "an earlier call was given as `x`" in str(finding)


def test_a_view_of_an_older_base():
    first = []

    def body(x):
        first.append(x)
        return first[0][:1]

    op = defined("older(Tensor(a) x) -> Tensor(a)", body)
    found = kinds(check_op(op, (torch.ones(2),)))
    assert ("kept memory", None, 0) in found
    assert ("no view", "x", 0) in found


def test_the_numpy_array_that_an_op_keeps():
    buffer = np.zeros(4, dtype=np.float32)
    op = defined("array(Tensor x) -> Tensor", lambda x: torch.from_numpy(buffer)[: len(x)])
    assert kinds(check_op(op, (torch.ones(2),))) == [("kept memory", None, 0)]


def test_new_tensors_each_time_are_clean():
    op = defined("new(Tensor x, float p) -> (Tensor, Tensor[], int)", _random)
    assert check_op(op, (torch.ones(3), 0.5), (torch.ones(3), 0.5), (torch.ones(1, 2), 0.5)) == []


def _random(x, p):
    return torch.nn.functional.dropout(x, p), [torch.rand_like(x), torch.zeros(2)], 3


# The copies.


def test_a_fence_keeps_content_and_sees_its_neighbours():
    for size, width in ((4, 64), (1, 1), (1000, 100)):
        content = torch.arange(size, dtype=torch.uint8)
        fence = Fence(content.untyped_storage(), width)
        inner = torch.empty(0, dtype=torch.uint8).set_(fence.storage)
        assert inner.tolist() == content.tolist()
        assert inner.data_ptr() % 64 == 0
        inner.zero_()
        assert fence.harmed() is None
        ctypes.memset(inner.data_ptr() + size + width - 1, 0, 1)
        ctypes.memset(inner.data_ptr() - width, 1, 1)
        assert fence.harmed() == -width


def test_an_op_that_the_fences_are_in_the_way_of():
    op = defined("resizes_(Tensor(a!) x) -> ()", lambda x: nothing(x.resize_(99).fill_(2)))
    findings = check_op(op, (torch.ones(2),), notes=True)
    assert ("resized", "x", None) in kinds(findings)
    assert "error" not in {f.kind for f in findings}
    assert check_op(torch.ops.aten._lazy_clone.default, (torch.ones(2),)) == []


def test_copies_without_fences():
    x = torch.ones(2)
    copies = Copies((x,), fenced=False)
    assert copies.fences == {}
    assert copies.arguments[0].untyped_storage().resizable()
    assert not share_memory(copies.arguments[0], x)


def test_a_fence_is_as_wide_as_what_it_guards():
    copies = Copies((torch.ones(1).expand(1000),))
    (fence,) = copies.fences.values()
    zero(copies.arguments[0], 999, 1)
    assert fence.harmed() == 999 * 4


def test_an_op_that_takes_its_argument_once_only():
    def body(x):
        if x.dim() != 1:
            raise ValueError("a vector")
        x.unsqueeze_(0)

    op = defined("once_(Tensor(a!) x) -> ()", body, "CompositeExplicitAutograd")
    assert check_op(op, (torch.ones(2),)) == []


def test_what_has_no_memory_shares_none():
    op = defined("flat(Tensor x) -> Tensor", lambda x: x.view(-1))
    assert check_op(op, (torch.ones(0, 2),)) == []
    assert kinds(check_op(op, (torch.ones(1, 2),))) == [("undeclared alias", "x", 0)]
