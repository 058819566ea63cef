"""``track(views="full")`` over all view ops: what a handler keeps is what the call gives above.

The judge is stock torch: the same call on the same tensor, made above autograd without any mode.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from against_stock import attempt
from handlers import On, Wrapper
from torch.autograd import forward_ad
from torch.utils._python_dispatch import TorchDispatchMode

import viewtrack as vt
from viewtrack._torch import creation_meta
from viewtrack._torch.library import lookup, op_names
from viewtrack.plan import plan_of

aten = torch.ops.aten
MUL = aten.mul.Tensor


@dataclass(frozen=True)
class Case:
    """A call of a view op.

    Attributes:
        name: the op, and after a space what is special about the call.
        shape: of the tensor that it is called on.
        view: the call.
        dtype: of that tensor.
    """

    name: str
    shape: tuple[int, ...]
    view: Any
    dtype: torch.dtype = torch.float64


SQUARE, CUBE, ONES, COMPLEX = (4, 4), (2, 4, 6), (1, 4, 1), torch.complex128

CASES = [
    Case("_conj", SQUARE, aten._conj, COMPLEX),
    Case("_neg_view", SQUARE, aten._neg_view),
    Case("_reshape_alias", SQUARE, lambda t: aten._reshape_alias(t, [16], [1])),
    Case(
        "_test_autograd_multiple_dispatch_view", SQUARE, aten._test_autograd_multiple_dispatch_view
    ),
    Case("adjoint", SQUARE, aten.adjoint, COMPLEX),
    Case("adjoint of real", SQUARE, aten.adjoint),
    Case("alias", SQUARE, aten.alias),
    Case("as_strided", SQUARE, lambda t: t.as_strided((2, 2), (4, 1), 1)),
    Case("broadcast_to", SQUARE, lambda t: t.broadcast_to(2, 4, 4)),
    Case("chunk", SQUARE, lambda t: t.chunk(2)),
    Case("chunk uneven", SQUARE, lambda t: t.chunk(3, 1)),
    Case("conj", SQUARE, aten.conj, COMPLEX),
    Case("detach", SQUARE, lambda t: t.detach()),
    Case("diagonal", SQUARE, lambda t: t.diagonal()),
    Case("dsplit.array", CUBE, lambda t: t.dsplit([1])),
    Case("dsplit.int", CUBE, lambda t: t.dsplit(2)),
    Case("expand", ONES, lambda t: t.expand(2, 4, 3)),
    Case("expand_as", ONES, lambda t: t.expand_as(torch.empty(2, 4, 3))),
    Case("flatten.using_ints", CUBE, lambda t: t.flatten(1)),
    Case("flatten.using_ints of a slice", CUBE, lambda t: t[:, :2].flatten(1)),
    Case("flatten.using_ints of a transpose", CUBE, lambda t: t.permute(2, 0, 1).flatten(1)),
    Case("hsplit.array", SQUARE, lambda t: t.hsplit([1])),
    Case("hsplit.int", SQUARE, lambda t: t.hsplit(2)),
    Case("imag", SQUARE, lambda t: t.imag, COMPLEX),
    Case("imag of conj", SQUARE, lambda t: t.conj().imag, COMPLEX),
    Case("linalg_diagonal", SQUARE, torch.linalg.diagonal),
    Case("mH", SQUARE, lambda t: t.mH, COMPLEX),
    Case("mT", SQUARE, lambda t: t.mT),
    Case("matrix_H", SQUARE, lambda t: t.H, COMPLEX),
    Case("moveaxis.int", CUBE, lambda t: t.moveaxis(0, 1)),
    Case("moveaxis.intlist", CUBE, lambda t: t.moveaxis((0, 1), (1, 2))),
    Case("movedim.int", CUBE, lambda t: t.movedim(0, 1)),
    Case("movedim.intlist", CUBE, lambda t: t.movedim((0, 1), (1, 2))),
    Case("narrow", SQUARE, lambda t: t.narrow(0, 1, 2)),
    Case("narrow.Tensor", SQUARE, lambda t: t.narrow(0, torch.tensor(1), 2)),
    Case("numpy_T", SQUARE, lambda t: t.T),
    Case("permute", CUBE, lambda t: t.permute(2, 0, 1)),
    Case("ravel", SQUARE, lambda t: t.ravel()),
    Case("real", SQUARE, lambda t: t.real, COMPLEX),
    Case("reshape", SQUARE, lambda t: t.reshape(2, 8)),
    Case("reshape of a transpose", SQUARE, lambda t: t.t().reshape(4, 2, 2)),
    Case("reshape_as", SQUARE, lambda t: t.reshape_as(torch.empty(2, 8))),
    Case("select.int", SQUARE, lambda t: t[1]),
    Case("slice.Tensor", SQUARE, lambda t: t[1:]),
    Case("slice_inverse", (2, 4), lambda t: aten.slice_inverse(t, t[:1], 0, 0, 1)),
    Case("split.Tensor", SQUARE, lambda t: t.split(2)),
    Case("split.sizes", SQUARE, lambda t: aten.split.sizes(t, [1, 3])),
    Case("split_with_sizes", SQUARE, lambda t: t.split([1, 3], 1)),
    Case("squeeze", ONES, lambda t: t.squeeze()),
    Case("squeeze.dim", ONES, lambda t: t.squeeze(0)),
    Case("squeeze.dims", ONES, lambda t: t.squeeze((0, 2))),
    Case("swapaxes", SQUARE, lambda t: t.swapaxes(0, 1)),
    Case("swapdims", SQUARE, lambda t: t.swapdims(0, 1)),
    Case("t", SQUARE, lambda t: t.t()),
    Case("tensor_split.indices", SQUARE, lambda t: t.tensor_split([1, 2])),
    Case("tensor_split.sections", SQUARE, lambda t: t.tensor_split(3)),
    Case(
        "tensor_split.tensor_indices_or_sections",
        SQUARE,
        lambda t: t.tensor_split(torch.tensor([1, 2])),
    ),
    Case("transpose.int", CUBE, lambda t: t.transpose(0, 2)),
    Case("unbind.int", SQUARE, lambda t: t.unbind(1)),
    Case("unflatten.int", SQUARE, lambda t: t.unflatten(1, (2, 2))),
    Case("unflatten.int of a transpose", SQUARE, lambda t: t.t().unflatten(1, (2, 2))),
    Case("unfold", SQUARE, lambda t: t.unfold(0, 2, 2)),
    Case("unsqueeze", SQUARE, lambda t: t.unsqueeze(0)),
    Case("view", SQUARE, lambda t: t.view(16)),
    Case("view.dtype", SQUARE, lambda t: t.view(torch.int64)),
    Case("view_as", SQUARE, lambda t: t.view_as(torch.empty(16))),
    Case("view_as_complex", (4, 2), torch.view_as_complex),
    Case("view_as_real", SQUARE, torch.view_as_real, COMPLEX),
    Case("vsplit.array", SQUARE, lambda t: t.vsplit([1])),
    Case("vsplit.int", SQUARE, lambda t: t.vsplit(2)),
    # Composite ops that do not declare that they return views.
    Case("atleast_1d", (), torch.atleast_1d),
    Case("atleast_2d", (4,), torch.atleast_2d),
    Case("atleast_3d", SQUARE, torch.atleast_3d),
    Case("broadcast_tensors", ONES, lambda t: torch.broadcast_tensors(t, torch.zeros(2, 4, 3))),
    Case("einsum", SQUARE, lambda t: torch.einsum("ij->ji", t)),
    Case("meshgrid", (4,), lambda t: torch.meshgrid(t, t, indexing="ij")),
    Case("unsafe_chunk", SQUARE, lambda t: t.unsafe_chunk(2)),
    # Chains.
    Case(
        "chain of ops",
        CUBE,
        lambda t: t.movedim(0, 1).swapaxes(0, 1).chunk(2)[1].unflatten(1, (2, 2)),
    ),
    Case("chain of pieces", CUBE, lambda t: [p.T for half in t.chunk(2) for p in half.unbind(1)]),
    Case("chain of conj", SQUARE, lambda t: t.mH.real.narrow(0, 1, 2), COMPLEX),
    Case("chain of an index", SQUARE, lambda t: t[None, :, 1:, ..., None]),
    Case("chain of loop", SQUARE, list),
]


def sparse():
    return torch.eye(4, dtype=torch.float64).to_sparse()


def jagged():
    parts = [torch.ones(2, 3, dtype=torch.float64), torch.ones(3, 3, dtype=torch.float64)]
    return torch.nested.nested_tensor(parts, layout=torch.jagged)


def nested():
    return torch.nested.nested_tensor([torch.ones(2, 3), torch.ones(3, 3)], dtype=torch.float64)


#: The op, what it is called on, and the call.
LAYOUTS = [
    ("_indices", sparse, aten._indices),
    ("_nested_get_values", jagged, lambda t: t.values()),
    ("_values", sparse, aten._values),
    ("ccol_indices", lambda: sparse().to_sparse_csc(), lambda t: t.ccol_indices()),
    ("chunk of jagged", jagged, lambda t: t.chunk(3, -1)),
    ("chunk of nested", nested, lambda t: t.chunk(3, -1)),
    ("col_indices", lambda: sparse().to_sparse_csr(), lambda t: t.col_indices()),
    ("crow_indices", lambda: sparse().to_sparse_csr(), lambda t: t.crow_indices()),
    ("indices", sparse, lambda t: t.coalesce().indices()),
    ("reshape of nested", nested, lambda t: t.reshape(2, -1, 3, 1)),
    ("row_indices", lambda: sparse().to_sparse_csc(), lambda t: t.row_indices()),
    ("t of sparse", sparse, lambda t: t.t()),
    ("transpose of jagged", jagged, lambda t: t.transpose(1, 2)),
    ("transpose of nested", nested, lambda t: t.transpose(1, 2)),
    ("unbind.int of jagged", jagged, lambda t: t.unbind()),
    ("unbind.int of nested", nested, lambda t: t.unbind()),
    ("values of CSR", lambda: sparse().to_sparse_csr(), lambda t: t.values()),
    ("values of nested", nested, lambda t: t.values()),
    ("values", sparse, lambda t: t.coalesce().values()),
    ("view of nested", nested, lambda t: t.view(2, -1, 3, 1)),
]

#: Ops that return their argument where nothing is to be done.
RETURN_ARGUMENT = {
    "contiguous": lambda t: t.contiguous(),
    "lift_fresh": aten.lift_fresh,
    "pin_memory": lambda t: t,
    "positive": torch.positive,
    "resolve_conj": lambda t: t.resolve_conj(),
    "resolve_neg": lambda t: t.resolve_neg(),
    "to.device": lambda t: t.to("cpu", torch.float64),
    "to.dtype": lambda t: t.to(torch.float64),
    "to.dtype_layout": lambda t: aten.to.dtype_layout(t, dtype=torch.float64),
    "to.other": lambda t: t.to(torch.empty(1, dtype=torch.float64)),
}

# Of these no handler can keep a view that a call above autograd would make.
APART = {
    "_autocast_to_full_precision": "for TorchScript",
    "_autocast_to_reduced_precision": "for TorchScript",
    "_fw_primal": "for forward AD",
    "_make_dual": "for forward AD",
    "_nested_view_from_buffer": "in test_nested.py",
    "_nested_view_from_jagged": "in test_nested.py",
    "_sparse_broadcast_to": "makes new indices",
    "_unpack_dual": "for forward AD",
    "align_to.ellipsis_idx": "for tensors with names",
    "coalesce": "returns its argument where that is coalesced",
}


def test_no_view_op_is_left_out():
    tried = {name.split()[0] for name in (*(c.name for c in CASES), *(n for n, _, _ in LAYOUTS))}
    ops = {n.removeprefix("aten::"): lookup(n) for n in op_names() if n.startswith("aten::")}
    # Tensors with names, which torch has dropped, have twins of many.
    views = {n for n, op in ops.items() if plan_of(op).views and "name" not in str(op._schema)}
    assert views - tried == views & {*RETURN_ARGUMENT, *APART}


def by_name(cases):
    return pytest.mark.parametrize("case", cases, ids=[case.name for case in cases])


def without(*names):
    return [case for case in CASES if case.name not in names]


def given(case, requires_grad):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(case.shape, dtype=case.dtype, generator=generator)
    return x.requires_grad_(requires_grad)


def leaves(value):
    if isinstance(value, torch.Tensor):
        return [value]
    return [t for part in value for t in leaves(part)]


def natively(x, case):
    y = x * 2
    return y, leaves(case.view(y))


def kept(x, case):
    with vt.track(views="full"), On(MUL, case.view) as mode:
        y = x * 2
    return y, leaves(mode.kept[0])


@vt.tracked
class OnTracked(On):
    __torch_dispatch__ = On.__torch_dispatch__


def kept_by_tracked(x, case):
    with vt.track(views="full"), OnTracked(MUL, case.view) as mode:
        y = x * 2
    return y, leaves(mode.kept[0])


each_way = pytest.mark.parametrize("keep", [kept, kept_by_tracked])


def facts(t, base):
    return {
        "type": type(t),
        "is_view": t._is_view(),
        "base": t._base is base,
        "requires_grad": t.requires_grad,
        "grad_fn": history(t.grad_fn),
        "creation_meta": creation_meta(t),
        "version": vt.version(t),
        "inference": t.is_inference(),
    }


def values(t):
    return t.detach().clone().resolve_conj().resolve_neg().tolist()


def history(node):
    """The names of the nodes from here to what made the base."""
    names = []
    while node is not None:
        names.append(node.name())
        node = node.next_functions[0][0] if node.next_functions else None
    return names


@each_way
@pytest.mark.parametrize("requires_grad", [True, False])
@by_name(CASES)
def test_kept_view_is_what_the_call_gives_above(case, requires_grad, keep):
    x = given(case, requires_grad)
    y, views = keep(x, case)
    base, stock = natively(x, case)
    assert [facts(t, y) for t in views] == [facts(t, base) for t in stock]
    assert list(map(values, views)) == list(map(values, stock))
    assert y._version == base._version == 0


@each_way
@pytest.mark.parametrize("requires_grad", [True, False])
@pytest.mark.parametrize(("name", "make", "view"), LAYOUTS, ids=[name for name, _, _ in LAYOUTS])
def test_kept_view_in_other_layouts(name, make, view, requires_grad, keep):
    case = Case(name, (), view)
    x = make().requires_grad_(requires_grad)
    y, views = keep(x, case)
    base, stock = natively(x, case)
    assert [facts(t, y) for t in views] == [facts(t, base) for t in stock]


@pytest.mark.parametrize("name", RETURN_ARGUMENT)
def test_argument_that_comes_back_stays_that_object(name):
    x = torch.ones(2, 2, dtype=torch.float64, requires_grad=True)
    y, (same,) = kept(x, Case(name, (), RETURN_ARGUMENT[name]))
    assert same is y
    assert not y._is_view()


def write_base(y, views):
    y.mul_(torch.arange(float(y.shape[-1] if y.dim() else 1)).add(1).to(y.dtype))


def write_views(y, views):
    return [attempt(lambda v=v: v.mul_(3)._version) for v in views]


def write_both(y, views):
    return [write_views(y, views[:1]), attempt(lambda: y.mul_(2)._version), write_views(y, views)]


def write_under_no_grad(y, views):
    with torch.no_grad():
        return write_both(y, views)


@each_way
@pytest.mark.parametrize("write", [write_base, write_views, write_both, write_under_no_grad])
@by_name(CASES)
def test_values_and_gradients_after_writes(case, write, keep):
    def outcome(make):
        x = given(case, requires_grad=True)
        y, views = make(x, case)
        said = attempt(lambda: write(y, views))
        after = [said, *(attempt(lambda v=v: history(v.grad_fn)) for v in views), y._version]

        def loss():
            return y.abs().sum() + sum(
                (v.double() if v.dtype is torch.int64 else v).abs().sin().sum() for v in views
            )

        grads = attempt(lambda: torch.autograd.grad(loss(), x, create_graph=True))
        return (
            after,
            list(map(values, (y, *views))),
            [g.tolist() for g in grads] if isinstance(grads, tuple) else grads,
        )

    assert outcome(keep) == outcome(natively)


@each_way
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@by_name(without("broadcast_tensors", "unsafe_chunk"))
def test_what_is_kept_in_other_grad_modes(case, mode, keep):
    """The handler switches the mode on: what it is called for is recorded, its views are not."""

    def view(t):
        with mode():
            return case.view(t)

    x = given(case, requires_grad=True)
    other = dataclasses.replace(case, view=view)
    (y, views), (base, stock) = keep(x, other), natively(x, other)
    assert [facts(t, y) for t in views] == [facts(t, base) for t in stock]
    assert write_views(y, views) == write_views(base, stock)


@each_way
# The pieces of `unsafe_chunk` are no views, and are marked before there is a tangent.
@by_name(without("unsafe_chunk", "_test_autograd_multiple_dispatch_view"))
def test_tangents(case, keep):
    def outcome(make):
        with forward_ad.dual_level():
            x = forward_ad.make_dual(given(case, False), given(case, False).sin())
            y, views = make(x, case)
            before = [attempt(lambda v=v: tangent(v)) for v in views]
            said = write_both(y, views)
            return before, said, [attempt(lambda t=t: tangent(t)) for t in (y, *views)]

    assert outcome(keep) == outcome(natively)


def tangent(t):
    found = forward_ad.unpack_dual(t).tangent
    return found if found is None else found.tolist()


def test_pieces_of_which_some_are_returned_and_some_die():
    class Mode(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            if func is aten.slice.Tensor:
                pieces = args[0].split(1)
                self.kept = pieces[0]
                return pieces[3]
            return out

    x = torch.ones(4, 4, requires_grad=True)
    with vt.track(views="full"), Mode() as mode:
        y = x * 2
        last = y[3:]
    assert mode.kept._base is last._base is y
    assert history(mode.kept.grad_fn)[0] == "SplitBackward0"
    assert history(last.grad_fn)[0] == "SliceBackward0"


def test_inner_ops_of_a_composite_op_are_not_shown_to_modes():
    class Counting(On):
        seen = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            self.seen += 1
            return super().__torch_dispatch__(func, types, args, kwargs)

    x = torch.ones(4, 4, requires_grad=True)
    with vt.track(views="full"), Counting(MUL, lambda t: t.movedim(0, 1).chunk(2)) as mode:
        y = x * 2
        assert mode.kept[0][1]._base is y
        assert mode.seen == 1


@pytest.mark.parametrize("change", [lambda t: t.t_(), lambda t: t.unsqueeze_(0)])
@pytest.mark.parametrize("view", [lambda t: t[1:], lambda t: t.narrow(0, 1, 2)])
@pytest.mark.parametrize("which", ["base", "view"])
def test_geometry_that_the_handler_changes_after_it_made_the_view(change, view, which):
    """What the op would return now is not what the handler has; as_strided tells what it has."""

    def then(t):
        kept = view(t)
        change(t if which == "base" else kept)
        return kept

    x = torch.arange(12.0).view(3, 4).requires_grad_()
    with vt.track(views="full"), On(MUL, then) as mode:
        y = x * 2
    (kept,) = mode.kept
    assert kept._base is y
    weight = torch.arange(1.0, 1 + kept.numel()).view(kept.shape)
    base = y.detach().clone(memory_format=torch.preserve_format).requires_grad_()
    stock = base.as_strided(kept.shape, kept.stride(), kept.storage_offset())
    (got,) = torch.autograd.grad((kept * weight).sum(), y)
    (want,) = torch.autograd.grad((stock * weight).sum(), base)
    assert torch.equal(got, want)


def test_wrapper_whose_handler_raises_when_it_is_asked_again(monkeypatch):
    def refuses(cls, func, types, args=(), kwargs=None):
        raise KeyError("planted")

    x = Wrapper(torch.ones(4, 4))
    with vt.track(views="full"), On(MUL, lambda t: t.split(2)[0]) as mode:
        x * 2
        monkeypatch.setattr(Wrapper, "__torch_dispatch__", classmethod(refuses))
    monkeypatch.undo()
    assert mode.kept[0].inner.tolist() == [[2.0] * 4] * 2
