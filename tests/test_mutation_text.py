"""The text of the error, for each kind of write."""

import functools
import re

import pytest
import torch
import torch.nn.functional as F
from expecttest import assert_expected_inline
from torch.utils.checkpoint import checkpoint
from write_ways import OPS, one_process_group

from viewtrack import MutatedTensorError, MutationGuard, track
from viewtrack.checkpoint import create_selective_checkpoint_contexts, guard

MATMULS = [torch.ops.aten.mm.default, torch.ops.aten.bmm.default]


def text_of(region, contexts=create_selective_checkpoint_contexts, between=None, **options):
    """The error's text, with lines counted from the start of the region."""
    torch.manual_seed(0)
    x, w = torch.randn(2, 3, 3, requires_grad=True), torch.randn(3, 3, requires_grad=True)
    kept = []
    loss = checkpoint(
        lambda x, w: region(x, w, kept) if between else region(x, w),
        x,
        w,
        use_reentrant=False,
        context_fn=functools.partial(contexts, MATMULS, **options),
    )
    if between:
        between(kept[0])
    with pytest.raises(MutatedTensorError) as caught:
        loss.backward()
    return normal(str(caught.value), region)


def normal(text, function):
    first = function.__code__.co_firstlineno

    def place(match):
        return f"test.py:+{int(match[1]) - first}"

    text = re.sub(re.escape(__file__) + r":(\d+)", place, text)
    return re.sub(r"on line (\d+)", lambda m: f"on line +{int(m[1]) - first}", text)


def test_in_place_through_an_unsafe_view():
    def region(x, w):
        h = x @ w
        h.mul_(2)
        return h.sin().sum()

    assert_expected_inline(
        text_of(region),
        """\
a tensor cached by selective checkpointing has been mutated before it was reused
  saved     aten.mm.default -> f32[6, 3]          test.py:+1 in region:  h = x @ w
  written   aten.mul_.Tensor(self)                test.py:+2 in region:  h.mul_(2)
            through aten._unsafe_view.default, version 0 -> 1, thread MainThread
  mend      use the out-of-place op on line +2, or add 'aten.mul_' to allow=""",
    )


def test_all_sites_in_one_report():
    def region(x, w):
        h = x[0] @ w
        F.relu(h, inplace=True)
        g = x @ w
        g[0].masked_fill_(w > 0, 0)
        torch._foreach_add_([g], 1)
        return h.sum() + g.sin().sum()

    assert_expected_inline(
        text_of(region),
        """\
a tensor cached by selective checkpointing has been mutated before it was reused
  saved     aten.mm.default -> f32[3, 3]          test.py:+1 in region:  h = x[0] @ w
  written   aten.relu_.default(self)              test.py:+2 in region:  F.relu(h, inplace=True)
            version 0 -> 1, thread MainThread, idempotent
  saved     aten.mm.default -> f32[6, 3]          test.py:+3 in region:  g = x @ w
  written   aten.masked_fill_.Scalar(self)        test.py:+4 in region:  g[0].masked_fill_(w > 0, 0)
            version 0 -> 1, thread MainThread, idempotent
  written   aten._foreach_add_.Scalar(self)       test.py:+5 in region:  torch._foreach_add_([g], 1)
            through aten._unsafe_view.default, version 1 -> 2, thread MainThread
  mend      use the out-of-place op on line +2, or add 'aten.relu_' to allow=
            use the out-of-place op on line +4, or add 'aten.masked_fill_' to allow=
            use the out-of-place op on line +5, or add 'aten._foreach_add_' to allow=""",
    )


def test_out_variant():
    def region(x, w):
        h = x[0] @ w
        with torch.no_grad():
            torch.add(w, 1, out=h)
        return h.sin().sum()

    assert_expected_inline(
        text_of(region),
        """\
a tensor cached by selective checkpointing has been mutated before it was reused
  saved     aten.mm.default -> f32[3, 3]          test.py:+1 in region:  h = x[0] @ w
  written   aten.add.out(out)                     test.py:+3 in region:  torch.add(w, 1, out=h)
            version 0 -> 1, thread MainThread
  mend      write to a copy on line +3, or add 'aten.add' to allow=""",
    )


