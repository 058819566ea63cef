"""What is read from an op's schema."""

from __future__ import annotations

import pytest
import torch
from expecttest import assert_expected_inline

from viewtrack import _torch, handler_run
from viewtrack.plan import Plan, forget, plan_of, plan_of_schema

aten = torch.ops.aten

LIB = torch.library.Library("vt_plan", "DEF")

REPRESENTATIVE = [
    "add.Tensor", "add_.Tensor", "add.out", "mm", "mm.out", "sum", "clone", "relu_", "copy_",
    "zero_", "index_put_", "_index_put_impl_", "view", "view.dtype", "as_strided", "select.int",
    "t", "expand", "squeeze.dim", "diagonal", "alias", "detach", "_conj", "view_as_real",
    "split.Tensor", "unbind.int", "chunk", "narrow", "values", "_values", "_indices", "_fw_primal",
    "_make_dual", "_nested_view_from_buffer", "as_strided_", "transpose_", "squeeze_", "detach_",
    "resize_", "set_.source_Tensor", "_unsafe_view", "unsafe_split.Tensor", "unsafe_chunk",
    "reshape", "contiguous", "matmul", "matmul.out", "_foreach_add.List", "_foreach_add_.List",
    "_foreach_add.List_out", "_foreach_copy_", "_fused_adam_", "split_copy.Tensor_out",
    "native_batch_norm", "_native_batch_norm_legit", "max.dim_max", "frexp.Tensor_out",
    "_amp_foreach_non_finite_check_and_unscale_", "dropout_", "linalg_pinv.atol_rtol_tensor",
]  # fmt: skip


def overload(name):
    packet, _, overload_name = name.partition(".")
    return getattr(getattr(aten, packet), overload_name or "default")


def arguments(found):
    return "+".join(a.name + "[]" * a.is_list + "?" * a.is_optional for a in found)


def describe(plan: Plan) -> str:
    """One line: what the op does to memory, then what the dispatcher has for it."""
    facts = []
    for output in plan.views:
        listed = "[]" * output.is_list
        facts.append(f"out{output.index}{listed} views {arguments(output.arguments)}")
    if plan.writes:
        facts.append(f"writes {arguments(plan.writes)}")
    for output in plan.written:
        facts.append(f"out{output.index} is {arguments(output.arguments)}")
    if plan.changes_metadata:
        facts.append("changes metadata")
    if plan.may_alias_undeclared:
        facts.append("may alias")
    kernels = "A" * plan.has_native_kernel + "c" * plan.is_composite
    kernels += "e" * plan.is_made_of_other_ops
    head = f"{plan.name:<40} {kernels or '-':<2}"
    rest = "; ".join(facts) or "functional"
    return f"{head} {rest}" if len(head + rest) < 95 else f"{head.rstrip()}\n    {rest}"


