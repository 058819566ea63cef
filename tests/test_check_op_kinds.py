"""`check_op` on ops of every making: by custom_op, Library, viewtrack.library, and ATen's own."""

import ctypes
import traceback

import pytest
import torch
from library_ops import axpy_, double_rows, fresh, head, memset
from torch._subclasses import FakeTensorMode
from torch.testing._internal.two_tensor import TwoTensor

import viewtrack as vt
from viewtrack import ViewTrackError, library
from viewtrack.testing import check_op

_lib = torch.library.Library("vtkinds", "DEF")
EVERYWHERE = "CompositeExplicitAutograd"


def defined(schema, body, key="CPU"):
    """An op without any kernel of ours."""
    _lib.define(schema)
    name = schema.split("(")[0]
    _lib.impl(name, body, key)
    return getattr(torch.ops.vtkinds, name).default


def nothing(*done):
    """For lambdas of ops that return nothing."""


def kinds(findings):
    return [(f.kind, f.argument, f.output) for f in findings]


# Ops that raise, or return something else than they say.


def _only_vectors(x):
    if x.dim() != 1:
        raise ValueError(f"a vector, not {x.dim()} dimensions")
    return x + 1


def _custom(name):
    @torch.library.custom_op(f"vtkinds::{name}", mutates_args=())
    def op(x: torch.Tensor) -> torch.Tensor:
        return _only_vectors(x)

    return op


@pytest.mark.parametrize(
    "op",
    [
        defined("vectors(Tensor x) -> Tensor", _only_vectors),
        _custom("custom_vectors"),
        library.op(fresh("(Tensor x) -> Tensor"), _only_vectors),
    ],
    ids=["Library", "custom_op", "viewtrack"],
)
def test_an_op_that_raises_for_some_inputs(op):
    vector, matrix = (torch.ones(2),), (torch.ones(2, 2),)
    assert check_op(op, vector) == []
    (finding,) = check_op(op, vector, matrix, (torch.zeros(2, 2),))
    assert (finding.kind, finding.input) == ("error", 1)
    line = _only_vectors.__code__.co_firstlineno + 2
    assert f"ValueError at {__file__}:{line}: a vector, not 2 dimensions" in str(finding)
    assert len(check_op(op, matrix, (torch.ones(2, 2, 2),))) == 2


def test_an_op_that_writes_and_then_raises():
    def body(x):
        x.zero_()
        raise ValueError("late")

    op = defined("late(Tensor x) -> ()", body)
    assert kinds(check_op(op, (torch.ones(2),))) == [
        ("undeclared write", "x", None),
        ("error", None, None),
    ]


def test_an_error_under_a_mode_only():
    def body(x):
        if "__torch_dispatch__" in [frame.name for frame in traceback.extract_stack()]:
            raise ValueError("not here")
        return x + 1

    (finding,) = check_op(defined("modeless(Tensor x) -> Tensor", body), (torch.ones(2),))
    assert finding.kind == "error"
    assert "raised ValueError under a dispatch mode" in str(finding)


@pytest.mark.parametrize(
    ("schema", "body", "output", "says"),
    [
        ("none(Tensor x) -> Tensor", lambda x: None, 0, "returned None as output 0"),
        ("few(Tensor x) -> (Tensor, Tensor)", lambda x: (x + 1,), None, "returned 1 value where"),
        ("some(Tensor x) -> ()", lambda x: x + 1, None, "return None but it returned something"),
        ("bare(Tensor x) -> Tensor[]", lambda x: x + 1, None, "Unable to cast"),
        ("pair(Tensor x) -> Tensor", lambda x: (x, x), None, "Unable to cast"),
        ("count(Tensor x) -> int", lambda x: x + 1, None, "Unable to cast"),
    ],
)
def test_outputs_that_the_schema_has_no_room_for(schema, body, output, says):
    (finding,) = check_op(defined(schema, body), (torch.ones(2),))
    assert (finding.kind, finding.output) == ("wrong output", output)
    assert says in str(finding)