def test_bytes_alone():
    def region(x, w):
        h = x[0] @ w
        h.detach().numpy()[:] = 0
        return h.sin().sum()

    assert_expected_inline(
        text_of(region, check="content"),
        """\
a tensor cached by selective checkpointing has been mutated before it was reused
  saved     aten.mm.default -> f32[3, 3]          test.py:+1 in region:  h = x[0] @ w
  written   its bytes changed, and no op that PyTorch saw wrote them
  mend      look for numpy, a raw pointer or a kernel that does not declare what it mutates""",
    )


def test_between_forward_and_backward_where_no_mode_is():
    def region(x, w, kept):
        h = x[0] @ w
        kept.append(h)
        return h.sin().sum()

    def write(h):
        h.detach().zero_()

    assert_expected_inline(
        text_of(region, between=write),
        """\
a tensor cached by selective checkpointing has been mutated before it was reused
  saved     aten.mm.default -> f32[3, 3]          test.py:+1 in region:  h = x[0] @ w
  written   by an op that no mode saw, version 0 -> 1
  mend      run it under viewtrack.track(), in every thread, to learn the line""",
    )


def test_between_forward_and_backward_under_track():
    def region(x, w, kept):
        h = x[0] @ w
        kept.append(h)
        return h.sin().sum()

    def write(h):
        with track():
            h.detach().zero_()

    assert_expected_inline(
        text_of(region, between=write),
        """\
a tensor cached by selective checkpointing has been mutated before it was reused
  saved     aten.mm.default -> f32[3, 3]          test.py:+1 in region:  h = x[0] @ w
  written   aten.zero_.default(self)              test.py:+7 in write:  h.detach().zero_()
            version 0 -> 1, thread MainThread, idempotent
  mend      use the out-of-place op on line +7, or add 'aten.zero_' to allow=""",
    )


def test_a_foreign_pair_whose_own_check_fires():
    def region(x, w):
        h = x[0] @ w
        h.mul_(2)
        return h.sin().sum()

    def foreign(ops):
        return guard(lambda: torch.utils.checkpoint.create_selective_checkpoint_contexts(ops))()

    assert_expected_inline(
        text_of(region, foreign),
        """\
a tensor cached by selective checkpointing has been mutated before it was reused
  saved     aten.mm.default -> f32[3, 3]          test.py:+1 in region:  h = x[0] @ w
  written   aten.mul_.Tensor(self)                test.py:+2 in region:  h.mul_(2)
            version 0 -> 1, thread MainThread
  mend      use the out-of-place op on line +2, or add 'aten.mul_' to allow=""",
    )


def test_what_a_region_starts_from():
    class Gate(torch.nn.Module):
        load = None

        def __init__(self):
            super().__init__()
            self.register_buffer("seen", torch.zeros(3))

        def forward(self, x, w):
            s = x[0] @ w
            self.load = s.detach().sum(0)
            self.seen += 1
            return s.sin().sum()

    gate = Gate()
    text = text_of(lambda x, w: gate(x, w), check_inputs=True)
    text = re.sub(r"\+-?\d+", "+N", text)
    assert_expected_inline(
        text,
        """\
what a checkpointed region starts from has been mutated before it was reused
  changed   `Gate.load` was None when the forward began and is f32[3] now, made at test.py:+N in forward; if it may, add 'Gate.load' to allow=
  saved     Gate.seen -> f32[3]                   test.py:+N in forward:  self.seen += 1
  written   aten.add_.Tensor(self)                test.py:+N in forward:  self.seen += 1
            version 0 -> 1, thread MainThread
  mend      use the out-of-place op on line +N, or add 'aten.add_' to allow=""",  # noqa: E501
    )


def test_a_guarded_tensor_and_many_writes():
    def body():
        t = torch.ones(2, 2, dtype=torch.bfloat16)
        with MutationGuard() as guard:
            guard.save(t, "the table")
            for _ in range(34):
                t.data.t()[0].add_(1)

    with pytest.raises(MutatedTensorError) as caught:
        body()
    lines = normal(str(caught.value), body).splitlines()
    assert_expected_inline(
        "\n".join([*lines[:4], "...", *lines[-2:]]),
        """\
a guarded tensor has been mutated before it was reused
  saved     the table -> bf16[2, 2]               test.py:+3 in body:  guard.save(t, "the table")
  written   aten.add_.Tensor(self)                test.py:+5 in body:  t.data.t()[0].add_(1)
            version 0 -> 1, thread MainThread
...
            and 2 more writes
  mend      use the out-of-place op on line +5, or add 'aten.add_' to allow=""",
    )


