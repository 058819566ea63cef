"""Custom ops in the transforms of torch.func."""

import pytest
import torch
import torch.autograd.forward_ad as forward_ad
from library_ops import HIDDEN, axpy_, formula_head, formula_zero_, fresh, head, raw_zero_

from viewtrack import ViewTrackError, library

X = torch.arange(1.0, 5.0)
BATCH = torch.arange(1.0, 9.0).view(2, 4)


def edits_the_view(head):
    def fn(x):
        base = x * 1
        view = head(base, 2)
        view.mul_(3)
        base.add_(view.sum())
        return (base**2).sum()

    return fn


def native_head(x, n):
    return x.narrow(0, 0, n)


@pytest.mark.parametrize(
    "transform",
    [
        lambda fn: torch.func.grad(fn)(X),
        lambda fn: torch.func.vmap(fn)(BATCH),
        lambda fn: torch.func.vmap(torch.func.grad(fn))(BATCH),
        lambda fn: torch.func.grad(lambda x: torch.func.vmap(fn)(x).sum())(BATCH),
        lambda fn: torch.func.hessian(fn)(X),
        lambda fn: torch.func.jvp(fn, (X,), (X,)),
        lambda fn: torch.func.functionalize(fn)(X),
    ],
    ids=["grad", "vmap", "vmap of grad", "grad of vmap", "hessian", "jvp", "functionalize"],
)
def test_the_body_is_transformed(transform):
    torch.testing.assert_close(
        transform(edits_the_view(head)), transform(edits_the_view(native_head))
    )


def test_the_body_of_a_write_is_transformed():
    def fn(x):
        base = x * 1
        axpy_(base[:2], x[2:].exp(), 3)
        return (base**2).sum()

    def native(x):
        base = x * 1
        base[:2].add_(x[2:].exp(), alpha=3)
        return (base**2).sum()

    torch.testing.assert_close(torch.func.grad(fn)(X), torch.func.grad(native)(X))
    vmapped = torch.func.vmap(torch.func.grad(fn))(BATCH)
    torch.testing.assert_close(vmapped, torch.func.vmap(torch.func.grad(native))(BATCH))


def test_a_formula_is_the_gradient_under_grad():
    def fn(x):
        return (formula_head(x * 2, 2) ** 2).sum()

    assert torch.func.grad(fn)(X).tolist() == [8, 16, 0, 0]
    assert torch.func.jvp(lambda x: formula_head(x * 2, 2), (X,), (X,))[1].tolist() == [2, 4]

    def written(x):
        base = x * 1
        formula_zero_(base)
        return (base + x).sum()

    assert torch.func.grad(written)(X).tolist() == [1] * 4


def test_a_view_with_a_formula_may_not_be_written_in_a_transform():
    with pytest.raises(RuntimeError, match="is a view and is being modified inplace"):
        torch.func.grad(edits_the_view(formula_head))(X)


@pytest.mark.parametrize("head", HIDDEN.values(), ids=HIDDEN)
def test_a_body_that_hides_its_views_is_refused_rather_than_wrong(head):
    with pytest.raises(ViewTrackError, match="hides its views from autograd"):
        torch.func.grad(lambda x: head(x * 1, 2).sum())(X)
    with pytest.raises(ViewTrackError, match="hides its views from autograd"):
        torch.func.vmap(lambda x: head(x * 1, 2))(BATCH)


def _hides_from_two_on(x, n):
    return x.detach()[:n] if n > 1 else x[:n]


def _hides_long_ones(x, n):
    return x.detach()[:n] if len(x) > 3 else x[:n]


@pytest.mark.parametrize(
    ("body", "shown", "hidden"),
    [(_hides_from_two_on, (X, 1), (X, 3)), (_hides_long_ones, (X[:3], 2), (X, 2))],
)
@pytest.mark.parametrize("first", ["shown", "hidden"])
def test_a_body_that_hides_some_of_its_views_is_refused_for_these_only(body, shown, hidden, first):
    op = library.view_op(fresh("(Tensor(a) x, int n) -> Tensor(a)"), body)

    def derivative(x, n):
        return torch.func.grad(lambda x: op(x * 1, n).sum())(x).sum().item()

    for _ in range(2):
        if first == "shown":
            assert derivative(*shown) == shown[1]
        with pytest.raises(ViewTrackError, match="hides its views from autograd"):
            derivative(*hidden)
        assert derivative(*shown) == shown[1]


