"""`TrackedTensor` against the tensors inside it, over torch's OpInfo database.

A part of the database runs here each time, the whole of it with ``pytest -m heavy`` on this file.
"""

import pytest
import torch
from one_thread import one_thread  # noqa: F401 - a fixture for each test of this file
from subclass_sweep import EXCEPTIONS, Findings, compared, sweep, sweep_calls
from wrappers import make_wrapper

from viewtrack import TrackedTensor
from viewtrack.testing.call import Call
from viewtrack.testing.opinfo import calls, database

CHOSEN = [
    "add", "as_strided", "chunk", "conj", "copysign", "diagonal", "expand", "imag", "index_put",
    "linalg.pinv", "matmul", "max.reduction_with_dim", "narrow", "nn.functional.batch_norm",
    "nn.functional.linear", "permute", "reshape", "resize_", "resolve_conj", "scatter_add",
    "select", "split", "squeeze", "t", "transpose", "unbind", "unfold", "unsafe_split", "view",
    "view_as_complex", "view_as_real", "where", "_foreach_add", "_foreach_copy",
]  # fmt: skip


def assert_the_same(findings):
    assert findings.calls
    assert findings.failed == []
    assert [str(d) for d in findings.differences] == []


def test_the_chosen_ops():
    findings = Findings()
    named = {op.full_name: op for op in database()}
    for name in CHOSEN:
        sweep_calls(calls(named[name], samples=1), findings)
    assert_the_same(findings)


@pytest.mark.heavy
@pytest.mark.parametrize("part", range(32))
def test_the_whole_database(part):
    assert_the_same(sweep(start=part, every=32))


def test_every_exception_has_a_reason():
    assert all(len(reason) > 20 for _, _, reason in EXCEPTIONS)


# What the comparison must be able to see.


class Forgetful(TrackedTensor):
    """Writes to a copy."""

    @classmethod
    def run(cls, func, args, kwargs):
        if func is torch.ops.aten.add_.Tensor:
            args = (args[0].like(args[0].unwrap().clone()), *args[1:])
        return super().run(func, args, kwargs)


def test_a_wrapper_whose_writes_are_lost_is_seen():
    def write(t):
        t.view(-1).add_(1)
        return t

    call = Call(write, (torch.ones(2, 3),), variant="in-place")
    assert compared(call) == []
    found = [d.what for d in compared(call, Forgetful)]
    assert "in[0].value" in found


def test_a_wrapper_that_does_not_alias_storage_is_seen():
    bare = make_wrapper(correct=lambda func, args, kwargs, out: out)
    bare.__deepcopy__ = lambda self, memo: bare(self.e.clone())
    found = [d.what for d in compared(Call(lambda t: t.view(-1), (torch.ones(2, 3),)), bare)]
    assert "out[0].storage" in found
