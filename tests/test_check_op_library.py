"""`check_op` on ops of viewtrack.library, whose own checks raise: where the fault is."""

import pickle

import pytest
import torch
from library_ops import fresh

from viewtrack import ViewTrackError, library
from viewtrack.testing import check_op

ALIAS = "(Tensor y, Tensor x) -> (Tensor, Tensor)"
FAULTS = {
    "undeclared alias": (ALIAS, lambda y, x: (y * 1, x[:1]), "x", 1),
    "copy": ("(Tensor y, Tensor(a) x) -> (Tensor, Tensor(a))", lambda y, x: (y * 1, x * 1), "x", 1),
    "outputs alias": (ALIAS, lambda y, x: (lambda z: (z, z[:1]))(y * 1), None, 1),
    "missing return": (
        "(Tensor y, Tensor(a!) x) -> (Tensor, Tensor(a!))",
        lambda y, x: (y * 1, x.mul_(2).clone()),
        "x",
        1,
    ),
    "no tensor": (ALIAS, lambda y, x: (y * 1, 2), None, 1),
    "wrong count": (ALIAS, lambda y, x: y * 1, None, None),
    "undeclared write": (ALIAS, lambda y, x: (y * 1, x.mul_(2) * 1), "x", None),
}


@pytest.mark.parametrize(("schema", "body", "argument", "output"), FAULTS.values(), ids=FAULTS)
def test_a_finding_has_the_argument_and_the_output(schema, body, argument, output):
    op = library.op(fresh(schema), body)
    found = check_op(op, (torch.ones(2), torch.ones(2)))
    raised = [f for f in found if f.kind == "error"]
    assert raised
    assert {(f.op, f.argument, f.output, f.input) for f in raised} == {
        (op.op.name(), argument, output, 0)
    }
    with pytest.raises(ViewTrackError) as caught:
        op(torch.ones(2), torch.ones(2))
    again = pickle.loads(pickle.dumps(caught.value))
    assert (again.argument, again.output, str(again)) == (argument, output, str(caught.value))


def test_an_error_of_the_body_has_neither():
    def body(x):
        raise ValueError("planned")

    (found,) = check_op(library.op(fresh("(Tensor x) -> Tensor"), body), (torch.ones(2),))
    assert (found.kind, found.argument, found.output) == ("error", None, None)


def test_an_op_that_is_not_there_is_told_from_those_of_users():
    op = library.op("vtnear::first(Tensor x) -> Tensor", lambda x: x * 1)
    with pytest.raises(ViewTrackError, match="`vtnear::first`") as caught:
        check_op("vtnear::firs", (torch.ones(2),))
    assert "opaque" not in str(caught.value)
    assert op.op.name() == "vtnear::first"
