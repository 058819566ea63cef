"""`mark_as_view` by the kind of base: a view, an inference, meta or sparse tensor, a wrapper."""

from __future__ import annotations

import pytest
import torch
from view_makers import (
    CUSTOM_FUNCTION,
    MULTI_OUTPUT,
    bare_alias,
    below_autograd,
    every_maker,
    our_makers,
    share_a_counter,
)

import viewtrack as vt

Meta = vt.CreationMeta

# A view as base


class TripledView(torch.autograd.Function):
    @staticmethod
    def forward(ctx, t):
        return t[1:]

    @staticmethod
    def backward(ctx, grad):
        return torch.cat([torch.zeros_like(grad[:1]), grad * 3])


def native_view(root, meta):
    """A native view of all but the first row, with the creation_meta that is asked for."""
    if meta is Meta.NO_GRAD_MODE:
        with torch.no_grad():
            return root[1:]
    if meta is Meta.INFERENCE_MODE:
        with torch.inference_mode():
            return root[1:]
    if meta is Meta.MULTI_OUTPUT_NODE:
        return root.split((1, len(root) - 1))[1]
    if meta is Meta.IN_CUSTOM_FUNCTION:
        return TripledView.apply(root)
    return root[1:]


# The words of a refusal by creation_meta; without a grad_fn native blames no_grad mode besides.
REFUSALS = {
    Meta.DEFAULT: None,
    Meta.IN_CUSTOM_FUNCTION: CUSTOM_FUNCTION,
    Meta.MULTI_OUTPUT_NODE: MULTI_OUTPUT,
    Meta.NO_GRAD_MODE: "inside the no_grad block",
    Meta.INFERENCE_MODE: "inside the inference_mode block",
}
every_base_meta = pytest.mark.parametrize(
    "base_meta", REFUSALS, ids=lambda meta: f"base_{meta.name}"
)
every_meta = pytest.mark.parametrize("meta", REFUSALS, ids=lambda meta: meta.name)


@every_maker
@every_base_meta
def test_view_of_a_view_has_its_root_as_base_and_inherits(make, base_meta):
    root = torch.zeros(4, 3)
    middle = native_view(root, base_meta)
    view = make(middle, lambda t: t[0])
    assert view._base is root
    assert vt.view_info(view).creation_meta == base_meta
    assert share_a_counter(view, root)
    assert share_a_counter(view, middle)


def propagated(base_meta, meta):
    """propagate_creation_meta of variable.h."""
    if meta is Meta.DEFAULT or base_meta is Meta.INFERENCE_MODE:
        return base_meta
    return meta


@our_makers
@every_base_meta
@every_meta
def test_creation_meta_is_propagated_as_native_does(make, base_meta, meta):
    expected = propagated(base_meta, meta)
    middle = native_view(torch.zeros(4, 3), base_meta)
    if meta is not Meta.IN_CUSTOM_FUNCTION:  # a custom Function does not propagate, it overwrites
        assert vt.view_info(native_view(middle, meta)).creation_meta == expected
    view = make(middle, lambda t: t[1:], meta)
    assert vt.view_info(view).creation_meta == expected


@our_makers
@every_base_meta
@every_meta
def test_writes_to_a_view_of_a_view_are_refused_as_native_does(make, base_meta, meta):
    middle = native_view(torch.zeros(4, 3), base_meta)
    view = make(middle, lambda t: t[1:], meta)
    words = REFUSALS[propagated(base_meta, meta)]
    var = torch.ones(2, 3, requires_grad=True)
    if words is None:
        view.mul_(var)
        assert view.grad_fn is not None
        return
    with pytest.raises(RuntimeError, match=words):
        view.mul_(var)
    assert middle._version == 0


@every_maker
@every_base_meta
def test_gradient_through_a_view_of_a_view(make, base_meta):
    leaf = torch.ones(4, 3, requires_grad=True)
    middle = native_view(leaf * 2, base_meta)
    view = make(middle, lambda t: t[0])
    assert view.requires_grad
    (view * 5).sum().backward()
    if base_meta in (Meta.NO_GRAD_MODE, Meta.INFERENCE_MODE):
        assert leaf.grad is None
    else:
        expected = torch.zeros(4, 3)
        expected[1] = 30.0 if base_meta == Meta.IN_CUSTOM_FUNCTION else 10.0
        assert torch.equal(leaf.grad, expected)


@every_maker
def test_view_of_a_leaf_view_in_no_grad_then_written_outside(make):
    """torch.nn.Parameter slices that init code fills: legal under no_grad, refused outside."""
    leaf = torch.zeros(4, 3, requires_grad=True)
    with torch.no_grad():
        view = make(leaf[1:], lambda t: t[0])
        view.fill_(2)
    assert torch.equal(leaf.detach()[1], torch.full((3,), 2.0))
    with pytest.raises(RuntimeError, match="no_grad"):
        view.fill_(3)


# An inference tensor


