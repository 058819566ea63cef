"""`check_op` on torch's own ops: it finds nothing but what is listed here, and that is true.

A part of torch's OpInfo database is tried each time; the whole of it with ``pytest -m heavy``.
"""

from __future__ import annotations

from collections import Counter
from contextlib import suppress

import pytest
import torch
from handlers import NoOp
from one_thread import one_thread  # noqa: F401 - a fixture for each test of this file

from viewtrack.plan import plan_of
from viewtrack.testing import check_op
from viewtrack.testing.aliases import known_calls
from viewtrack.testing.below import in_handler
from viewtrack.testing.copies import Copies
from viewtrack.testing.opinfo import calls, database
from viewtrack.undeclared import UNDECLARED_ALIASES

# Ops that may return the very argument, or other memory of one, where their schema has none. Those
# of the library's table are among the found by their own name.
RETURNS_ITS_ARGUMENT = UNDECLARED_ALIASES | {
    "aten::alpha_dropout",
    "aten::cartesian_prod",
    "aten::conj_physical",
    "aten::dropout",
    "aten::feature_alpha_dropout",
    "aten::feature_dropout",
    "aten::histogramdd.TensorList_bins",
    "aten::lift",
}
# Ops whose declared view is a copy for some inputs: `to` and its like say so in their documents.
VIEWS_FOR_SOME = {
    "aten::_autocast_to_full_precision",
    "aten::_autocast_to_reduced_precision",
    "aten::coalesce",
    "aten::contiguous",
    "aten::ravel",
    "aten::reshape",
    "aten::to.device",
    "aten::to.dtype",
}
# Running statistics, written undeclared.
WRITES_UNDECLARED = {
    "aten::batch_norm",
    "aten::instance_norm",
    "aten::native_batch_norm",
    "aten::native_batch_norm.out",
}
# Declared writes that torch itself does not count, with or without a mode.
UNCOUNTED = {
    "aten::_batch_norm_with_update",
    "aten::_native_batch_norm_legit",
    "aten::_native_batch_norm_legit.out",
    "aten::kron.out",
    "aten::rrelu_with_noise",
    "aten::rrelu_with_noise_",
}
LEAVES_OUT_UNWRITTEN = {"aten::linalg_matrix_rank.atol_rtol_tensor_out"}

CHOSEN = [
    "add", "addmm", "as_strided", "cat", "chunk", "conj", "diagonal", "dsplit", "fill", "index_put",
    "kron", "linalg.lu", "linalg.svd", "matmul", "meshgrid", "mul", "narrow",
    "nn.functional.batch_norm", "nn.functional.dropout", "nn.functional.relu", "permute", "reshape",
    "resize_", "select", "sort", "split", "squeeze", "t", "topk", "unbind", "unsafe_split",
    "view_as_complex", "where", "_foreach_add", "_foreach_sqrt",
]  # fmt: skip


class Issued(NoOp):
    """Keeps what ops were called with, as it was then."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        with suppress(Exception):  # what has no copy is no input
            given = Copies((args, kwargs or {}), fenced=False).arguments
            self.calls.append((func, (tuple(given[0]), dict(given[1]))))
        return func(*args, **(kwargs or {}))


def issued(call):
    """The ops that a call comes to, with their arguments: composite ones too, as in a handler."""
    for issue in (lambda run: run(), in_handler):
        inputs = call.inputs(requires_grad=False)
        mode = Issued()
        with mode, suppress(Exception):
            issue(lambda inputs=inputs: call.fn(*inputs.args, **inputs.kwargs))
        yield from mode.calls


def is_known(finding):
    plan = plan_of(_op_of(finding.op))
    listed = {
        "undeclared alias": RETURNS_ITS_ARGUMENT,
        "no view": VIEWS_FOR_SOME,
        "undeclared write": WRITES_UNDECLARED,
        "missing return": LEAVES_OUT_UNWRITTEN,
        "missing bump": UNCOUNTED,
    }
    # Any mode loses the bump of an op without a kernel of its own.
    lost = finding.kind == "missing bump" and "under a dispatch mode" in finding.message
    return finding.op in listed.get(finding.kind, ()) or (lost and not plan.has_native_kernel)


def _op_of(qualified):
    name, _, overload = qualified.partition("::")[2].partition(".")
    return getattr(getattr(torch.ops.aten, name), overload or "default")


def sweep(tried, most=3):
    """The unknown findings of these calls, `most` of each op, and how many ops were checked."""
    count = Counter()
    unknown = {}
    for call in tried:
        for op, given in issued(call):
            count[op.name()] += 1
            if count[op.name()] <= most:
                for finding in check_op(op, given):
                    # A call that raises raised for the sample too.
                    if finding.kind != "error" and not is_known(finding):
                        unknown.setdefault((finding.op, finding.kind), f"{call.name}: {finding}")
    return unknown, len(count)


def test_the_chosen_ops():
    named = {op.name: op for op in database()}
    unknown, ops = sweep(call for name in CHOSEN for call in calls(named[name], samples=2))
    assert unknown == {}
    assert ops > 70


@pytest.mark.heavy
def test_the_whole_database():
    unknown, ops = sweep(known_calls(samples=4))
    assert unknown == {}
    assert ops > 700


x = torch.rand(2, 3, 4)
LISTED = {
    "undeclared alias": (torch.ops.aten.dropout.default, (x, 0.5, False)),
    "no view": (torch.ops.aten.to.dtype, (x, torch.float64)),
    "undeclared write": (
        torch.ops.aten.native_batch_norm.default,
        (x, None, None, torch.zeros(3), torch.ones(3), True, 0.1, 1e-5),
    ),
    "missing bump": (
        torch.ops.aten.rrelu_with_noise.default,
        (-x, torch.zeros_like(x), 0.1, 0.3, True),
    ),
}


@pytest.mark.parametrize("kind", LISTED)
def test_what_is_listed_is_true(kind):
    op, given = LISTED[kind]
    found = check_op(op, given)
    assert {f.kind for f in found} == {kind}
    assert all(map(is_known, found))


def test_the_sweep_can_fail(monkeypatch):
    monkeypatch.setitem(globals(), "UNCOUNTED", set())
    named = {op.name: op for op in database()}
    unknown, _ = sweep(calls(named["kron"], samples=1))
    assert ("aten::kron.out", "missing bump") in unknown
