"""The guard over saved tensors where torch allows no hooks: transforms of torch.func."""

from __future__ import annotations

import contextlib
import threading

import pytest
import torch
from torch.autograd.graph import disable_saved_tensors_hooks, save_on_cpu
from torch.func import grad, hessian, jacfwd, jacrev, jvp, vjp, vmap

import viewtrack as vt
from viewtrack._torch.hooks import disabling, knows_the_top
from viewtrack.guard_saved import _hooks

STOCK = disabling.__code__, _hooks.__enter__, _hooks.__exit__


@pytest.fixture(autouse=True)
def _all_is_put_back():
    yield
    assert (disabling.__code__, _hooks.__enter__, _hooks.__exit__) == STOCK
    x = torch.ones(2, requires_grad=True)
    assert x.exp().grad_fn._saved_result._version == 0
    with save_on_cpu():  # the stack of hooks is as it was, and not disabled
        x.exp().sum().backward()
    with disable_saved_tensors_hooks("none is left"):
        pass


def f(x):
    return (x.sin() * x.exp()).sum()


def leaf():
    return torch.linspace(0, 1, 3).requires_grad_()


def is_guarded():
    """Whether a write to what autograd saves now is found."""
    y = leaf().exp()
    y.data.add_(1)
    try:
        y.sum().backward()
    except vt.MutatedTensorError:
        return True
    return False


TRANSFORMS = {
    "grad": lambda: grad(f)(leaf()),
    "vjp": lambda: vjp(f, leaf())[1](torch.ones(())),
    "vjp_called_outside": lambda: outside_of(vjp(f, leaf())[1]),
    "jacrev": lambda: jacrev(torch.sin)(leaf()),
    "jacfwd": lambda: jacfwd(torch.sin)(leaf()),
    "hessian": lambda: hessian(f)(leaf()),
    "grad_of_grad": lambda: grad(lambda x: grad(f)(x).sum())(leaf()),
    "vmap_of_grad": lambda: vmap(grad(f))(torch.ones(2, 3)),
    "grad_of_vmap": lambda: grad(lambda x: vmap(torch.sin)(x).sum())(leaf()),
    "jvp": lambda: jvp(f, (leaf(),), (torch.ones(3),)),
    "functional": lambda: torch.autograd.functional.jacobian(torch.sin, leaf()),
    "functional_hessian": lambda: torch.autograd.functional.hessian(f, leaf(), vectorize=True),
    "functional_hvp": lambda: torch.autograd.functional.hvp(f, leaf(), torch.ones(3)),
    "through": lambda: torch.autograd.grad(grad(f)(x := leaf()).sum(), x),
    "module": lambda: grad(lambda p: torch.func.functional_call(LINEAR, p, torch.ones(3)).sum())(
        dict(LINEAR.named_parameters())
    ),
}
LINEAR = torch.nn.Linear(3, 3)


def outside_of(pullback):
    return pullback(torch.full((), 2.0))


def forward_mode():
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(leaf(), torch.ones(3))
        return torch.autograd.forward_ad.unpack_dual(grad(f)(dual)).tangent


TRANSFORMS["forward_ad"] = forward_mode


@pytest.mark.parametrize("on_mutation", ["raise", "copy"])
@pytest.mark.parametrize("transform", TRANSFORMS.values(), ids=TRANSFORMS)
def test_a_transform_runs_and_the_guard_goes_on(transform, on_mutation):
    right = transform()
    with vt.guard_saved_tensors(on_mutation=on_mutation):
        found = transform()
        guarded = is_guarded()
    torch.testing.assert_close(found, right, rtol=0, atol=0)
    assert guarded == (on_mutation == "raise")


def test_nested_guards_and_trackers_step_aside_together():
    right = hessian(f)(leaf())
    with vt.guard_saved_tensors(), vt.track(), vt.guard_saved_tensors(check="content"):
        assert torch.equal(hessian(f)(leaf()), right)
        assert is_guarded()
    with vt.guard_saved_tensors():
        with vt.guard_saved_tensors():
            grad(f)(leaf())
        grad(f)(leaf())
        assert is_guarded()
    assert not is_guarded()


HOOKS = {
    "save_on_cpu": save_on_cpu,
    "plain": lambda: torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t),
}


@pytest.mark.parametrize("hooks", HOOKS.values(), ids=HOOKS)
def test_with_hooks_of_the_users_the_error_is_torchs(hooks):
    def message():
        with pytest.raises(RuntimeError) as caught:
            grad(f)(leaf())
        return str(caught.value)

    with hooks():
        stock = message()
    assert "don't yet support saved tensor hooks" in stock
    with vt.guard_saved_tensors(), hooks():
        assert message() == stock
        assert is_guarded()
    with vt.guard_saved_tensors(), hooks(), vt.guard_saved_tensors():
        assert message() == stock
    with vt.guard_saved_tensors():
        with hooks():
            assert message() == stock
        grad(f)(leaf())
        assert is_guarded()
    if knows_the_top:
        with hooks(), vt.guard_saved_tensors():
            assert message() == stock
            assert is_guarded()


@pytest.mark.parametrize("hooks", HOOKS.values(), ids=HOOKS)
def test_hooks_inside_of_a_transform_are_refused(hooks):
    def entered(x):
        with hooks():
            return f(x)

    with vt.guard_saved_tensors():
        with pytest.raises(RuntimeError, match="don't yet support saved tensor hooks"):
            grad(entered)(leaf())
        assert is_guarded()


def test_the_context_manager_itself():
    with vt.guard_saved_tensors():
        with disable_saved_tensors_hooks("none"):
            assert not is_guarded()
            with disable_saved_tensors_hooks("inner"):
                grad(f)(leaf())
                with pytest.raises(RuntimeError, match="inner"):
                    save_on_cpu().__enter__()
            with pytest.raises(RuntimeError, match="none"):
                save_on_cpu().__enter__()
        assert is_guarded()


def test_errors_leave_the_guard_in_place():
    def raises(x):
        raise KeyError("inside")

    with vt.guard_saved_tensors():
        for _ in range(3):
            with contextlib.suppress(KeyError):
                grad(raises)(leaf())
        assert is_guarded()


def test_another_thread_has_its_own_hooks():
    found = []
    inside, done = threading.Event(), threading.Event()

    def work():
        with vt.guard_saved_tensors():
            inside.set()
            done.wait(10)
            found.append((grad(f)(leaf()).shape, is_guarded()))

    with vt.guard_saved_tensors():
        thread = threading.Thread(target=work)
        thread.start()
        inside.wait(10)
    done.set()
    thread.join()
    assert found == [((3,), True)]


def test_hooks_inside_are_guarded_when_another_threads_guard_has_ended():
    inside, done = threading.Event(), threading.Event()

    def work():
        with vt.guard_saved_tensors():
            inside.set()
            done.wait(10)

    thread = threading.Thread(target=work)
    thread.start()
    inside.wait(10)
    with vt.guard_saved_tensors():
        done.set()
        thread.join()
        with HOOKS["plain"]():
            assert is_guarded()


def test_what_was_saved_before_a_transform_is_guarded_after_it():
    with vt.guard_saved_tensors():
        x = leaf()
        y = x.exp()
        grad(f)(x)
        y.data.add_(1)
        grad(f)(x)
        with pytest.raises(vt.MutatedTensorError) as caught:
            y.sum().backward()
    assert caught.value.writes[0].op == "aten.add_.Tensor"
