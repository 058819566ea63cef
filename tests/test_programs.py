"""Random programs: torch under `track` against an oracle that knows bytes alone."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial

import pytest
import torch
from handlers import NoOp
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from one_thread import one_thread  # noqa: F401 - a fixture for each test of this file
from programs import PLACES, STEPS, Mismatch, Program

import viewtrack as vt

index = st.integers(0, 7)
step = st.tuples(st.sampled_from(STEPS), index, index, st.sampled_from(sorted(PLACES)))
programs = st.lists(step, min_size=1, max_size=14)

quick = settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
whole = settings(quick, max_examples=20_000)


def run(steps):
    program = Program(partial(vt.track, record="site"))
    program.run(steps)
    program.compare_ledger()


@quick
@given(programs)
def test_random_programs(steps):
    run(steps)


@quick
@given(programs)
def test_random_programs_without_a_record(steps):
    Program(partial(vt.track, record="none")).run(steps)


@pytest.mark.heavy
@whole
@given(programs)
def test_twenty_thousand_random_programs(steps):
    run(steps)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("step", STEPS, ids=" ".join)
def test_each_step_in_each_place(step, place):
    head, tail = (("view", "head"), 0, 0, place), (("view", "tail"), 2, 0, "above")
    run([head, tail, (step, 2, 1, place), (step, 0, 2, place), (("write", "add_"), 3, 0, place)])


# The oracle sees what stock torch does not.


@pytest.mark.parametrize(
    "steps",
    [
        [(("write", "add_"), 0, 0, "in a handler")],
        [(("view", "head"), 0, 0, "in a handler")],
        [(("write", "foreach"), 0, 0, "in a mode")],
        [(("view", "_unsafe_view"), 0, 0, "above"), (("write", "add_"), 2, 0, "above")],
        [(("write", "library"), 0, 0, "in a mode")],
    ],
)
def test_the_oracle_disagrees_with_stock_torch(steps):
    with pytest.raises(Mismatch):
        Program(nullcontext).run(steps)
    run(steps)


def test_the_oracle_sees_a_wrong_value():
    class Wrong(NoOp):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            return out.add_(1) if func is torch.ops.aten.mul.Tensor else out

    with pytest.raises(Mismatch):
        Program(Wrong).run([(("fresh", "mul"), 0, 0, "above")])


def test_the_oracle_sees_a_write_that_the_ledger_lacks():
    program = Program(partial(vt.track, record="none"))
    program.run([(("write", "add_"), 0, 0, "above")])
    with pytest.raises(Mismatch, match="ledger"):
        program.compare_ledger()