def test_golden_table():
    """A: has an ADInplaceOrView kernel; c: composite; e: its kernel calls other ops."""
    table = "\n".join(describe(plan_of(overload(name))) for name in REPRESENTATIVE)
    assert_expected_inline(
        table,
        """\
aten.add.Tensor                          -  functional
aten.add_.Tensor                         A  writes self; out0 is self
aten.add.out                             A  writes out; out0 is out
aten.mm.default                          -  functional
aten.mm.out                              A  writes out; out0 is out
aten.sum.default                         e  functional
aten.clone.default                       e  functional
aten.relu_.default                       A  writes self; out0 is self
aten.copy_.default                       Ae writes self; out0 is self
aten.zero_.default                       A  writes self; out0 is self
aten.index_put_.default                  Ae writes self; out0 is self
aten._index_put_impl_.default            A  writes self; out0 is self
aten.view.default                        A  out0 views self
aten.view.dtype                          Ae out0 views self
aten.as_strided.default                  A  out0 views self
aten.select.int                          Ae out0 views self
aten.t.default                           Ae out0 views self
aten.expand.default                      Ae out0 views self
aten.squeeze.dim                         Ae out0 views self
aten.diagonal.default                    Ae out0 views self
aten.alias.default                       Ae out0 views self
aten.detach.default                      Ae out0 views self
aten._conj.default                       Ae out0 views self
aten.view_as_real.default                A  out0 views self
aten.split.Tensor                        Ae out0[] views self
aten.unbind.int                          Ae out0[] views self
aten.chunk.default                       Ac out0[] views self
aten.narrow.default                      Ac out0 views self
aten.values.default                      Ae out0 views self
aten._values.default                     A  out0 views self
aten._indices.default                    A  out0 views self
aten._fw_primal.default                  Ae out0 views self
aten._make_dual.default                  Ae out0 views primal
aten._nested_view_from_buffer.default    A  out0 views self
aten.as_strided_.default                 Ae writes self; out0 is self; changes metadata
aten.transpose_.default                  Ae writes self; out0 is self; changes metadata
aten.squeeze_.default                    Ae writes self; out0 is self; changes metadata
aten.detach_.default                     e  writes self; out0 is self; changes metadata
aten.resize_.default                     A  writes self; out0 is self; changes metadata
aten.set_.source_Tensor                  A  writes self; out0 is self; changes metadata
aten._unsafe_view.default                e  may alias
aten.unsafe_split.Tensor                 e  may alias
aten.unsafe_chunk.default                c  may alias
aten.reshape.default                     c  out0 views self
aten.contiguous.default                  c  out0 views self
aten.matmul.default                      c  functional
aten.matmul.out                          Ac writes out; out0 is out
aten._foreach_add.List                   e  functional
aten._foreach_add_.List                  e  writes self[]
aten._foreach_add.List_out               e  writes out[]
aten._foreach_copy_.default              e  writes self[]
aten._fused_adam_.default                -
    writes self[]+grads[]+exp_avgs[]+exp_avg_sqs[]+max_exp_avg_sqs[]
aten.split_copy.Tensor_out               e  writes out[]
aten.native_batch_norm.default           -  functional
aten._native_batch_norm_legit.default    -  writes running_mean+running_var
aten.max.dim_max                         A
    writes max+max_values; out0 is max; out1 is max_values
aten.frexp.Tensor_out                    A
    writes mantissa+exponent; out0 is mantissa; out1 is exponent
aten._amp_foreach_non_finite_check_and_unscale_.default -  writes self[]+found_inf
aten.dropout_.default                    c  writes self; out0 is self
aten.linalg_pinv.atol_rtol_tensor        e  functional""",
    )


def all_overloads():
    for qualified in torch._C._dispatch_get_all_op_names():
        namespace, _, rest = qualified.partition("::")
        name, _, overload_name = rest.partition(".")
        if namespace in ("aten", "prim", "prims"):
            packet = getattr(getattr(torch.ops, namespace), name, None)
            op = getattr(packet, overload_name or "default", None)
            if isinstance(op, _torch.OpOverload):
                yield op


def test_all_of_torchs_own_overloads_plan():
    plans = [plan_of(op) for op in all_overloads()]
    assert len(plans) > 3000
    assert sum(plan.is_functional for plan in plans) > 1000


def test_a_mutable_schema_is_a_plan_that_writes():
    for op in all_overloads():
        declared = [a.name for a in op._schema.arguments if a.alias_info and a.alias_info.is_write]
        assert [a.name for a in plan_of(op).writes] == declared
        assert bool(declared) is op._schema.is_mutable


def test_every_view_output_has_the_argument_that_it_views():
    """But for outputs of several letters, which no ATen op has, no letter may be lost."""
    lost = []
    for op in all_overloads():
        plan = plan_of(op)
        if any(not output.arguments for output in (*plan.views, *plan.written)):
            lost.append(plan.name)
    assert lost == []


def test_plans_are_made_once():
    assert plan_of(aten.add.Tensor) is plan_of(aten.add.Tensor)


def test_a_plan_is_made_anew_when_it_was_forgotten():
    first = plan_of(aten.sin.default)
    forget(aten.sin.default)
    assert plan_of(aten.sin.default) == first
    assert plan_of(aten.sin.default) is not first


