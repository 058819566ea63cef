"""`TrackedTensor` where people use tensors: each program gives what it gives with plain ones."""

import copy

import pytest
import torch
import torch.nn.functional as F
from functions import Dirty
from torch import nn
from torch.func import functional_call, grad, hessian, jacfwd, jacrev, vmap
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import viewtrack as vt
from viewtrack import TrackedTensor


def bare(t):
    """What lies in the innermost wrapper."""
    while type(t) is not torch.Tensor:
        t = t.a if isinstance(t, TwoTensor) else t.unwrap()
    return t.detach()


def both(program, *tensors, wrap=TrackedTensor):
    """What a program gives for tensors, and for wrappers around them."""
    plain = program(*(t.clone().requires_grad_(t.is_floating_point()) for t in tensors))
    wrapped = program(*(wrap(t.clone()).requires_grad_(t.is_floating_point()) for t in tensors))
    return plain, wrapped


def assert_same(plain, wrapped):
    assert len(plain) == len(wrapped)
    for p, w in zip(plain, wrapped, strict=True):
        if isinstance(p, torch.Tensor):
            assert torch.equal(p.detach(), bare(w))
        else:
            assert p == w


def writes_to_views(x):
    y = x * 2
    y[0].mul_(3)
    y.view(-1).add_(1)
    y.t()[1:].mul_(x.t()[1:])
    (y * y).sum().backward()
    return x.grad, y, y._version, type(y.grad_fn).__name__


NESTINGS = {
    "one": TrackedTensor,
    "two": lambda t: TrackedTensor(TrackedTensor(t)),
    "in TwoTensor": lambda t: TwoTensor(TrackedTensor(t), TrackedTensor(t.clone())),
    "around TwoTensor": lambda t: TrackedTensor(TwoTensor(t, t.clone())),
    "around and in": lambda t: TrackedTensor(TwoTensor(TrackedTensor(t), TrackedTensor(t.clone()))),
}


@pytest.mark.parametrize("nesting", NESTINGS)
def test_nested_in_another_wrapper(nesting):
    assert_same(*both(writes_to_views, torch.arange(6.0).view(2, 3), wrap=NESTINGS[nesting]))


class PassOn(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    "mode", [PassOn, lambda: FlopCounterMode(display=False), lambda: vt.track(views="full")]
)
def test_under_a_mode(mode):
    def program(x):
        with mode():
            return writes_to_views(x)

    plain, _ = both(writes_to_views, torch.arange(6.0).view(2, 3))
    _, wrapped = both(program, torch.arange(6.0).view(2, 3))
    assert_same(plain, wrapped)


def test_inference_mode_reaches_tensors_from_outside_and_inside():
    def program(x):
        x = x.detach()
        with torch.inference_mode():
            x.view(6).add_(1)
            x.t().mul_(2)
            fresh = x * 3
            fresh[0].zero_()
            kinds = (x.is_inference(), x.view(6).is_inference(), fresh.is_inference())
            inside = type(x)(torch.ones(3)) if type(x) is TrackedTensor else torch.ones(3)
            inside[1:].add_(1)
        with pytest.raises(RuntimeError, match="Inplace update to inference tensor"):
            fresh.add_(1)
        assert x._version == getattr(x, "unwrap", lambda: x)()._version
        return x, x._version, kinds, inside

    assert_same(*both(program, torch.arange(6.0).view(2, 3)))


def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.Flatten(), nn.Linear(8, 3))


def wrap_all(module):
    for part in module.modules():
        for name, p in part._parameters.items():
            part._parameters[name] = nn.Parameter(TrackedTensor(p.detach().clone()))
        for name, b in part._buffers.items():
            part._buffers[name] = TrackedTensor(b.clone())
    return module


@pytest.mark.parametrize("foreach", [False, True])
@pytest.mark.parametrize("optimizer", ["SGD", "Adam", "AdamW", "RMSprop", "Adagrad"])
def test_a_module_all_of_wrappers_trains_as_a_plain_one(optimizer, foreach):
    plain, wrapped = model(), wrap_all(model())
    x = torch.rand(3, 1, 4, 4)
    tensors = [[*m.parameters(), *m.buffers()] for m in (plain, wrapped)]
    before = [[t._version for t in ts] for ts in tensors]
    for module in (plain, wrapped):
        opt = getattr(torch.optim, optimizer)(module.parameters(), lr=0.01, foreach=foreach)
        for _ in range(2):
            opt.zero_grad()
            module(x).square().sum().backward()
            opt.step()
    for p, w in zip(*tensors, strict=True):
        torch.testing.assert_close(bare(w), p.detach())
    moved = [
        [t._version - was for t, was in zip(ts, olds, strict=True)]
        for ts, olds in zip(tensors, before, strict=True)
    ]
    assert moved[0] == moved[1]
    assert all(t._version == t.unwrap()._version for t in tensors[1])