@pytest.mark.parametrize("transform", [torch.func.grad, torch.func.vmap, torch.func.functionalize])
def test_a_raw_kernel_is_refused_rather_than_run_on_no_memory(transform):
    def fn(x):
        base = x * 1
        raw_zero_(base)
        return base.sum()

    with pytest.raises(ViewTrackError, match=r"raw_zero_.*reads memory.*register_vmap"):
        transform(fn)(BATCH if transform is torch.func.vmap else X)


def test_a_batching_rule():
    op = library.inplace_op(fresh("(Tensor(a!) x) -> Tensor(a!)"), _raw_negate)
    asked = []

    @op.register_vmap
    def rule(info, in_dims, x):
        asked.append((info.batch_size, in_dims))
        op(x)
        return x, in_dims[0]

    out = torch.func.vmap(lambda x: op(x * 1))(BATCH)
    assert out.tolist() == (-BATCH).tolist()
    assert asked == [(2, (0,))]


def _raw_negate(x):
    array = x.detach().numpy()
    array *= -1
    return x


def test_a_formula_is_not_passed_by_where_the_body_is_batched():
    op = library.view_op(fresh("(Tensor(a) x) -> Tensor(a)"), lambda x: x[:2])
    op.register_autograd(lambda ctx, grad: torch.cat([grad * 100, grad * 0]))
    assert torch.func.vmap(lambda x: op(x * 1))(BATCH).shape == (2, 2)
    grads = torch.func.vmap(torch.func.grad(lambda x: op(x * 1).sum()))(BATCH)
    assert grads.tolist() == [[100, 100, 0, 0]] * 2
    with pytest.raises(ViewTrackError, match="register_vmap"):
        torch.func.grad(lambda x: torch.func.vmap(op)(x * 1).sum())(BATCH)


def _dual(fn, x):
    with forward_ad.dual_level():
        return forward_ad.unpack_dual(fn(forward_ad.make_dual(x, torch.ones_like(x)))).tangent


DERIVATIVES = {
    "jvp": lambda fn, x: torch.func.jvp(fn, (x,), (torch.ones_like(x),))[1],
    "jacfwd": lambda fn, x: torch.func.jacfwd(lambda x: fn(x).sum())(x),
    "dual": _dual,
    "grad": lambda fn, x: torch.func.grad(lambda x: fn(x).sum())(x),
}


@pytest.mark.parametrize("derivative", DERIVATIVES.values(), ids=DERIVATIVES)
@pytest.mark.parametrize("levels", [1, 2])
def test_no_derivative_over_vmap_passes_a_formula_by(derivative, levels):
    op = library.op(fresh("(Tensor x) -> Tensor"), lambda x: x * 2)
    op.register_autograd(lambda ctx, grad: grad * 10)
    op.register_jvp(lambda ctx, tangent: tangent * 10)
    batch, fn = BATCH, op
    for _ in range(levels):
        batch, fn = batch[None], torch.func.vmap(fn)
    with pytest.raises(ViewTrackError, match=r"no batching rule.*register_vmap"):
        derivative(fn, batch)
    assert torch.equal(fn(batch), batch * 2)
    assert torch.equal(derivative(lambda x: fn(batch) * x, batch), batch * 2)
    if levels == 1:
        op.register_vmap(lambda info, in_dims, x: (op(x), in_dims[0]))
        assert derivative(fn, batch).eq(10).all()


def test_a_tangent_over_vmap_of_a_view_op_with_a_formula():
    op = library.view_op(fresh("(Tensor(a) x, int n) -> Tensor(a)"), lambda x, n: x[:n])
    op.register_autograd(lambda ctx, grad: (torch.cat([grad, grad.new_zeros(2)]), None))
    out = torch.func.jvp(lambda x: torch.func.vmap(lambda x: op(x, 2))(x), (BATCH,), (BATCH,))
    assert torch.equal(out[0], BATCH[:, :2])
    assert torch.equal(out[1], BATCH[:, :2])


def test_an_opaque_body_is_not_differentiated():
    op = library.inplace_op(fresh("(Tensor(a!) x) -> Tensor(a!)"), lambda x: x.mul_(2), opaque=True)
    assert torch.func.vmap(lambda x: op(x * 1))(BATCH).tolist() == (BATCH * 2).tolist()
    with pytest.raises(ViewTrackError, match=r"opaque.*register_autograd"):
        torch.func.grad(lambda x: op(x * 1).sum())(X)
    with pytest.raises(ViewTrackError, match=r"opaque.*register_vmap"):
        torch.func.grad(lambda x: torch.func.vmap(lambda y: op(y * 1))(x).sum())(BATCH)
    op.register_autograd(lambda ctx, grad: grad * 2)
    assert torch.func.grad(lambda x: op(x * 1).sum())(X).tolist() == [2] * 4


