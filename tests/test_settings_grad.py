"""Grad modes, hooks, saved tensors and double backward, under trackers and on stock torch."""

from __future__ import annotations

import torch
from against_stock import check, each_way, outcome
from torch.autograd.graph import (
    allow_mutation_on_saved_tensors,
    save_on_cpu,
    saved_tensors_hooks,
)

import viewtrack as vt


def _leaf(*shape):
    return torch.rand(*shape, requires_grad=True)


@each_way()
def test_no_grad_and_enable_grad_nested(way):
    def program():
        x = _leaf(4)
        y = x * 2
        with torch.no_grad():
            v = y[1:]
            v.add_(1)
            with torch.enable_grad():
                w = (x * 3)[0:2]
                w.mul_(2)
            z = x * 3
        with torch.set_grad_enabled(False):
            u = y.view(2, 2)
        errors = [outcome(lambda t=t: t.mul_(2)) for t in (v, u, w, z)]
        w.sum().backward()
        return y, v, w, z, u, errors, x.grad.clone()

    check(way, program)


@torch.no_grad()
def _decorated(x):
    return x.view(-1).add_(1)


@each_way()
def test_no_grad_decorator(way):
    check(way, lambda: _decorated(_leaf(2, 2) * 1))


@each_way()
def test_leaf_is_refused(way):
    def program():
        x = _leaf(3)
        return [outcome(lambda: x.add_(1)), outcome(lambda: x[1:].add_(1)), x]

    check(way, program)


@each_way()
def test_views_of_several_outputs(way):
    def program():
        y = _leaf(3, 4) * 1
        rows = y.unbind()
        errors = [outcome(lambda: rows[0].add_(1)), outcome(lambda: y.split(2, 1)[0].mul_(2))]
        with torch.no_grad():
            quiet = y.chunk(2)
        return list(rows), errors, outcome(lambda: quiet[0].add_(1)), y

    check(way, program)


@each_way()
def test_inference_mode(way):
    def program():
        outside = _leaf(4)
        plain = torch.ones(4)
        with torch.inference_mode():
            made = torch.ones(4) * 2
            view = plain[1:]
            part = made[1:]
            made.add_(1)
            view.mul_(2)
            inner_view = outside[1:]
            with torch.inference_mode(False):
                again = plain * 2
        errors = [
            outcome(lambda: made.add_(1)),
            outcome(lambda: made * outside),
            outcome(lambda: view.add_(1)),
            outcome(lambda: inner_view * 2),
            outcome(lambda: made._version),
        ]
        return made, view, part, inner_view, again, plain, errors

    check(way, program)


@each_way()
def test_backward_twice_and_grad_of_grad(way):
    def program():
        x = _leaf(3, 3)
        y = (x @ x).view(-1)[2:].exp()
        (g,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        (gg,) = torch.autograd.grad(g.pow(2).sum(), x, retain_graph=True)
        g.sum().backward()
        return y, g.clone(), gg.clone(), x.grad.clone()

    check(way, program)


@each_way()
def test_in_place_chains_in_double_backward(way):
    def program():
        x = _leaf(4)
        y = x * 1
        y[:2].mul_(x[2:])
        y.view(2, 2).t()[0].sin_()
        (g,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        return y, g.clone(), torch.autograd.grad(g.sum(), x)[0].clone()

    check(way, program)


@each_way()
def test_is_grads_batched(way):
    def program():
        x = _leaf(3)
        y = torch.stack([x.prod(), x.sin().sum()])
        return torch.autograd.grad(y, x, torch.eye(2), is_grads_batched=True)

    check(way, program)


@each_way()
def test_vectorized_jacobian_and_hessian(way):
    def program():
        x = torch.rand(3)
        f = lambda t: t.view(3).pow(3) * t[0]  # noqa: E731
        return (
            torch.autograd.functional.jacobian(f, x, vectorize=True),
            torch.autograd.functional.hessian(lambda t: f(t).sum(), x),
        )

    check(way, program)


@each_way()
def test_tensor_hooks(way):
    def program():
        seen = []
        x = _leaf(4)
        y = x * 2
        y.register_hook(lambda g: seen.append("y") or g * 3)
        v = y[1:]
        v.register_hook(lambda g: seen.append("v"))
        y.retain_grad()
        x.register_post_accumulate_grad_hook(lambda t: seen.append(("x", t.grad.tolist())))
        v.mul_(2)
        v.register_hook(lambda g: seen.append("v2"))
        v.sum().backward()
        return seen, x.grad.clone(), y.grad.clone()

    check(way, program)


@each_way()
def test_node_hooks(way):
    def program():
        seen = []
        x = _leaf(2, 2)
        y = (x @ x).relu()
        y.grad_fn.register_hook(lambda gi, go: seen.append(len(gi)))
        y.grad_fn.register_prehook(lambda go: seen.append(go[0].tolist()))
        y.view(4).sum().backward()
        return seen, x.grad.clone()

    check(way, program)


@each_way()
def test_module_hooks(way):
    def program():
        seen = []
        net = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.ReLU(inplace=True))
        net[0].register_forward_pre_hook(lambda m, args: seen.append("pre"))
        net[0].register_forward_hook(lambda m, args, out: out.view(-1, 3))
        net[0].register_full_backward_pre_hook(lambda m, go: seen.append("backward pre"))
        net.register_full_backward_hook(lambda m, gi, go: seen.append(go[0].sum().item()))
        x = _leaf(2, 3)
        error = outcome(lambda: net(x))
        net = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Tanh())
        net[0].register_full_backward_hook(lambda m, gi, go: (gi[0] * 2,))
        net(x).sum().backward()
        return seen, error, x.grad.clone(), [p.grad for p in net.parameters()]

    check(way, program)