def test_a_tracked_handler_forgets_the_op_too():
    op = aten.sin_.default
    assert handler_run._facts_of(op)[2] is plan_of(op)
    forget(op)
    assert op._op not in handler_run._facts


SCHEMAS = {
    "vt_plan::a(Tensor(a!) x, Tensor y) -> ()": "writes x",
    "vt_plan::b(Tensor(a!)[] xs, Tensor(b!)? y=None) -> ()": "writes xs[]+y?",
    "vt_plan::c(Tensor x, *, Tensor(a!)?[] outs) -> ()": "writes outs[]?",
    "vt_plan::d(Tensor(a) x, Tensor(b) y) -> (Tensor(a), Tensor(b))": "out0 views x; out1 views y",
    "vt_plan::e(Tensor(a) x) -> Tensor(a)[]": "out0[] views x",
    "vt_plan::f(Tensor(a)[] xs) -> Tensor(a)": "out0 views xs[]",
    "vt_plan::g(Tensor(a -> *) x) -> Tensor(a)[]": "out0[] views x",
    "vt_plan::h(Tensor(a!) x, Tensor(b) y) -> (Tensor(a!), Tensor(b))": (
        "out1 views y; writes x; out0 is x"
    ),
    "vt_plan::i(Tensor(a!) x, int[2] size=[1, 1], str s='->') -> Tensor(a!)": "writes x; out0 is x",
    "vt_plan::j(Tensor x, Tensor[] ys, Tensor? z=None) -> (Tensor, Tensor[])": "",
}


@pytest.mark.parametrize(("schema", "expected"), SCHEMAS.items())
def test_schemas_of_other_ops(schema, expected):
    plan = plan_of_schema(torch._C.parse_schema(schema))
    facts = describe(plan).split(maxsplit=2)[2]
    assert facts.split("; may alias")[0].replace("may alias", "") == expected


def test_tensors_are_found_by_position_and_by_name():
    LIB.define("p(Tensor(a!)[] xs, Tensor(b!)? y=None, *, Tensor(c!)? z=None) -> ()")
    plan = plan_of(torch.ops.vt_plan.p.default)
    xs, y, z = plan.writes
    a, b = torch.zeros(1), torch.zeros(1)
    assert xs.tensors(([a, b],), {}) == [a, b]
    assert xs.tensors((), {"xs": [a, None]}) == [a]
    assert y.tensors(([],), {}) == []
    assert y.tensors(([], b), None) == [b]
    assert y.tensors(([],), {"y": b}) == [b]
    assert z.tensors(([], None), {"z": a}) == [a]
    assert z.tensors(([], None), {"z": None}) == []


def test_what_the_dispatcher_has_for_a_library_op():
    LIB.define("q(Tensor x) -> Tensor")
    LIB.impl("q", lambda x: x * 2, "CompositeExplicitAutograd")
    LIB.define("r(Tensor x) -> Tensor")
    LIB.impl("r", lambda x: x * 2, "CPU")
    LIB.impl("r", lambda x: x * 2, "AutogradCPU")
    LIB.define("s(Tensor x) -> Tensor")
    LIB.impl("s", lambda x: x * 2, "CompositeImplicitAutograd")
    q, r, s = (plan_of(getattr(torch.ops.vt_plan, name).default) for name in "qrs")
    assert [p.has_autograd_kernel for p in (q, r, s)] == [False, True, False]
    assert [p.is_made_of_other_ops for p in (q, r, s)] == [True, False, False]
    assert [p.is_composite for p in (q, r, s)] == [False, False, True]
    assert not any(p.has_native_kernel or p.is_aten for p in (q, r, s))


@pytest.mark.parametrize("name", ["prim::device", "nobody::knows_this", "not a name"])
def test_an_op_that_the_dispatcher_does_not_know_is_functional(name):
    from viewtrack._torch import kernels as _torch_kernels

    assert not _torch_kernels.has_native_kernel(name)
    assert not _torch_kernels.has_composite_kernel(name)
    assert not _torch_kernels.has_autograd_kernel(name)
