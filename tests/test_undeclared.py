"""The table of ATen ops that alias undeclared is what its generator makes of this torch."""

from __future__ import annotations

import pytest
import torch

from viewtrack.plan import SHARE_UNDECLARED, plan_of
from viewtrack.testing.aliases import MODULE, find_undeclared, known_calls, source
from viewtrack.testing.call import Call
from viewtrack.undeclared import UNDECLARED_ALIASES

aten = torch.ops.aten

# The entries of the database that reach what the table has.
REACHING = ("atleast", "broadcast_tensors", "meshgrid", "unsafe_", "matmul", "reshape", "dropout")


def test_the_module_is_as_the_generator_writes_it():
    assert MODULE.read_text() == source(UNDECLARED_ALIASES)


def test_what_is_in_the_table_is_found_and_nothing_else():
    found = {op for name in REACHING for op in find_undeclared(known_calls(name, samples=6))}
    assert found <= UNDECLARED_ALIASES
    assert found == UNDECLARED_ALIASES


@pytest.mark.heavy
def test_the_whole_database_makes_the_table():
    assert find_undeclared(known_calls()) == UNDECLARED_ALIASES


def test_every_name_in_the_table_is_an_op_whose_schema_says_nothing():
    for qualified in UNDECLARED_ALIASES:
        name, _, overload = qualified.removeprefix("aten::").partition(".")
        plan = plan_of(getattr(getattr(aten, name), overload or "default"))
        assert plan.qualified == qualified
        assert plan.may_alias_undeclared
        assert not plan.views


def test_counters_are_joined_for_ops_in_the_table_only():
    assert SHARE_UNDECLARED < UNDECLARED_ALIASES


def test_an_alias_of_a_library_op_is_found_and_declared_ones_are_not():
    lib = torch.library.Library("vt_undeclared", "DEF")
    lib.define("secret(Tensor x) -> (Tensor, Tensor)")
    lib.impl("secret", lambda x: (x * 2, x.view(-1)), "CompositeExplicitAutograd")
    lib.define("told(Tensor(a) x) -> (Tensor, Tensor(a))")
    lib.impl("told", lambda x: (x * 2, x.view(-1)), "CompositeExplicitAutograd")
    lib.define("same(Tensor x) -> Tensor")
    lib.impl("same", lambda x: x, "CompositeExplicitAutograd")
    tried = [
        Call(getattr(torch.ops.vt_undeclared, name), (torch.ones(2),))
        for name in ("secret", "told", "same")
    ]
    assert find_undeclared(tried) == {"vt_undeclared::secret"}


def test_a_call_that_raises_tells_nothing():
    assert find_undeclared([Call(lambda x: x.view(3), (torch.ones(2),))]) == set()
