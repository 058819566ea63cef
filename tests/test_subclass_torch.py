"""Torch's own wrapper subclasses: under `track`, inside `TrackedTensor`, under the mixin."""

import copy
from functools import partial

import pytest
import torch
from torch.testing._internal.two_tensor import TwoTensor
from wrappers import aliases

import viewtrack as vt
from viewtrack import TrackedTensor
from viewtrack.ledger import ledger
from viewtrack.testing import SubclassConformance
from viewtrack.testing.subclass_checks import Subject, check_gradients, check_operation
from viewtrack.testing.subclass_table import OPERATIONS

# Nested tensors of layout jagged.


def ragged(requires_grad=False):
    parts = [torch.ones(1, 4, requires_grad=requires_grad), torch.ones(2, 4, requires_grad=True)]
    return parts, torch.nested.as_nested_tensor(parts, layout=torch.jagged)


def test_the_buffer_of_a_nested_tensor_may_be_written_under_track():
    parts, nested = ragged(requires_grad=True)
    nested = nested.clone()
    with vt.track():
        buffer = nested.values()
        buffer.mul_(2)
        nested.values().sum().backward()
    assert buffer._base is nested
    assert [p.grad.flatten().tolist() for p in parts] == [[2.0] * 4, [2.0] * 8]


def test_on_stock_torch_that_write_cannot_be_differentiated():
    _, nested = ragged(requires_grad=True)
    nested = nested.clone()
    nested.values().mul_(2)
    with pytest.raises(NotImplementedError, match="new_empty_strided"):
        nested.values().sum().backward()


def test_a_nested_tensor_inside():
    _, nested = ragged()
    w = TrackedTensor(nested.detach())
    assert w.layout is torch.jagged
    assert w.shape == nested.shape
    out = (w * 2).sin()
    assert type(out.unwrap()) is type(nested)
    assert torch.equal(out.values().unwrap(), (nested.values() * 2).sin())
    v = w.values()
    v.add_(1)
    assert w._version == v._version == w.unwrap()._version == v.unwrap()._version == 1
    assert [len(piece) for piece in w.unbind()] == [1, 2]


# TwoTensor.


class TestTwoTensorInside(SubclassConformance):
    def make(self, inner):
        return TrackedTensor(TwoTensor(inner, inner.clone()))

    def read(self, t):
        inner = t.unwrap()
        assert torch.equal(inner.a, inner.b)
        return inner.a

    # What TwoTensor itself does not do.
    unsupported = frozenset({"resized_out", "resize_larger"})


class TestOutsideTwoTensor(SubclassConformance):
    keeps_inner_counters = False
    unsupported = frozenset(
        {
            "resized_out",
            "resize_larger",
            *(o.name for o in OPERATIONS if o.kind == "foreach" and o.name.endswith("_")),
        }
    )

    def make(self, inner):
        return TwoTensor(TrackedTensor(inner), TrackedTensor(inner.clone()))

    def read(self, t):
        return t.a.unwrap()


def test_two_tensor_under_track_counts_as_without_it():
    def run():
        w = TwoTensor(torch.zeros(2, 3), torch.zeros(2, 3))
        v = w.view(6)
        v.add_(1)
        w.t_()
        return w._version, v._version, aliases(v, w), v._base is w

    expected = run()
    with vt.track():
        assert run() == expected


# DTensor, on a mesh of this one process.


@pytest.fixture(scope="module")
def mesh(tmp_path_factory):
    distributed = pytest.importorskip("torch.distributed")
    if not distributed.is_available() or not distributed.is_gloo_available():
        pytest.skip("needs torch.distributed with gloo")
    store = distributed.FileStore(str(tmp_path_factory.mktemp("store") / "file"), 1)
    distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        yield distributed.device_mesh.init_device_mesh("cpu", (1,))
    finally:
        distributed.destroy_process_group()


def dtensor(mesh, local):
    from torch.distributed.tensor import DTensor, Replicate

    return DTensor.from_local(local, mesh, [Replicate()], run_check=False)


def test_dtensor_under_track(mesh):
    def run():
        w = dtensor(mesh, torch.zeros(2, 3))
        v = w.view(6)
        v.add_(1)
        w.mul_(2)
        x = dtensor(mesh, torch.ones(2, 3)).requires_grad_()
        (x @ x.t()).sum().backward()
        return (
            w._version,
            v._version,
            v._is_view(),
            w.to_local().tolist(),
            x.grad.to_local().tolist(),
        )

    expected = run()
    with vt.track():
        assert run() == expected


