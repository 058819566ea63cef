"""`register` on torch's own ops that write and have no ADInplaceOrView kernel."""

import contextlib

import pytest
import torch
from library_ops import CONTEXTS, Issue

import viewtrack as vt
from viewtrack import ViewTrackError, library
from viewtrack._torch.kernels import has_native_kernel
from viewtrack.plan import plan_of

FUSED = ["_fused_sgd_", "_fused_adam_", "_fused_adamw_", "_fused_adagrad_"]
OPS = [*FUSED, "_foreach_add_.List", "split_with_sizes_copy.out", "unbind_copy.int_out"]


@pytest.fixture
def registered():
    lib = torch.library.Library("aten", "FRAGMENT")
    yield [library.register(f"aten::{name}", lib=lib) for name in OPS]
    lib._destroy()


def step(make):
    """How often an optimizer's step counts."""
    weight = torch.nn.Parameter(torch.tensor([3.0]))
    weight.grad = torch.ones(1)
    before = weight._version
    make([weight]).step()
    assert weight.item() != 3
    return weight._version - before


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=1.0, momentum=0.9, fused=True)


OPTIMIZERS = {
    "sgd": sgd,
    "adam": lambda p: torch.optim.Adam(p, fused=True),
    "adamw": lambda p: torch.optim.AdamW(p, fused=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, fused=True),
    "foreach": lambda p: torch.optim.SGD(p, lr=1.0, foreach=True),
}


def outs():
    """How often out= lists count."""
    source = torch.arange(12.0).view(2, 6)
    split = [torch.empty(2, n) for n in (1, 2, 3)]
    torch.split_with_sizes_copy(source, [1, 2, 3], -1, out=split)
    rows = [torch.empty(6), torch.empty(6)]
    torch.ops.aten.unbind_copy.int_out(source, 0, out=rows)
    assert torch.equal(torch.cat(split, 1), source)
    assert torch.equal(torch.stack(rows), source)
    return {t._version for t in (*split, *rows)}


WITH_HANDLERS = {**CONTEXTS, "track, mode": lambda: _nested(vt.track, CONTEXTS["mode"])}


@contextlib.contextmanager
def _nested(outer, inner):
    with outer(), inner():
        yield


@pytest.mark.parametrize("context", WITH_HANDLERS.values(), ids=WITH_HANDLERS)
def test_writes_count_once_above_autograd(registered, context):
    with context():
        assert {name: step(make) for name, make in OPTIMIZERS.items()} == dict.fromkeys(
            OPTIMIZERS, 1
        )
        assert outs() == {1}


@pytest.mark.parametrize("mode", [Issue, vt.tracked(Issue)], ids=["plain", "tracked"])
@pytest.mark.parametrize("outer", [contextlib.nullcontext, vt.track])
def test_writes_count_once_in_a_handler(registered, outer, mode):
    def issue(_):
        return step(sgd), outs()

    with outer(), mode(issue) as issuing:
        torch.ones(1).sin()
    assert issuing.results == [(1, {1})]


def test_a_fused_step_between_forward_and_backward_raises(registered):
    weight = torch.nn.Parameter(torch.tensor([3.0]))
    optimizer = sgd([weight])
    loss = (weight * weight).sum()
    weight.grad = torch.ones(1)
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_the_ledger_knows_the_step(registered):
    with vt.track(record="site"):
        weight = torch.nn.Parameter(torch.tensor([3.0]))
        weight.grad = torch.ones(1)
        sgd([weight]).step()
        assert vt.storage_version(weight) == 1


def _adds_to_itself(x):
    y = x * 1
    torch._foreach_add_([y], [x])
    return y.sum()


def test_gradients_and_compilers_stay_those_of_torch(registered):
    x = torch.ones(2, requires_grad=True)
    _adds_to_itself(x).backward()
    torch.compile(_adds_to_itself, backend="aot_eager", fullgraph=True)(x).backward()
    assert x.grad.tolist() == [4, 4]
    assert torch.func.grad(_adds_to_itself)(torch.ones(2)).tolist() == [2, 2]
    with torch.inference_mode():
        assert _adds_to_itself(torch.ones(2)) == 4


def test_the_registration_ends_with_its_library():
    lib = torch.library.Library("aten", "FRAGMENT")
    before = step(sgd)
    for _ in range(2):  # the second time in place of the first
        library.register(torch.ops.aten._fused_sgd_.default, lib=lib)
        assert step(sgd) == 1
    lib._destroy()
    assert step(sgd) == before
    assert plan_of(torch.ops.aten._fused_sgd_.default).has_native_kernel is has_native_kernel(
        "aten::_fused_sgd_"
    )
    with vt.track():
        assert step(sgd) == before


def test_without_a_library_it_stays_and_may_be_repeated():
    for _ in range(2):
        library.register("aten::_foreach_mul_.Scalar")
    with CONTEXTS["mode"]():
        x = torch.ones(2)
        torch._foreach_mul_([x], 3.0)
    assert x._version == 1


def test_an_op_that_counts_by_itself_is_left_alone():
    lib = torch.library.Library("aten", "FRAGMENT")
    library.register(torch.ops.aten.add_.Tensor, lib=lib)
    assert torch.ones(2).add_(1)._version == 1
    lib._destroy()
    assert has_native_kernel("aten::add_.Tensor")


def test_the_rest_of_a_native_op_is_torchs(registered):
    for register, fn in (
        ("register_autograd", lambda ctx, grad: grad),
        ("register_jvp", lambda ctx, t: t),
        ("register_fake", lambda *args: None),
        ("register_vmap", lambda *args: None),
    ):
        with pytest.raises(ViewTrackError, match=rf"_fused_sgd_.*torch's own op.*`{register}`"):
            getattr(registered[0], register)(fn)
    with pytest.raises(ViewTrackError, match="`register_kernel`"):
        registered[0].register_kernel("cpu", lambda *args: None)