def test_a_module_of_wrappers_is_converted_copied_and_loaded():
    plain, wrapped = model(), wrap_all(model())
    x = torch.rand(3, 1, 4, 4)
    twin = copy.deepcopy(wrapped)
    wrapped.load_state_dict({k: v * 0 for k, v in wrapped.state_dict().items()})
    assert not bare(wrapped[0].weight).any()
    wrapped.load_state_dict(plain.state_dict())
    for module in (twin, wrapped):
        module.double().float()
        assert type(module[0].weight) is TrackedTensor
        assert torch.equal(bare(module.eval()(x)), plain.eval()(x))
    twin.to("meta").to_empty(device="cpu")
    assert twin(x).shape == (3, 3)


def writes_inside(a):
    b = a.clone()
    b[0].mul_(3)
    b.view(-1)[1:].add_(a[0])
    return (b**2).sum()


TRANSFORMS = {
    "grad": lambda x: grad(writes_inside)(x),
    "vmap": lambda x: vmap(writes_inside)(torch.stack([x, x * 2])),
    "vmap of grad": lambda x: vmap(grad(writes_inside))(torch.stack([x, x * 2])),
    "grad of vmap": lambda x: grad(lambda a: vmap(torch.sin)(a).sum())(x),
    "jacrev": lambda x: jacrev(lambda a: a.sin() * a[0])(x),
    "jacfwd": lambda x: jacfwd(lambda a: a.sin() * a[0])(x),
    "hessian": lambda x: hessian(lambda a: (a**3).prod())(x),
    "grad of grad": lambda x: grad(lambda a: grad(writes_inside)(a).sum())(x),
}


@pytest.mark.parametrize("name", TRANSFORMS)
def test_func(name):
    assert_same(*([t] for t in both(TRANSFORMS[name], torch.tensor([0.5, 1.0, 2.0]))))


def test_func_with_plain_and_wrapped_tensors_together():
    x = torch.rand(4, 3)
    w = TrackedTensor(torch.rand(3))
    assert torch.allclose(bare(vmap(lambda r: (r * w).sum())(x)), (x * w.unwrap()).sum(1))
    layer = nn.Linear(3, 2)
    weights = {name: TrackedTensor(p.detach()) for name, p in layer.named_parameters()}
    gradients = grad(lambda p: functional_call(layer, p, (x,)).sum())(weights)
    torch.testing.assert_close(bare(gradients["weight"]), x.sum(0).expand(2, 3))


def with_hooks(x):
    x.register_hook(lambda g: g * 2)
    y = x * 3
    y.register_hook(lambda g: g * 5)
    y.retain_grad()
    y.sum().backward()
    return x.grad, y.grad


def twice(x):
    (g,) = torch.autograd.grad((x**3).sum(), x, create_graph=True)
    return torch.autograd.grad(g.sum(), x)


def checkpointed(x):
    checkpoint(lambda a: (a.sin() @ a.t()).sum(), x, use_reentrant=False).backward()
    return (x.grad,)


def dirtied(x):
    y = x * 1
    z = Dirty.apply(y)
    z.sum().backward()
    return x.grad, y, y._version, z is y


def packed(x):
    with torch.autograd.graph.save_on_cpu():
        y = (x * x).sum()
    y.backward()
    return (x.grad,)


def autocast(x):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = torch.ones(3, 3) @ x
    y.float().sum().backward()
    return y, x.grad


def attention(x):
    q = x.view(1, 1, 3, 3)
    F.scaled_dot_product_attention(q, q, q).sum().backward()
    return (x.grad,)


@pytest.mark.parametrize(
    "program", [with_hooks, twice, checkpointed, dirtied, packed, autocast, attention]
)
def test_autograd(program):
    assert_same(*both(program, torch.arange(9.0).view(3, 3) / 9))


def compiled_views(t):
    a = t * 1
    a.view(-1)[1:].mul_(2)
    a.t().add_(1)
    return a


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize(
    "backend", ["eager", "aot_eager", pytest.param("inductor", marks=pytest.mark.heavy)]
)
def test_compiled_writes_to_views(backend, dynamic):
    def program(x):
        torch._dynamo.reset()
        out = torch.compile(compiled_views, backend=backend, dynamic=dynamic)(x)
        out.sum().backward()
        return out, x.grad

    assert_same(*both(program, torch.arange(6.0).view(2, 3)))


def test_compiled_module_with_a_wrapped_weight():
    torch._dynamo.reset()
    layer = nn.Linear(3, 2)
    layer.weight = nn.Parameter(TrackedTensor(layer.weight.detach()))
    x = torch.rand(4, 3)
    layer(x).sin().sum().backward()
    expected = bare(layer.weight.grad)
    layer.zero_grad()
    torch.compile(lambda x: layer(x).sin().sum(), backend="aot_eager", fullgraph=True)(x).backward()
    torch.testing.assert_close(bare(layer.weight.grad), expected)