# ------------------------------------------------------------------------------ levels


def _save_input(ctx, inputs, output):
    ctx.save_for_backward(inputs[0])
    ctx.save_for_forward(inputs[0])


def _cube():
    op = library.op(fresh("(Tensor x) -> Tensor"), lambda x: x.detach() ** 3)
    op.register_autograd(
        lambda ctx, grad: grad * 3 * ctx.saved_tensors[0] ** 2, setup_context=_save_input
    )
    op.register_jvp(lambda ctx, tangent: tangent * 3 * ctx.saved_tensors[0] ** 2)
    return op


def _double_():
    op = library.inplace_op(fresh("(Tensor(a!) x) -> Tensor(a!)"), lambda x: x.mul_(2))
    op.register_autograd(lambda ctx, grad: grad * 2)
    op.register_jvp(lambda ctx, tangent: tangent * 2)
    return lambda x: op(x * 1)


def _first_two():
    op = library.view_op(fresh("(Tensor(a) x) -> Tensor(a)"), lambda x: x[:2])
    op.register_autograd(lambda ctx, grad: torch.cat([grad, grad * 0]))
    return lambda x: op(x * 1)


def _grad(fn):
    return torch.func.grad(lambda x: fn(x).sum())


def _jvp(fn):
    return lambda x: torch.func.jvp(fn, (x,), (x.sin(),))[1]


def _backward(fn):
    def run(x):
        leaf = x.clone().requires_grad_()
        fn(leaf).sum().backward()
        return leaf.grad

    return run


def _without_grad_inside(fn):
    def run(x):
        with torch.no_grad():
            constant = fn(x)
        return (fn(x) - constant) * x.sum()

    return run


@pytest.mark.parametrize(
    ("make", "native"),
    [(_cube, lambda x: x**3), (_double_, lambda x: x * 2), (_first_two, lambda x: x[:2])],
    ids=["new tensor", "write", "view"],
)
@pytest.mark.parametrize(
    "transform",
    [
        lambda fn: _grad(_grad(fn)),
        lambda fn: _grad(_grad(_grad(fn))),
        lambda fn: _jvp(_grad(fn)),
        lambda fn: _grad(_jvp(fn)),
        lambda fn: _jvp(_jvp(fn)),
        lambda fn: _backward(_grad(fn)),
        lambda fn: _backward(_jvp(fn)),
        lambda fn: torch.func.hessian(lambda x: fn(x).sum()),
        lambda fn: torch.func.jacrev(torch.func.jacrev(fn)),
        lambda fn: _grad(_grad(_without_grad_inside(fn))),
        lambda fn: _jvp(_grad(_without_grad_inside(fn))),
        lambda fn: _grad(_without_grad_inside(_grad(fn))),
    ],
    ids=[
        "grad of grad",
        "three grads",
        "jvp of grad",
        "grad of jvp",
        "jvp of jvp",
        "backward over grad",
        "backward over jvp",
        "hessian",
        "jacrev of jacrev",
        "no_grad inside",
        "no_grad inside, jvp of grad",
        "no_grad between",
    ],
)
def test_a_formula_is_the_gradient_at_every_level(make, native, transform):
    op = make()
    x = torch.tensor([1.5, 2.0, 0.5, 1.0])
    found = transform(lambda x: op(x * x) ** 3)(x)
    torch.testing.assert_close(found, transform(lambda x: native(x * x) ** 3)(x))
    assert found.abs().sum() > 0


def test_each_level_takes_the_formula_and_not_the_body():
    op = library.op(fresh("(Tensor x) -> Tensor"), lambda x: x * 2)
    op.register_autograd(lambda ctx, grad: grad * 10)
    x = torch.tensor(3.0)
    # y = op(x * x): y = 18, and each level has y' = 10 * 2x, of y itself as of what it is times.
    fn = torch.func.grad(torch.func.grad(lambda x: op(x * x) ** 2))
    assert fn(x).item() == 2 * (20 * 3) ** 2 + 2 * 18 * 20
