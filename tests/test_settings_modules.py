"""autograd.Function, checkpoint, modules, serialisation and optimizers, against stock torch."""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch
from against_stock import attempt, check, each_way, outcome
from functions import Dirty
from torch.nn.utils import parametrizations, parametrize
from torch.utils.checkpoint import checkpoint, checkpoint_sequential


class _Old(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        y = x * w
        y[1:].add_(0)
        return y

    @staticmethod
    def backward(ctx, g):
        x, w = ctx.saved_tensors
        return g * w, g * x


class _New(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(x, w):
        return x * w, x.view(-1)

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx, g, gv):
        x, w = ctx.saved_tensors
        return g * w + gv.view_as(x), g * x


class _ViewOfFresh(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return torch.outer(x.detach(), torch.arange(3.0)).select(1, 2)

    @staticmethod
    def backward(ctx, g):
        return 2 * g


class _ViewOfIntermediate(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        mid = x.detach() * 2
        return mid.view(-1)

    @staticmethod
    def backward(ctx, g):
        return (g * 2).view(2, 2)


@each_way()
def test_function_in_both_styles(way):
    def program():
        x, w = (torch.rand(4, requires_grad=True) for _ in range(2))
        a, (b, v) = _Old.apply(x, w), _New.apply(x, w)
        error = outcome(lambda: v.add_(1))
        (a.sum() + b.sin().sum() + v.sum()).backward()
        return a, b, v, error, x.grad.clone(), w.grad.clone()

    check(way, program)


@each_way()
def test_function_that_writes_its_input(way):
    def program():
        x = torch.rand(4, requires_grad=True)
        y = x * 1
        before = y._version
        z = Dirty.apply(y)
        v = (x * 1)[1:]
        error = outcome(lambda: Dirty.apply(v).sum().backward())
        leaf = outcome(lambda: Dirty.apply(torch.ones(2, requires_grad=True)))
        z.sum().backward()
        return z is y, y._version - before, y, error, leaf, x.grad.clone()

    check(way, program)


@each_way()
def test_output_that_views_a_fresh_tensor_and_is_written_without_grad(way):
    """pytorch#14707: stock refuses to go on, rather than leave the custom backward out."""

    def program():
        x = torch.rand(4, requires_grad=True)
        y = _ViewOfFresh.apply(x)
        with torch.no_grad():
            y.clamp_(max=0.5)
        return outcome(lambda: y.sum().backward()), x.grad is None

    error, _ = check(way, program)
    assert "created inside a custom Function" in error


@each_way()
def test_output_that_views_an_intermediate_and_is_written(way):
    """pytorch#26546: stock refuses, rather than drop the Function from the graph."""

    def program():
        x = torch.ones(2, 2, requires_grad=True)
        y = _ViewOfIntermediate.apply(x)
        return outcome(lambda: y.mul_(5)), y

    error, _ = check(way, program)
    assert "created inside a custom Function" in error


@each_way()
@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("in_place", [True, False])
def test_checkpoint(way, reentrant, in_place):
    def program():
        net = torch.nn.Sequential(
            torch.nn.Linear(3, 3), torch.nn.ReLU(inplace=in_place), torch.nn.Dropout(0.5)
        )
        x = torch.rand(2, 3, requires_grad=True)
        y = checkpoint(net, x, use_reentrant=reentrant)
        z = checkpoint_sequential(net, 2, x, use_reentrant=reentrant)
        (y.view(-1)[1:].sum() + z.sum()).backward()
        return y, z, x.grad.clone(), [p.grad.clone() for p in net.parameters()]

    check(way, program)


@each_way()
def test_checkpoint_early_stop_and_nesting(way):
    def program():
        x = torch.rand(3, requires_grad=True)
        inner = lambda t: checkpoint(torch.sin, t.view(3), use_reentrant=False)  # noqa: E731
        y = checkpoint(lambda t: inner(t).exp() * t, x, use_reentrant=False)
        (g,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        g.sum().backward()
        return y, g.clone(), x.grad.clone()

    check(way, program)


@each_way()
def test_parametrizations(way):
    def program():
        net = parametrizations.weight_norm(torch.nn.Linear(3, 3))
        orth = parametrizations.orthogonal(torch.nn.Linear(3, 3))
        spec = parametrizations.spectral_norm(torch.nn.Linear(3, 3))
        x = torch.rand(2, 3)
        with parametrize.cached():
            y = spec(orth(net(x)))
        y.sum().backward()
        return y, [p.grad.clone() for p in net.parameters()]

    check(way, program)


@each_way()
def test_functional_call(way):
    def program():
        net = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2))
        state = {k: v.detach().clone() for k, v in net.state_dict().items()}
        state["0.weight"].requires_grad_()
        y = torch.func.functional_call(net, state, (torch.rand(4, 2),))
        y.pow(2).sum().backward()
        return y, state["0.weight"].grad.clone(), state["1.running_mean"]

    check(way, program)


def _shared():
    base = torch.arange(6.0)
    return {"base": base, "view": base[2:], "again": base, "net": torch.nn.Linear(2, 2)}


def _deepcopy(value):
    return copy.deepcopy(value)


def _pickle(value):
    return pickle.loads(pickle.dumps(value))


def _save_and_load(value):
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@each_way()
@pytest.mark.parametrize("dup", [_deepcopy, _pickle, _save_and_load])
def test_copies_keep_what_is_shared(way, dup):
    def program():
        twin = dup(_shared())
        twin["view"].add_(1)
        return twin["base"], twin["again"] is twin["base"], list(twin["net"].parameters())

    check(way, program)


@each_way()
def test_load_state_dict(way):
    def program():
        net, twin = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
        before = net.weight._version
        net.load_state_dict(twin.state_dict())
        torch.nn.init.orthogonal_(twin.weight)
        return net.weight._version - before, list(net.parameters()), twin.weight.data

    check(way, program)


OPTIMIZERS = [
    (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
    (torch.optim.Adam, {"lr": 0.1, "amsgrad": True}),
    (torch.optim.AdamW, {"lr": 0.1}),
    (torch.optim.RMSprop, {"lr": 0.1}),
    (torch.optim.Adagrad, {"lr": 0.1}),
]


@each_way()
@pytest.mark.parametrize("how", ["loop", "foreach", "fused"])
@pytest.mark.parametrize(("make", "options"), OPTIMIZERS, ids=lambda v: getattr(v, "__name__", ""))
def test_optimizers(way, make, options, how):
    if how == "fused" and make not in (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW):
        pytest.skip("no fused form on every torch version")

    def program():
        net = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.ReLU(), torch.nn.Linear(3, 1))
        kind = {"foreach": how == "foreach"} if how != "fused" else {"fused": True}
        optimizer = make(net.parameters(), **options, **kind)
        before = [p._version for p in net.parameters()]
        for _ in range(2):
            optimizer.zero_grad(set_to_none=False)
            net(torch.ones(2, 3)).sum().backward()
            optimizer.step()
        moved = [p._version - v for p, v in zip(net.parameters(), before, strict=True)]
        return moved, [p.data.clone() for p in net.parameters()]

    check(way, program)


@each_way()
def test_stale_activation_is_found_after_a_foreach_step(way):
    """The optimizer writes the weight that backward has saved."""

    def program():
        net = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1, foreach=True)
        y = net(torch.ones(1, 2)).sum()
        y.backward(retain_graph=True)
        optimizer.step()
        result = attempt(y.backward)
        return isinstance(result, str) and "modified by an inplace operation" in result

    assert check(way, program) is True


@each_way()
def test_clipping_and_flattening(way):
    def program():
        net = torch.nn.Linear(3, 3)
        net(torch.ones(1, 3)).sum().backward()
        norm = torch.nn.utils.clip_grad_norm_(net.parameters(), 0.5)
        flat = torch.nn.utils.parameters_to_vector(net.parameters())
        torch.nn.utils.vector_to_parameters(flat * 2, net.parameters())
        return norm.clone(), [p.grad.clone() for p in net.parameters()], net.weight.data.clone()

    check(way, program)


@each_way()
def test_recurrent_attention_and_norms(way):
    def program():
        lstm = torch.nn.LSTM(3, 4, batch_first=True)
        attention = torch.nn.MultiheadAttention(4, 2, batch_first=True)
        norm = torch.nn.BatchNorm1d(4)
        x = torch.rand(2, 5, 3, requires_grad=True)
        h, _ = lstm(x)
        a, _ = attention(h, h, h)
        y = norm(a.transpose(1, 2))
        y.sum().backward()
        eager = norm.eval()(a.detach().transpose(1, 2))
        return y, norm.running_mean, x.grad.clone(), eager

    check(way, program)