DTENSOR_WRITES = {
    "add_": lambda w: w.add_(1),
    "through a view": lambda w: w.view(6).mul_(2),
    "out=": lambda w: torch.add(w, 1, out=w),
    "copy_": lambda w: w.copy_(w * 2),
    "foreach": lambda w: torch._foreach_add_([w], 1),
    "relu_": torch.relu_,
}


@pytest.mark.parametrize("write", DTENSOR_WRITES.values(), ids=DTENSOR_WRITES)
@pytest.mark.parametrize("inner", [torch.zeros, lambda *size: TrackedTensor(torch.zeros(size))])
@pytest.mark.parametrize("views", ["version", "full"])
def test_what_a_dtensor_writes_counts_once_on_each_level(mesh, write, inner, views):
    """From torch 2.13 on its handler is in C++, and leaves no frame to tell it by."""
    local = inner(2, 3)
    w = dtensor(mesh, local)
    with vt.track(views=views):
        write(w)
    assert (w._version, w.to_local()._version, local._version) == (1, 1, 1)
    memory = local.unwrap() if isinstance(local, TrackedTensor) else local
    assert memory._version == 1
    [written] = ledger.writes(memory)
    assert written.filename == __file__


def test_what_a_dtensor_keeps_is_no_write_of_its_owner(mesh):
    """A write to the local tensor is not one to the wrapper, with a tracker or without."""

    def run():
        w = dtensor(mesh, torch.zeros(2, 3))
        w.to_local().add_(1)
        (w + 1).to_local().add_(1)
        return w._version, w.to_local()._version, w.to_local().tolist()

    expected = run()
    with vt.track():
        assert run() == expected


def test_a_dtensor_inside(mesh):
    plain = torch.arange(6.0).view(2, 3).clone()
    w = TrackedTensor(dtensor(mesh, plain.clone()))
    v = w.view(6)
    v.add_(1)
    (plain.view(6)).add_(1)
    assert v._base is w
    assert w._version == w.unwrap()._version == v.unwrap()._version == 1
    assert torch.equal(w.unwrap().to_local(), plain)
    x = TrackedTensor(dtensor(mesh, plain.clone())).requires_grad_()
    (x * x).sum().backward()
    assert torch.equal(x.grad.unwrap().to_local(), 2 * plain)


class TestDTensorInside(SubclassConformance):
    unsupported = frozenset({"resized_out"})

    @pytest.fixture(autouse=True)
    def on_a_mesh(self, mesh):
        self.mesh = mesh

    def make(self, inner):
        return TrackedTensor(dtensor(self.mesh, inner))

    def read(self, t):
        return t.unwrap().to_local()

    def _report(self, name, problems):
        """What DTensor itself raises for is skipped; which ops these are differs by version."""
        if any("raised" in problem for problem in problems):
            bare = Subject(partial(dtensor, self.mesh), lambda t: t.to_local(), self.same, False)
            found = (
                check_gradients(bare)
                if name == "gradients"
                else check_operation(next(o for o in OPERATIONS if o.name == name), bare)
            )
            if any("raised" in problem for problem in found):
                pytest.skip(f"DTensor itself does not have `{name}`: {found[0]}")
        super()._report(name, problems)


def test_a_tracked_tensor_inside_a_dtensor(mesh):
    w = dtensor(mesh, TrackedTensor(torch.zeros(2, 3)))
    w.add_(1)
    assert isinstance(w.to_local(), TrackedTensor)
    assert w.to_local().unwrap().tolist() == [[1.0] * 3] * 2
    assert w._version == 1


# Torchao's quantized weights.


@pytest.mark.compat
def test_torchao_quantized_weight():
    try:
        from torchao import quantization
    except (ImportError, AttributeError) as error:
        pytest.skip(f"needs a torchao for torch {torch.__version__}: {error}")
    module = torch.nn.Sequential(torch.nn.Linear(64, 32, bias=False)).to(torch.bfloat16)
    x = torch.rand(2, 64, dtype=torch.bfloat16)
    quantization.quantize_(module, quantization.Int8WeightOnlyConfig())
    expected = module(x)
    with vt.track():
        assert torch.equal(module(x), expected)
    weight = module[0].weight
    # Inside, only what the class itself implements: `linear` comes apart before it gets there.
    w = TrackedTensor(weight.detach())
    assert (w.shape, w.dtype) == (weight.shape, weight.dtype)
    part = w[:16]
    assert part._base is w
    assert aliases(part, w)
    for copied in (w.clone(), copy.deepcopy(w)):
        assert type(copied.unwrap()) is type(weight)
        assert torch.equal(copied.unwrap().dequantize(), weight.dequantize())