@pytest.mark.parametrize("inside", [False, True], ids=["outside", "inside"])
@pytest.mark.parametrize("flags", [(True, True), (True, False), (False, False)])
def test_inference_base_leaves_t_as_it_is(inside, flags):
    with torch.inference_mode():
        base = torch.zeros(2, 3)
        alias = base[1]
    with torch.inference_mode(inside):
        assert vt.mark_as_view(alias, base, *flags) is alias
        assert vt.share_version(alias, base) is alias
    assert not alias._is_view()
    assert vt.version(alias) is None


# Meta tensors


@every_maker
def test_meta_tensors(make):
    leaf = torch.ones(2, 3, device="meta", requires_grad=True)
    base = leaf * 2
    view = make(base, lambda t: t.t()[1])
    assert view._base is base
    assert share_a_counter(view, base)
    view.mul_(3)
    base.add_(1)
    grad_view, grad_base = (torch.autograd.grad(t.sum(), leaf, retain_graph=True)[0]
                            for t in (view, base))  # fmt: skip
    assert grad_view.device.type == grad_base.device.type == "meta"
    assert grad_view.shape == grad_base.shape == (2, 3)


# Sparse tensors


def coo():
    return torch.eye(3).to_sparse().coalesce()


def layouts():
    yield coo(), ("indices", "values")
    yield torch.eye(3).to_sparse_csr(), ("crow_indices", "col_indices", "values")
    yield torch.eye(3).to_sparse_csc(), ("ccol_indices", "row_indices", "values")
    yield torch.eye(4).to_sparse_bsr((2, 2)), ("crow_indices", "col_indices", "values")
    yield torch.eye(4).to_sparse_bsc((2, 2)), ("ccol_indices", "row_indices", "values")


@pytest.mark.parametrize("where", [lambda body: body(), below_autograd], ids=["above", "below"])
@pytest.mark.parametrize(
    ("base", "part"), [(base, part) for base, parts in layouts() for part in parts]
)
def test_part_of_a_sparse_tensor_shares_the_counter(where, base, part):
    native = getattr(base, part)()
    alias = native.detach().data
    marked = where(lambda: vt.share_version(alias, base))
    assert marked is alias
    assert share_a_counter(alias, base)
    assert share_a_counter(alias, native)
    assert not alias._is_view()


@pytest.mark.parametrize(("base", "part"), [(b, p) for b, parts in layouts() for p in parts])
def test_differentiable_view_of_a_sparse_tensor_needs_a_view_fn(base, part):
    """As_strided of a sparse tensor would only fail later, in backward."""
    alias = getattr(base, part)().detach().data
    with pytest.raises(vt.ViewTrackError, match="give a view_fn"):
        vt.mark_as_view(alias, base)
    assert not share_a_counter(alias, base)


def test_values_of_a_sparse_tensor_by_a_view_fn():
    """What native `values()` is: a view of the sparse tensor, by a view function of its own."""

    def gradient(values_of):
        leaf = torch.tensor([1.0, 2.0, 3.0], requires_grad=True)
        base = torch.sparse_coo_tensor(
            torch.arange(3)[None], leaf * 2, (4,), is_coalesced=True, check_invariants=False
        )
        values = values_of(base)
        assert values._base is base
        (grad,) = torch.autograd.grad((values * torch.arange(3.0)).sum(), leaf)
        assert share_a_counter(values, base)
        return grad

    def marked(base):
        alias = base.detach().values().data
        return vt.mark_as_view(alias, base, view_fn=lambda sparse: sparse.values())

    assert torch.equal(gradient(marked), gradient(lambda sparse: sparse.values()))


def test_sparse_alias_shares_the_counter_and_cannot_be_as_strided():
    base = coo()
    alias = base.detach().data
    with pytest.raises(vt.ViewTrackError, match="give a view_fn"):
        vt.mark_as_view(alias, base)
    assert vt.share_version(alias, base) is alias
    assert share_a_counter(alias, base)


def test_dense_tensor_of_its_own_is_no_part_of_a_sparse_one():
    with pytest.raises(vt.AliasingError):
        vt.share_version(torch.ones(3), coo())


# Views of another dtype


@pytest.mark.parametrize("dtype", [torch.int32, torch.float16, torch.uint8])
def test_dtype_view_shares_the_counter_only_as_native_does(dtype):
    base = torch.ones(4, requires_grad=True) * 2
    native = base.view(dtype)
    alias = native.data
    vt.mark_as_view(alias, base, False, False)
    for view in (native, alias):
        assert not view._is_view()
        assert not view.requires_grad
        assert share_a_counter(view, base)


def test_differentiable_dtype_view_needs_a_view_fn():
    base = torch.ones(4, requires_grad=True) * 2
    alias = base.detach().view(torch.int32).data
    with pytest.raises(vt.ViewTrackError, match="view_fn"):
        vt.mark_as_view(alias, base)
    assert not share_a_counter(alias, base)


class Halves(torch.autograd.Function):
    """Reads each float32 as two float16, and says that the gradient is the first one's."""

    @staticmethod
    def forward(ctx, t):
        return t.view(torch.float16)

    @staticmethod
    def backward(ctx, grad):
        return grad[::2].float()


