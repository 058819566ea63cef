"""`TrackedTensor` against the tensor inside it."""

import copy
import io
import pickle
from typing import ClassVar

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from wrappers import aliases

import viewtrack as vt
from viewtrack import TrackedTensor


def six():
    return TrackedTensor(torch.arange(6.0).view(2, 3))


def all_versions(*tensors):
    """The versions of wrappers and of all that is in them."""
    versions = []
    for t in tensors:
        while isinstance(t, TrackedTensor):
            versions.append(vt.version(t))
            t = t.unwrap()
        versions.append(vt.version(t))
    return versions


# What it wraps.

WRAPPED = {
    "strided": lambda: torch.arange(6.0).view(2, 3),
    "expanded": lambda: torch.arange(3.0).expand(2, 3),
    "offset": lambda: torch.arange(9.0)[3:].view(2, 3),
    "scalar": lambda: torch.tensor(3.0),
    "empty": lambda: torch.empty(0, 3),
    "int64": lambda: torch.arange(6),
    "bool": lambda: torch.tensor([True, False]),
    "bfloat16": lambda: torch.arange(6.0, dtype=torch.bfloat16),
    "conj": lambda: torch.tensor([1 + 2j]).conj(),
    "neg": lambda: torch.tensor([1 + 2j]).conj().imag,
    "meta": lambda: torch.empty(2, 3, device="meta"),
    "coo": lambda: torch.eye(3).to_sparse(),
    "csr": lambda: torch.eye(3).to_sparse_csr(),
    "bsc": lambda: torch.eye(4).to_sparse_bsc((2, 2)),
    "wrapper": lambda: six(),
    "parameter": lambda: torch.nn.Parameter(torch.ones(2)),
    "written": lambda: torch.ones(2).add_(1),
}


@pytest.mark.parametrize("name", WRAPPED)
def test_it_shows_what_it_wraps(name):
    inner = WRAPPED[name]()
    w = TrackedTensor(inner)
    assert (w.shape, w.dtype, w.device, w.layout) == (
        inner.shape,
        inner.dtype,
        inner.device,
        inner.layout,
    )
    assert (w.is_conj(), w.is_neg(), w.is_meta) == (inner.is_conj(), inner.is_neg(), inner.is_meta)
    assert w.requires_grad == inner.requires_grad
    assert w._version == inner._version
    if inner.layout is torch.strided:
        assert (w.stride(), w.storage_offset()) == (inner.stride(), inner.storage_offset())
        assert w.untyped_storage().nbytes() == inner.untyped_storage().nbytes()


def test_unwrap_gives_the_tensor_itself():
    inner = torch.ones(2)
    assert TrackedTensor(inner).unwrap() is inner


def test_what_requires_grad_is_wrapped_without_its_gradient():
    inner = torch.ones(2, requires_grad=True)
    w = TrackedTensor(inner)
    assert w.is_leaf
    (w * 3).sum().backward()
    assert torch.equal(w.grad.unwrap(), torch.full((2,), 3.0))
    assert inner.grad is None
    assert aliases(w.unwrap(), inner)


def test_only_tensors_are_wrapped():
    with pytest.raises(TypeError, match="`TrackedTensor` wraps a tensor, got `int`"):
        TrackedTensor(3)


# Views and counters.


def test_views_and_counters_at_every_level():
    w = six()
    v = w.view(6)
    u = v[2:].view(2, 2)
    assert v._base is u._base is w
    assert aliases(u, w)
    assert aliases(u.unwrap(), w.unwrap())
    assert not u.unwrap()._is_view()
    u.add_(1)
    assert all_versions(w, v, u) == [1] * 6
    u.unwrap().add_(1)
    assert [t.unwrap()._version for t in (w, v, u)] == [2, 2, 2]
    assert w.tolist() == [[0, 1, 4], [5, 6, 7]]


def test_wrappers_around_wrappers_count_at_every_level():
    w = TrackedTensor(TrackedTensor(six()))
    v = w.t()
    pieces = w.unbind()
    pieces[0].mul_(2)
    torch._foreach_add_([w, v], 1.0)
    assert all_versions(w, v, *pieces) == [3] * 16