def test_the_same_of_ops_that_look_themselves():
    op = library.op(fresh("(Tensor x) -> (Tensor, Tensor)"), lambda x: (x + 1, x + 2, x + 3))
    (finding,) = check_op(op, (torch.ones(2),))
    assert "returned 3 values where its schema has 2 outputs" in str(finding)


def test_an_output_among_several_may_be_none():
    op = defined("masked(Tensor x) -> (Tensor, Tensor)", lambda x: (x + 1, None))
    assert check_op(op, (torch.ones(2),)) == []
    (note,) = check_op(op, (torch.ones(2),), notes=True)
    assert (note.kind, note.output, note.is_note) == ("no output", 1, True)
    op = defined("optional(Tensor x) -> (int, Tensor?)", lambda x: (3, None))
    assert check_op(op, (torch.ones(2),), notes=True) == []
    op = defined("nones(Tensor x) -> (Tensor, Tensor)", lambda x: (None, None))
    assert kinds(check_op(op, (torch.ones(2),))) == [
        ("wrong output", None, 0),
        ("wrong output", None, 1),
    ]


# Arguments and outputs of every kind.


GOOD = {
    "numbers": ("numbers(Tensor x) -> (int, float, bool, str)", lambda x: (1, 0.5, True, "s")),
    "nothing": ("nothing(Tensor x) -> ()", lambda x: None),
    "no tensor": ("no_tensor(Tensor x) -> int", lambda x: len(x)),
    "random": ("random(Tensor x) -> Tensor", lambda x: x * torch.rand_like(x)),
    "a list": ("list(Tensor x) -> Tensor[]", lambda x: [x + 1, x + 2]),
    "an empty list": ("empty_list(Tensor x) -> Tensor[]", lambda x: []),
    "empty": ("empty(Tensor x) -> Tensor", lambda x: x.new_empty(0)),
}


@pytest.mark.parametrize(("schema", "body"), GOOD.values(), ids=GOOD)
def test_outputs_of_every_kind_are_clean(schema, body):
    op = defined(schema, body, EVERYWHERE)
    inputs = (torch.ones(2),), (torch.ones(2, 3).t(),)
    assert check_op(op, *inputs, notes=True) == []


def test_symbolic_numbers_options_and_keywords():
    op = library.inplace_op(
        fresh("(Tensor(a!) x, SymInt n, SymInt[] sizes, *, Tensor? by=None) -> Tensor(a!)"),
        lambda x, n, sizes, by: x.add_(n if by is None else by),
    )
    x = torch.ones(2)
    assert check_op(op, (x, 3, [1]), ((x, 3, []), {"by": x}), notes=True) == []


def test_faults_of_keyword_only_and_optional_tensors_and_of_elements():
    def body(x, ys, *, by, out):
        by.zero_()
        return out.copy_(x)

    op = defined("many(Tensor x, Tensor?[] ys, *, Tensor? by, Tensor(a!) out) -> Tensor(a!)", body)
    x, out = torch.ones(2), torch.zeros(2)
    findings = check_op(op, ((x, [None, x]), {"by": x + 1, "out": out}))
    assert kinds(findings) == [("undeclared write", "by", None), ("missing bump", "out", None)]

    op = defined("elements(Tensor(a!)[] xs) -> ()", lambda xs: memset(xs[1]))
    (finding,) = check_op(op, ([x, x + 1],))
    assert kinds([finding]) == [("missing bump", "xs", None)]
    assert "`xs[1]`" in str(finding)
    assert check_op(library.register(op), ([x, x + 1],), ([x + 1, x],), notes=True) == []

    op = defined("given(Tensor[] xs) -> Tensor[]", lambda xs: [xs[0] + 1, xs[1][:1]])
    (finding,) = check_op(op, ([x, x + 1],))
    assert kinds([finding]) == [("undeclared alias", "xs", 0)]
    assert "output 0[1] in the memory of argument `xs[1]`" in str(finding)

    op = defined("parts(Tensor x) -> Tensor[]", lambda x: list((x + 1).split(1)))
    (finding,) = check_op(op, (x,))
    assert "output 0[0] and output 0[1] in the same memory" in str(finding)