def test_differentiable_dtype_view_with_a_view_fn():
    leaf = torch.ones(4, requires_grad=True)
    base = leaf * 2
    alias = base.detach().view(torch.float16).data
    view = vt.mark_as_view(alias, base, view_fn=Halves.apply)
    base.mul_(3)
    view.sum().backward()
    assert torch.equal(leaf.grad, torch.full((4,), 6.0))


# Function transforms


@pytest.mark.parametrize("transform", [torch.func.grad, torch.func.vmap])
@pytest.mark.parametrize("flags", [(True, True), (False, False)])
def test_wrappers_of_function_transforms_are_refused(transform, flags):
    def f(x):
        base = x * 2
        vt.mark_as_view(base.detach(), base, *flags)
        return base.sum()

    with pytest.raises(vt.ViewTrackError, match=r"torch.func"):
        transform(f)(torch.ones(2))


# Wrapper subclasses


class Wrapper(torch.Tensor):
    """Holds a tensor, and answers ops with wrappers that share no storage with their inputs."""

    @staticmethod
    def __new__(cls, inner):
        return torch.Tensor._make_wrapper_subclass(
            cls, inner.size(), strides=inner.stride(), dtype=inner.dtype,
            storage_offset=inner.storage_offset(),
        )  # fmt: skip

    def __init__(self, inner):
        self.inner = inner

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        unwrap = lambda x: x.inner if isinstance(x, cls) else x  # noqa: E731
        wrap = lambda x: cls(x) if isinstance(x, torch.Tensor) else x  # noqa: E731
        tree_map = torch.utils._pytree.tree_map
        args, kwargs = tree_map(unwrap, (args, kwargs or {}))
        return tree_map(wrap, func(*args, **kwargs))


@pytest.mark.parametrize("where", [lambda body: body(), below_autograd], ids=["above", "below"])
def test_wrapper_subclass_by_alias_storage(where):
    base = Wrapper(torch.zeros(2, 3))
    view = Wrapper(base.inner[1])
    with pytest.raises(vt.AliasingError, match="alias_storage=True"):
        vt.mark_as_view(view, base)
    assert where(lambda: vt.mark_as_view(view, base, alias_storage=True)) is view
    assert view._base is base
    assert view.untyped_storage()._cdata == base.untyped_storage()._cdata
    assert (view.size(), view.stride(), view.storage_offset()) == ((3,), (1,), 3)
    assert share_a_counter(view, base)


@pytest.mark.parametrize("view_fn", [None, lambda t: t[1]], ids=["strided", "view_fn"])
@pytest.mark.parametrize("written", ["view", "base"])
def test_gradients_of_wrappers_after_a_write(view_fn, written):
    leaf = Wrapper(torch.ones(2, 3)).requires_grad_()
    base = leaf * 2
    view = Wrapper(base.inner[1])
    vt.mark_as_view(view, base, view_fn=view_fn, alias_storage=True)
    {"view": view, "base": base}[written].mul_(3)
    assert view._version == base._version == 1
    from_view, from_base = (
        torch.autograd.grad(t.sum(), leaf, retain_graph=True)[0].inner for t in (view, base)
    )
    other_row = 2.0 if written == "view" else 6.0
    assert torch.equal(from_view, torch.tensor([[0.0] * 3, [6.0] * 3]))
    assert torch.equal(from_base, torch.tensor([[other_row] * 3, [6.0] * 3]))


@pytest.mark.parametrize("flags", [(True, True), (False, False)])
def test_alias_storage_of_a_wrapper_and_a_tensor_with_memory_is_refused(flags):
    """The tensor would be left with a storage that has no memory, and crash at its next use."""
    wrapper, plain = Wrapper(torch.zeros(3)), torch.arange(3.0)
    for t, base in ((plain, wrapper), (wrapper, plain)):
        with pytest.raises(vt.AliasingError, match="alias_storage=True cannot"):
            vt.mark_as_view(t, base, *flags, alias_storage=True)
        assert vt.view_info(t) is None
        assert t._version == 0
    assert plain.sum() == 3


def test_alias_storage_of_a_sparse_base_is_refused():
    t = torch.ones(3)
    with pytest.raises(vt.AliasingError, match="alias_storage=True cannot"):
        vt.mark_as_view(t, coo(), alias_storage=True)
    assert torch.equal(t, torch.ones(3))


def test_alias_storage_of_plain_tensors():
    leaf = torch.ones(2, 3, requires_grad=True)
    base = leaf * 2
    view = torch.zeros(2, 3).as_strided((3,), (1,), 3).data
    vt.mark_as_view(view, base, alias_storage=True)
    assert view.data_ptr() == base.data_ptr() + 3 * base.element_size()
    assert torch.equal(view, torch.full((3,), 2.0))
    view.mul_(5)
    base.sum().backward()
    assert torch.equal(leaf.grad, torch.tensor([[2.0] * 3, [10.0] * 3]))
    assert torch.equal(base.detach()[1], torch.full((3,), 10.0))


def test_alias_storage_changes_nothing_where_storage_is_shared():
    base = torch.zeros(2, 3)
    view = bare_alias(base, lambda t: t[1])
    vt.mark_as_view(view, base, alias_storage=True)
    assert view.data_ptr() == base[1].data_ptr()
    assert view._base is base