def test_every_way_to_write(tmp_path):
    """What is said of each op of the table, without places."""
    told = []
    with one_process_group(tmp_path / "store"):
        for op in OPS:

            def region(x, w, op=op):
                h = x[0] @ w
                op.write(h.detach())
                return (h * h).sum()

            text = text_of(region, check="storage" if op.seen else "content")
            _, _, written = text.partition("written")
            line, _, after = written.partition("\n")
            after = after.strip().split("\n")[0] if op.seen else ""
            told.append(f"{op.name}: {line.strip().split('  ')[0]} {after}".rstrip())
    assert_expected_inline(
        # From 2.15 on a number is set by another overload.
        "\n".join(told).replace("setitem: aten.fill_.Scalar", "setitem: aten.fill_.Tensor"),
        """\
mul_: aten.mul_.Tensor(self) version 0 -> 1, thread MainThread
iadd: aten.add_.Tensor(self) version 0 -> 1, thread MainThread
setitem: aten.fill_.Tensor(self) version 0 -> 1, thread MainThread, idempotent
copy_: aten.copy_.default(self) version 0 -> 1, thread MainThread
out: aten.add.out(out) version 0 -> 1, thread MainThread
foreach: aten._foreach_mul_.Scalar(self) version 0 -> 1, thread MainThread
fused_sgd: aten._fused_sgd_.default(self) version 0 -> 0, thread MainThread
fused_adam: aten._fused_adam_.default(self) version 0 -> 0, thread MainThread
fused_adamw: aten._fused_adamw_.default(self) version 0 -> 0, thread MainThread
fused_adagrad: aten._fused_adagrad_.default(self) version 0 -> 0, thread MainThread
resize_and_refill: aten.fill_.Scalar(self) version 2 -> 3, thread MainThread, idempotent
set_and_write: aten.fill_.Scalar(self) version 1 -> 2, thread MainThread, idempotent
declared_custom_op: write_ways.declared.default(x) version 0 -> 0, thread MainThread
torch_custom_op: write_ways.custom.default(x) version 0 -> 1, thread MainThread
undeclared_custom_op: its bytes changed, and no op that PyTorch saw wrote them
numpy: its bytes changed, and no op that PyTorch saw wrote them
pointer: its bytes changed, and no op that PyTorch saw wrote them
collective: c10d.scatter_.default(output_tensors) version 0 -> 1, thread MainThread
all_gather: c10d.allgather_.default(output_tensors) version 0 -> 1, thread MainThread
reduce_scatter: aten.copy_.default(self) version 0 -> 1, thread MainThread
functional: _c10d_functional.all_gather_into_tensor_out.default(out) version 0 -> 1, thread MainThread""",  # noqa: E501
    )


def test_a_loop_is_told_once_with_a_count():
    def region(x, w):
        h = x[0] @ w
        for i in range(40):
            h.add_(1)
            h[i % 3].mul_(2)
            if i < 2:
                h.neg_()
        return h.sin().sum()

    assert_expected_inline(
        text_of(region),
        """\
a tensor cached by selective checkpointing has been mutated before it was reused
  saved     aten.mm.default -> f32[3, 3]          test.py:+1 in region:  h = x[0] @ w
  written   aten.add_.Tensor(self)                test.py:+3 in region:  h.add_(1)
            version 0 -> 1, thread MainThread
            ... 14 more times
  written   aten.mul_.Tensor(self)                test.py:+4 in region:  h[i % 3].mul_(2)
            version 1 -> 2, thread MainThread
            ... 14 more times
  written   aten.neg_.default(self)               test.py:+6 in region:  h.neg_()
            version 2 -> 3, thread MainThread
            ... once more
            and 50 more writes
  mend      use the out-of-place op on line +3, or add 'aten.add_' to allow=
            use the out-of-place op on line +4, or add 'aten.mul_' to allow=
            use the out-of-place op on line +6, or add 'aten.neg_' to allow=""",
    )


def test_all_writes_of_a_loop_are_in_the_error():
    table = torch.ones(3)
    with track():
        guard = MutationGuard()
        entry = guard.save(table, "the table")
        for _ in range(5):
            table.add_(1)
    with pytest.raises(MutatedTensorError) as caught:
        entry.get()
    assert [write.version_after for write in caught.value.writes] == [1, 2, 3, 4, 5]
    assert "... 4 more times" in str(caught.value)