@pytest.mark.parametrize(
    "write",
    [
        lambda w: w.add_(1),
        lambda w: w.copy_(torch.ones(2, 3)),
        lambda w: torch.add(w, 1, out=w),
        lambda w: torch._foreach_mul_([w], 2.0),
        lambda w: torch.unbind_copy(torch.ones(1, 2, 3), out=[w]),
        lambda w: w.t_(),
        lambda w: w.resize_(2, 3),
        lambda w: w.resize_(3, 3),
        lambda w: w.set_(six()),
        lambda w: w.index_put_((torch.tensor([0]),), torch.tensor(1.0)),
        lambda w: torch.nn.functional.relu(w, inplace=True),
        lambda w: torch.nn.init.normal_(w),
    ],
)
def test_a_write_moves_both_counters_as_far_as_a_plain_one(write):
    plain, w = six().unwrap().clone(), TrackedTensor(six().unwrap().clone())
    write(plain)
    write(w)
    assert w._version == w.unwrap()._version == plain._version
    assert (w.shape, w.stride()) == (w.unwrap().shape, w.unwrap().stride())


def test_an_in_place_op_that_grows_its_argument_grows_the_wrapper():
    w = TrackedTensor(torch.ones(1))
    assert w.addbmm_(torch.ones(2, 3, 4), torch.ones(2, 4, 5)) is w
    assert w.shape == w.unwrap().shape == (3, 5)
    assert w.view(15)[0].item() == 9


def test_a_write_to_a_plain_argument_counts_once():
    w, plain = six(), torch.zeros(2, 3)
    assert plain.copy_(w) is plain
    torch.add(w, w, out=plain)
    assert plain._version == 2
    assert type(plain) is torch.Tensor
    assert all_versions(w) == [0, 0]


def test_batch_norm_moves_what_it_moves_on_stock_torch():
    def run(wrap):
        bn = torch.nn.BatchNorm1d(3)
        bn.running_mean = wrap(bn.running_mean)
        bn.running_var = wrap(bn.running_var)
        x = wrap(torch.rand(4, 3)).requires_grad_()
        bn(x).sum().backward()
        return bn.running_mean

    plain, wrapped = run(lambda t: t), run(TrackedTensor)
    assert all_versions(wrapped) == [plain._version] * 2


@pytest.mark.parametrize("record", ["none", "site", None])
def test_under_track_it_is_the_same(record):
    def run():
        w = six()
        v = w.view(6)
        v.add_(1)
        torch._foreach_add_([w], 1.0)
        w.t_()
        w.unbind()[0].zero_()
        return [*all_versions(w, v), v._is_view(), v._base is w, w.tolist()]

    expected = run()
    assert expected[:4] == [4, 4, 4, 4]
    with vt.track(record=record) if record else NoOp():
        assert run() == expected


