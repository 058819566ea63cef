"""The tracker against stock torch, over torch's OpInfo database.

A part of the database runs here each time; the whole of it with ``pytest -m heavy`` on this file
or, with a report, ``python -m viewtrack.testing ops``.
"""

from __future__ import annotations

import pytest
import torch
from handlers import NoOp
from one_thread import one_thread  # noqa: F401 - a fixture for each test of this file

from viewtrack.testing.call import Call
from viewtrack.testing.opinfo import calls, database
from viewtrack.testing.sweep import BETTER_THAN_STOCK, Findings, sweep, sweep_calls

# Ops of every kind that the tracker treats in a way of its own.
CHOSEN = [
    "add", "addmm", "as_strided", "cat", "chunk", "contiguous", "conj", "copysign",
    "diagonal", "expand", "fill", "flatten", "imag", "index_put", "linalg.pinv", "masked_scatter",
    "matmul", "meshgrid", "movedim", "narrow", "nn.functional.batch_norm",
    "nn.functional.dropout", "nn.functional.linear", "nn.functional.relu", "permute", "ravel",
    "reshape", "resize_", "resolve_conj", "scatter_add", "select", "split", "squeeze", "t", "take",
    "transpose", "unbind", "unflatten", "unfold", "unsafe_chunk", "unsafe_split", "unsqueeze",
    "view", "view_as_complex", "view_as_real", "vsplit", "where", "_foreach_add", "_foreach_sqrt",
]  # fmt: skip


def assert_exact(findings):
    assert findings.calls
    assert findings.failed == []
    assert [str(d) for d in findings.beyond] == []
    assert [str(d) for d in findings.below] == []


def test_the_chosen_ops():
    findings = Findings()
    named = {op.name: op for op in database()}
    for name in CHOSEN:
        sweep_calls(calls(named[name], samples=2), name, findings)
    assert_exact(findings)
    assert findings.mended


def test_some_of_every_part_of_the_database():
    ops = database()[::25]
    findings = Findings()
    for op in ops:
        sweep_calls(calls(op, samples=1), op.name, findings)
    assert_exact(findings)


def test_an_op_that_is_composite_and_has_a_kernel_of_its_own():
    findings = Findings()
    (matmul,) = database("matmul")[:1]
    sweep_calls((c for c in calls(matmul) if c.variant == "out"), "matmul", findings)
    assert_exact(findings)


@pytest.mark.heavy
def test_the_whole_database():
    assert_exact(sweep())


@pytest.mark.parametrize(("name", "variant"), BETTER_THAN_STOCK)
def test_what_is_better_than_stock_is_still_so(name, variant):
    """If stock torch comes to count these writes the exception has to go."""
    (op,) = [op for op in database() if op.name == name]
    call = next(c for c in calls(op, samples=1) if c.variant == variant)
    inputs = call.inputs()
    out = inputs.kwargs["out"]
    before = out._version
    call.fn(*inputs.args, **inputs.kwargs)
    assert out._version == before


def test_a_sweep_sees_what_is_beyond_a_mode(monkeypatch):
    """It can fail: with a tracker that is a mode which answers wrongly."""

    class Wrong(NoOp):
        def __init__(self, **kwargs):
            super().__init__()

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            return out + 1 if func is torch.ops.aten.sin.default else out

    monkeypatch.setattr("viewtrack.testing.sweep.track", Wrong)
    findings = Findings()
    sweep_calls([Call(torch.sin, (torch.ones(2),))], "sin", findings)
    assert {d.what for d in findings.beyond} == {"out[0].value"}
    sweep_calls([Call(list, compares_values=False)], "none", findings)
    assert findings.failed == []


def test_a_call_that_cannot_be_compared_is_told():
    findings = Findings()

    class Odd:
        def __deepcopy__(self, memo):
            raise TypeError("not me")

    sweep_calls([Call(torch.sin, (Odd(),), name="odd")], "sin", findings)
    assert findings.failed == ["odd: TypeError: not me"]
    assert "1 calls not compared" in findings.text()
