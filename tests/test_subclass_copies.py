"""View ops of wrappers whose handler copied are named; none that aliases is."""

import pytest
import torch
from torch.utils._pytree import tree_map_only
from wrappers import make_wrapper

import viewtrack as vt
from viewtrack import TrackedTensor

aten = torch.ops.aten

VIEWS = {
    "view": (aten.view.default, lambda x: x.view(x.shape)),
    "t": (aten.t.default, lambda x: x.t()),
    "slice": (aten.slice.Tensor, lambda x: x[1:]),
    "expand": (aten.expand.default, lambda x: x.expand(2, *x.shape)),
    "unbind": (aten.unbind.int, lambda x: x.unbind()),
    "split": (aten.split.Tensor, lambda x: x.split(1)),
}


def copying(op, which):
    """Copies what `op` returns; of a list, the items of these indices."""

    def wrap(cls, func, args, inner):
        if func is op:
            if isinstance(inner, torch.Tensor):
                return cls(inner.clone())
            return [cls(t.clone() if i in which else t) for i, t in enumerate(inner)]
        return tree_map_only(torch.Tensor, cls, inner)

    return wrap


@pytest.mark.parametrize("tracks", [False, True])
@pytest.mark.parametrize("flattens", [False, True])
@pytest.mark.parametrize("which", [{0, 1}, {1}])
@pytest.mark.parametrize("name", VIEWS)
def test_a_wrapper_s_view_op_that_copies_is_named(name, which, flattens, tracks):
    op, call = VIEWS[name]
    wrapper = make_wrapper(flattens=flattens, wrap=copying(op, which))
    for _ in range(2):  # a class and an op are treated otherwise when they were met before
        x = wrapper(torch.ones(2, 3))
        with (
            vt.track() if tracks else torch.enable_grad(),
            pytest.raises(vt.AliasingError, match=r"output 0.*argument `self`") as raised,
        ):
            call(x)
    text = str(raised.value)
    assert f"`{op}`" in text
    assert "wrappers.py:" in text
    assert "in __torch_dispatch__" in text


@pytest.mark.parametrize("name", VIEWS)
def test_a_tracked_tensor_whose_run_copies_is_named(name):
    op, call = VIEWS[name]

    class Copying(TrackedTensor):
        @classmethod
        def run(cls, func, args, kwargs):
            out = super().run(func, args, kwargs)
            if func is op:
                return tree_map_only(TrackedTensor, lambda t: t.like(t.unwrap().clone()), out)
            return out

    x = Copying(torch.ones(2, 3))
    for _ in range(2):
        with pytest.raises(vt.AliasingError, match=rf"Copying\.run` at .*{__name__}.*`{op}`"):
            call(x)
    call(TrackedTensor(torch.ones(2, 3)))


def test_a_copy_of_what_does_not_lie_well_is_found_when_it_comes():
    """A handler of a class that declares its inner tensors is looked at each time."""

    def wrap(cls, func, args, inner):
        if func is aten.view.default:
            return cls(inner if args[0].e.storage_offset() == 0 else inner.clone())
        return tree_map_only(torch.Tensor, cls, inner)

    x = make_wrapper(flattens=True, wrap=wrap)(torch.ones(2, 3))
    x.view(-1)
    with pytest.raises(vt.AliasingError):
        x[1:].view(-1)


# What is no copy.


class Scaled(torch.Tensor):
    """Keeps integers, a scale that it makes anew each time, and what they stand for."""

    @staticmethod
    def __new__(cls, numbers, scale):
        return torch.Tensor._make_wrapper_subclass(cls, numbers.shape, dtype=torch.float32)

    def __init__(self, numbers, scale):
        self.numbers, self.scale = numbers, scale
        self.cached = numbers * scale

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        out = cls(func(args[0].numbers, *args[1:], **(kwargs or {})), args[0].scale.clone())
        return vt.correct_aliasing(func, args, kwargs, out)


class DeclaringScaled(Scaled):
    def __tensor_flatten__(self):
        return ["numbers", "scale"], None


@pytest.mark.parametrize("cls", [Scaled, DeclaringScaled])
def test_one_inner_tensor_that_aliases_is_enough(cls):
    x = cls(torch.ones(2, 3, dtype=torch.int8), torch.tensor(2.0))
    assert x.view(-1)._base is x
    assert x.view(-1).t()._base is x


INNER = {
    "empty": lambda: torch.ones(0, 3),
    "meta": lambda: torch.ones(2, 3, device="meta"),
    "complex": lambda: torch.ones(2, 3, dtype=torch.complex64).conj(),
    "expanded": lambda: torch.ones(3).expand(2, 3),
    "wrapper": lambda: make_wrapper(flattens=True)(torch.ones(2, 3)),
    "tracked": lambda: TrackedTensor(torch.ones(2, 3)),
    "parameter": lambda: torch.nn.Parameter(torch.ones(2, 3)).data,
}


@pytest.mark.parametrize("inner", INNER)
@pytest.mark.parametrize("name", VIEWS)
def test_a_view_is_a_view(name, inner):
    for make in (TrackedTensor, make_wrapper(), make_wrapper(flattens=True)):
        x = make(INNER[inner]())
        views = VIEWS[name][1](x)
        for v in [views] if isinstance(views, torch.Tensor) else views:
            assert v._base is x


def test_parts_of_a_sparse_tensor_are_views():
    coo = TrackedTensor(torch.eye(3).to_sparse().coalesce())
    assert coo.values().unwrap().tolist() == [1, 1, 1]
    assert coo.indices().shape == (2, 3)
    csr = TrackedTensor(torch.eye(3).to_sparse_csr())
    assert csr.values().shape == csr.col_indices().shape == (3,)


def test_views_inside_of_transforms():
    for make in (TrackedTensor, make_wrapper(flattens=True), make_wrapper()):
        x = make(torch.arange(6.0).view(2, 3))
        for row in torch.func.vmap(lambda t: t.view(3, 1)[1:].sum())(x).unbind():
            assert row.item() in (3.0, 9.0)