class NoOp(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


def test_below_autograd_in_a_tracked_handler_views_share_counters():
    seen = []

    class Mode(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            if func is torch.ops.aten.mul.Tensor:
                v = out.view(6)
                v.add_(1)
                seen.append(all_versions(out, v))
            return out

    with vt.track(), Mode():
        six() * 2
    assert seen == [[1, 1, 1, 1]]


def test_a_handler_s_write_that_no_kernel_counts_moves_both_counters_once():
    seen = []

    class Mode(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            if func is torch.ops.aten.mul.Tensor:
                out.add_(1)
                seen.append(all_versions(out))
            return out

    with Mode(), NoOp():
        w = six()
        w * 2
        w.add_(1)
    assert seen == [[1, 1]]
    assert all_versions(w) == [1, 1]


# Conj and neg bits, which kernels above Python look for on the wrapper.


def test_conjugated_values_are_conjugated():
    x = torch.tensor([1 + 2j, 3 - 1j])
    w = TrackedTensor(x)
    assert torch.equal((w.conj() * 1j).unwrap(), x.conj() * 1j)
    assert torch.equal(w.conj().imag.abs().unwrap(), x.conj().imag.abs())
    y = TrackedTensor(torch.zeros(2, dtype=torch.complex64))
    y.conj()[0] = 1 + 2j
    assert y.tolist() == [1 - 2j, 0]


def test_a_bit_that_an_op_leaves_on_its_out_argument_is_on_the_wrapper():
    a = torch.randn(3, 3, dtype=torch.complex64)
    lu, pivots = torch.linalg.lu_factor(a)
    plain, out = torch.empty(0, dtype=torch.complex64), torch.empty(0, dtype=torch.complex64)
    torch.linalg.lu_solve(lu, pivots, a, left=False, adjoint=True, out=plain)
    w = TrackedTensor(out)
    arguments = map(TrackedTensor, (lu, pivots, a))
    torch.linalg.lu_solve(*arguments, left=False, adjoint=True, out=w)
    assert w.is_conj() == w.unwrap().is_conj() == plain.is_conj()
    assert torch.equal((w * 1).unwrap(), plain * 1)


def test_kernels_that_conjugate_inside_are_right():
    x = torch.randn(3, 5, dtype=torch.complex64)
    assert torch.allclose(torch.linalg.pinv(TrackedTensor(x)).unwrap(), torch.linalg.pinv(x))


def test_a_kernel_that_asks_whether_its_arguments_require_grad_is_told():
    def grad(wrap):
        a, b = wrap(torch.eye(3).to_sparse_csr()), wrap(torch.ones(3, 2))
        out = torch.sparse.mm(a.requires_grad_(), b.requires_grad_(), "amax")
        return torch.autograd.grad(out.sum(), b)[0]

    assert torch.equal(grad(TrackedTensor).unwrap(), grad(lambda t: t))


# Copies.


def test_deepcopy_keeps_geometry_sharing_and_gradient():
    w = TrackedTensor(torch.arange(6.0).view(2, 3).t(), requires_grad=True)
    (w * w).sum().backward()
    w.note = [w]
    copied = copy.deepcopy(w)
    assert copied is not w
    assert (copied.shape, copied.stride()) == (w.shape, w.stride())
    assert not aliases(copied.unwrap(), w.unwrap())
    assert torch.equal(copied.grad.unwrap(), w.grad.unwrap())
    assert copied.note == [copied]
    base = six()
    one, other = copy.deepcopy([base.unwrap(), base])
    assert other.unwrap() is one


def test_deepcopy_refuses_what_torch_refuses():
    with pytest.raises(RuntimeError, match="grad_fn"):
        copy.deepcopy(TrackedTensor(torch.ones(2), requires_grad=True) * 2)


@pytest.mark.parametrize("way", ["pickle", "save"])
def test_pickling_keeps_everything(way):
    w = TrackedTensor(torch.arange(6.0).view(2, 3).t(), requires_grad=True)
    w.note = "kept"
    if way == "pickle":
        copied = pickle.loads(pickle.dumps(w))
    else:
        file = io.BytesIO()
        torch.save(w, file)
        file.seek(0)
        copied = torch.load(file, weights_only=False)
    assert type(copied) is TrackedTensor
    assert (copied.shape, copied.stride(), copied.requires_grad) == (w.shape, w.stride(), True)
    assert copied.note == "kept"
    assert torch.equal(copied.unwrap(), w.unwrap())


def test_repr_shows_the_values_and_the_history():
    w = TrackedTensor(torch.ones(2), requires_grad=True)
    assert repr(w) == "TrackedTensor(tensor([1., 1.]), requires_grad=True)"
    assert repr(w * 2) == "TrackedTensor(tensor([2., 2.]), grad_fn=<MulBackward0>)"
    assert repr(w.detach()) == "TrackedTensor(tensor([1., 1.]))"


def test_numpy_shares_memory_as_torch_s_does():
    w = six()
    w.numpy()[0, 0] = 7
    assert w[0, 0].item() == 7
    np.testing.assert_array_equal(np.asarray(w), w.unwrap().numpy())
    with pytest.raises(RuntimeError, match="requires grad"):
        w.requires_grad_().numpy()


def test_flatten_and_unflatten_are_inverse():
    w = six()
    names, context = w.__tensor_flatten__()
    inner = {name: getattr(w, name) for name in names}
    again = TrackedTensor.__tensor_unflatten__(inner, context, w.size(), w.stride())
    assert again.unwrap() is w.unwrap()


# Modules, transforms, modes.


def test_as_a_parameter_of_a_module_it_trains_as_a_plain_one():
    def train(wrap):
        torch.manual_seed(0)
        module = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1))
        for layer in (module[0], module[2]):
            layer.weight = torch.nn.Parameter(wrap(layer.weight.detach()))
        optimizer = torch.optim.AdamW(module.parameters(), lr=0.1)
        for _ in range(3):
            optimizer.zero_grad()
            module(torch.ones(5, 3)).square().mean().backward()
            optimizer.step()
        return module

    plain, wrapped = train(lambda t: t), train(TrackedTensor)
    for name, p in wrapped.named_parameters():
        expected = plain.get_parameter(name)
        value = p.detach()
        assert isinstance(p, torch.nn.Parameter)
        assert torch.equal(value.unwrap() if isinstance(value, TrackedTensor) else value, expected)
    weight = wrapped[0].weight
    assert weight._version == weight.unwrap()._version == plain[0].weight._version


def test_module_to_converts_the_inner_tensor():
    module = torch.nn.Linear(3, 2)
    module.weight = torch.nn.Parameter(TrackedTensor(module.weight.detach()))
    module.to(torch.float64)
    assert module.weight.dtype is module.weight.unwrap().dtype is torch.float64
    assert isinstance(module.weight, TrackedTensor)
    assert module(torch.ones(1, 3, dtype=torch.float64)).dtype is torch.float64
    copied = copy.deepcopy(module)
    assert isinstance(copied.weight, torch.nn.Parameter)
    module.load_state_dict(copied.state_dict())


def test_func_transforms():
    x = torch.arange(6.0).view(2, 3)

    def f(t):
        return (t.sin() * t).sum()

    assert torch.equal(torch.func.grad(f)(TrackedTensor(x)).unwrap(), torch.func.grad(f)(x))
    assert torch.equal(torch.func.vmap(f)(TrackedTensor(x)).unwrap(), torch.func.vmap(f)(x))
    found = torch.func.jvp(f, (TrackedTensor(x),), (TrackedTensor(x),))
    assert [t.unwrap() for t in found] == list(torch.func.jvp(f, (x,), (x,)))
    rows = torch.func.vmap(torch.func.grad(f))(TrackedTensor(x))
    assert torch.equal(rows.unwrap(), torch.func.vmap(torch.func.grad(f))(x))


def test_forward_mode():
    x, t = torch.rand(2, 3), torch.rand(2, 3)
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(TrackedTensor(x), TrackedTensor(t.clone()))
        dual.view(6).mul_(2)
        out = torch.autograd.forward_ad.unpack_dual(dual)
    assert torch.equal(out.tangent.unwrap(), 2 * t)


def test_gradcheck_with_writes_to_views():
    x = torch.rand(2, 3, dtype=torch.float64, requires_grad=True)

    def f(t):
        w = TrackedTensor(torch.ones(2, 3, dtype=torch.float64)) * t
        w[0].mul_(t[1])
        w.t()[1:].sin_()
        return w.sum()

    f(x).backward()
    plain = x.detach().requires_grad_()
    w = torch.ones(2, 3, dtype=torch.float64) * plain
    w[0].mul_(plain[1])
    w.t()[1:].sin_()
    w.sum().backward()
    grad = x.grad.unwrap() if isinstance(x.grad, TrackedTensor) else x.grad
    assert torch.equal(grad, plain.grad)


@pytest.mark.parametrize("made_inside", [True, False])
def test_inference_mode(made_inside):
    w = None if made_inside else six()
    with torch.inference_mode():
        w = w if w is not None else six()
        v = w.view(6)
        v.add_(1)
        assert v.is_inference() == w.is_inference() == made_inside
        assert aliases(v, w)
        assert aliases(w.reshape(6), w)
        assert not aliases(w.t().reshape(6), w)
        assert (w + 1).is_inference()
        assert w.contiguous() is w
        torch._foreach_add_([w], 1.0)
        assert w.tolist() == [[2, 3, 4], [5, 6, 7]]
    if not made_inside:
        assert all_versions(w, v) == [2] * 4
    assert (w * 2).tolist() == [[4, 6, 8], [10, 12, 14]]


def test_what_stock_torch_refuses_is_refused():
    w = TrackedTensor(torch.ones(2, 3), requires_grad=True)
    with pytest.raises(RuntimeError, match="a view of a leaf Variable that requires grad"):
        w.view(6).add_(1)
    y = w * 2
    piece = y.unbind()[0]
    with pytest.raises(RuntimeError, match="multiple views"):
        piece.add_(1)
    z = y.exp()
    y.sum()
    z.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        z.sum().backward()
    with pytest.raises(RuntimeError, match="not compatible with input tensor's size"):
        six().t().view(6)


# As a base class.


class Logged(TrackedTensor):
    """Runs every op as it is, and remembers its name."""

    log: ClassVar[list[str]] = []

    @classmethod
    def run(cls, func, args, kwargs):
        cls.log.append(str(func))
        return super().run(func, args, kwargs)


def test_a_subclass_sees_every_op_and_stays_itself():
    Logged.log.clear()
    w = Logged(torch.ones(2, 3))
    v = (w + 1).view(6)
    v.mul_(2)
    assert Logged.log == ["aten.add.Tensor", "aten.view.default", "aten.mul_.Tensor"]
    assert type(v) is Logged
    assert all_versions(v, v._base) == [1] * 4
    assert type(TrackedTensor(torch.ones(2, 3)) + w) is Logged


class Doubled(TrackedTensor):
    """Keeps twice its values: run on what they mean, write back what they are kept as."""

    @classmethod
    def run(cls, func, args, kwargs):
        if func.is_view:
            return args[0].like(func(args[0].unwrap(), *args[1:], **kwargs))
        is_own = lambda t: isinstance(t, cls)  # noqa: E731
        mapped = torch.utils._pytree.tree_map
        meant = {id(t): t.unwrap() / 2 for t in torch.utils._pytree.tree_leaves(args) if is_own(t)}
        out = func(*mapped(lambda t: meant[id(t)] if is_own(t) else t, args), **kwargs)
        for t in torch.utils._pytree.tree_leaves(args):
            if is_own(t) and func._schema.is_mutable:
                t.unwrap().copy_(meant[id(t)] * 2)
        return out


def test_a_subclass_that_keeps_something_else_has_right_views_and_counters():
    w = Doubled(torch.full((2, 3), 4.0))
    v = w.view(6)
    assert v.add_(1) is v
    assert w.unwrap().tolist() == [[6.0] * 3] * 2
    assert all_versions(w, v) == [1] * 4
    out = w * 10
    assert type(out) is torch.Tensor
    assert out.tolist() == [[30.0] * 3] * 2


@pytest.mark.heavy
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_torch_compile(backend):
    def f(w):
        v = w.view(-1)
        return (v * 2).sin() + v, w.t()

    x = torch.rand(2, 3)
    compiled = torch.compile(f, backend=backend, fullgraph=True)
    grads = []
    for fn in (f, compiled):
        w = TrackedTensor(x.clone(), requires_grad=True)
        out, t = fn(w)
        assert type(out) is TrackedTensor
        assert t._base is w
        out.sum().backward()
        grads.append(w.grad.unwrap())
    assert torch.allclose(*grads)


@pytest.mark.heavy
def test_torch_compile_with_a_write():
    def f(w):
        w.view(-1).add_(1)
        return w * 2

    w, plain = TrackedTensor(torch.zeros(2, 3)), torch.zeros(2, 3)
    out = torch.compile(f, backend="aot_eager", fullgraph=True)(w)
    assert torch.equal(out.unwrap(), f(plain))
    assert torch.equal(w.unwrap(), plain)