def test_an_argument_that_is_returned_whole():
    op = defined("same(Tensor x) -> Tensor", lambda x: x, EVERYWHERE)
    for x in (torch.ones(2), torch.ones(0), torch.eye(2).to_sparse()):
        assert kinds(check_op(op, (x,))) == [("undeclared alias", "x", 0)]


def test_an_expanded_input_of_an_in_place_op():
    x = torch.ones(1).expand(3)
    assert check_op(double_rows, (torch.ones(2, 2), [1])) == []
    (finding,) = check_op(torch.ops.aten.add_.Scalar, (x, 1))
    assert "more than one element of the written-to tensor" in str(finding)
    first = library.inplace_op(fresh("(Tensor(a!) x) -> ()"), lambda x: nothing(x[0].add_(1)))
    assert check_op(first, (x,)) == []


def test_an_op_that_aliases_for_some_strides_or_sizes_only():
    reshaped = defined("reshaped(Tensor x) -> Tensor", lambda x: x.reshape(-1))
    strided, dense = torch.ones(2, 3).t(), torch.ones(2, 3)
    assert check_op(reshaped, (strided,)) == []
    assert kinds(check_op(reshaped, (strided,), (dense,))) == [("undeclared alias", "x", 0)]
    declared = library.view_op(fresh("(Tensor(a) x) -> Tensor(a)"), lambda x: x.reshape(-1))
    assert check_op(declared, (dense,)) == []
    (finding,) = check_op(declared, (dense,), (strided,))
    assert (finding.kind, finding.input) == ("error", 1)
    assert "a view of `x` for every shape" in str(finding)


# Without memory.


def test_meta_tensors():
    x = torch.ones(2, device="meta")
    missing = defined("here_only(Tensor x) -> Tensor", lambda x: x + 1)
    (finding,) = check_op(missing, (x,))
    assert finding.kind == "error"
    assert "no fake impl" in str(finding)
    assert check_op(missing, (torch.ones(2),), notes=True) == []  # no fake needed else

    op = defined("anywhere(Tensor(a!) x) -> Tensor", lambda x: x.view(-1), EVERYWHERE)
    assert kinds(check_op(op, (x,))) == [("undeclared alias", "x", 0)]
    assert [f.kind for f in check_op(head, (x, 1), notes=True)] == ["no memory"]
    assert check_op(axpy_, (x, x)) == []
    assert {f.kind for f in check_op(axpy_, (x, x), notes=True)} == {"no memory"}


# What is wrong with the inputs, and not with the op.


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ((), "missing value for argument 'x'"),
        ((1,), "Expected a value of type 'Tensor'"),
        ((torch.ones(2), 1, 2), "received 3 argument"),
        (((torch.ones(2), 1), {"m": 1}), "nothing"),
    ],
)
def test_inputs_that_do_not_fit_the_schema(given, says):
    says = says if says != "nothing" else "received 3 argument|Unknown keyword argument 'm'"
    with pytest.raises(ViewTrackError, match=rf"(?s)input 1 does not fit.*vtlib::head.*({says})"):
        check_op(head, (torch.ones(2), 1), given)