@each_way()
def test_hook_on_a_view_after_its_base_was_written(way):
    """pytorch#196459: on stock torch `register_hook` itself kills the process there."""

    def program():
        leaf = _leaf(3, 2)
        act = leaf * 2
        rows = act.reshape(6)
        act.select(0, 0).zero_()
        seen = []
        assert rows.grad_fn is not None  # refreshes it
        rows.register_hook(lambda g: seen.append(1))
        rows.prod().backward()
        return seen, leaf.grad.clone()

    check(way, program)


@each_way()
def test_saved_tensors_hooks(way):
    def program():
        packed = []
        x = _leaf(3)
        with saved_tensors_hooks(lambda t: packed.append(t.shape) or t.clone(), lambda t: t * 1):
            y = (x * x).view(-1).exp()
        with save_on_cpu():
            z = y * x
        z.sum().backward()
        return len(packed), x.grad.clone()

    check(way, program)


@each_way()
def test_mutation_of_a_saved_tensor_is_refused(way):
    def program():
        x = _leaf(4)
        y = x.exp()
        y[1:].add_(1)
        z = x * 1
        w = z.sin()
        z.view(2, 2)[0].zero_()
        texts = [outcome(y.sum().backward), outcome(w.sum().backward)]
        return [text.split("[")[0] for text in texts]

    check(way, program)


@each_way()
def test_allow_mutation_on_saved_tensors(way):
    def program():
        with allow_mutation_on_saved_tensors():
            x = _leaf(4)
            y = x.clone()
            z = y.sin()
            y.mul_(2)
            w = y.view(2, 2).exp()
            y[0] = 3.0
            (z.sum() + w.sum()).backward()
        return x.grad.clone(), y, z

    # A mode of torch's own does the cloning and tells versions apart by data_ptr and _version.
    check(way, program)


@each_way()
def test_anomaly_mode(way):
    def program():
        with torch.autograd.detect_anomaly(check_nan=True):
            x = torch.zeros(2, requires_grad=True)
            y = (x.view(2) / x).sum()
            return outcome(y.backward)

    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        check(way, program)


@each_way()
def test_detach_and_data(way):
    def program():
        x = _leaf(4)
        y = x * 2
        d, data, before = y.detach(), y.data, y._version
        d.add_(1)
        versions = [y._version - before, d._version - before, data._version]
        data.add_(1)
        versions += [y._version - before, d._version - before, data._version]
        x.data = torch.zeros(2)
        return versions, outcome(y.view(2, 2).detach_), y.clone().detach_(), x

    check(way, program)


@each_way()
def test_accumulating_into_a_grad_that_was_given_out(way):
    def program():
        x = _leaf(3)
        x.sum().backward()
        first, before = x.grad, x.grad._version
        (x * 2).sum().backward()
        x.grad.zero_()
        with torch.no_grad():
            x -= 0.1 * x.grad
        return first is x.grad, x.grad._version - before, x

    check(way, program)


def test_worker_threads_of_backward():
    """A view that is written in a backward formula keeps its counter's promise there too."""

    class Scale(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 2

        @staticmethod
        def backward(ctx, g):
            g = g.clone()
            part = g[1:]
            part.mul_(3)
            versions.append((g._version, part._version))
            return g

    versions: list[tuple[int, int]] = []
    x = _leaf(3)
    with vt.track():
        Scale.apply(x).sum().backward()
    assert versions == [(1, 1)]
    assert x.grad.tolist() == [1, 3, 3]