def test_where_an_op_is_defined():
    @torch.library.custom_op("vtkinds::clears", mutates_args=())
    def clears(x: torch.Tensor) -> None:
        ctypes.memset(x.data_ptr(), 0, x.numel() * 4)

    (finding,) = check_op(clears, (torch.ones(2),))
    assert finding.definition == f"{__file__}:{clears._init_fn.__code__.co_firstlineno}"
    assert f"defined at {finding.definition}" in str(finding)

    def body(x):
        return x.clone()

    (finding,) = check_op(
        library.view_op(fresh("(Tensor(a) x) -> Tensor(a)"), body), (torch.ones(2),)
    )
    assert finding.definition == f"{__file__}:{body.__code__.co_firstlineno}"
    op = defined("elsewhere(Tensor x) -> Tensor", lambda x: x)
    (finding,) = check_op(op, (torch.ones(2),))
    known = finding.definition is not None or torch.__version__ >= "2.9"
    assert not known or finding.definition.startswith(f"{__file__}:")  # where its library was made
    (finding,) = check_op(torch.ops.aten._unsafe_view.default, (torch.ones(2), [2]))
    assert finding.definition is None


# Tensors that are not plain memory.


def _nested(layout):
    return torch.nested.nested_tensor([torch.ones(2, 3), torch.ones(1, 3)], layout=layout)


def _fake():
    with FakeTensorMode():
        return torch.ones(4)


@torch.inference_mode()
def _in_inference():
    return torch.ones(2)


EXOTIC = {
    "sparse": lambda: torch.eye(3).to_sparse(),
    "csr": lambda: torch.eye(3).to_sparse_csr(),
    "nested": lambda: _nested(torch.strided),
    "jagged": lambda: _nested(torch.jagged),
    "zero tensor": lambda: torch._efficientzerotensor(3),
    "copy on write": lambda: torch.ones(3)._lazy_clone(),
    "tracked": lambda: vt.TrackedTensor(torch.ones(4)),
    "two": lambda: TwoTensor(torch.ones(4), torch.ones(4)),
    "fake": _fake,
    "quantized": lambda: torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.quint8),
    "mkldnn": lambda: torch.ones(2, 2).to_mkldnn(),
    "inference": _in_inference,
    "parameter": lambda: torch.nn.Parameter(torch.ones(2)),
}


@pytest.mark.parametrize("make", EXOTIC.values(), ids=EXOTIC)
@pytest.mark.parametrize(
    "op", [torch.ops.aten.detach.default, torch.ops.aten.clone.default], ids=["view", "copy"]
)
def test_views_and_copies_of_what_is_not_plain_are_clean(make, op):
    assert check_op(op, (make(),)) == []


@pytest.mark.parametrize("kind", ["csr", "nested", "jagged", "tracked", "two", "fake", "mkldnn"])
def test_writes_to_what_is_not_plain_are_clean(kind):
    assert check_op(torch.ops.aten.relu_.default, (EXOTIC[kind](),)) == []


def test_parts_of_a_sparse_tensor_are_views_of_it():
    aten = torch.ops.aten
    sparse, csr = EXOTIC["sparse"](), EXOTIC["csr"]()
    for op in (aten._values.default, aten._indices.default, aten.values.default):
        assert check_op(op, (sparse,)) == []
    for op in (aten.crow_indices.default, aten.values.default):
        assert check_op(op, (csr,)) == []
    copied = aten.transpose.int  # of a sparse tensor it is a copy, whatever it says
    assert kinds(check_op(copied, (sparse, 0, 1))) == [("no view", "self", 0)]


def test_raw_writes_to_what_is_wrapped_are_found():
    op = defined("scrub(Tensor x) -> ()", memset)
    for kind in ("two", "tracked"):
        assert kinds(check_op(op, (EXOTIC[kind](),))) == [("undeclared write", "x", None)]


def test_an_op_without_tensors():
    kept = {}
    op = defined("made(int n) -> Tensor", lambda n: torch.zeros(n), EVERYWHERE)
    assert check_op(op, (3,), notes=True) == []
    op = defined("kept(int n) -> Tensor", lambda n: kept.setdefault(n, torch.zeros(n)), EVERYWHERE)
    assert kinds(check_op(op, (3,))) == [("kept memory", None, 0)]
