"""What `viewtrack/_torch/library.py` relies on, and does, on this torch."""

import gc
import weakref
from pathlib import Path

import pytest
import torch

from viewtrack import _torch
from viewtrack._torch import fakes as _fakes
from viewtrack._torch import library as _torch_library

_lib = torch.library.Library("vtcontract", "FRAGMENT")


def test_backend_select_comes_below_modes_and_above_backends():
    order = []
    _lib.define("ordered(Tensor x) -> Tensor")
    op = torch.ops.vtcontract.ordered.default

    def passing(name, keys):
        def kernel(keyset, x):
            order.append(name)
            with _torch_library.below_inplace_or_view():
                return op.redispatch(keyset & keys, x)

        return kernel

    _lib.impl("ordered", lambda x: order.append("backend") or x.clone(), "CPU")
    for name, key, keys in (
        ("autograd", "Autograd", _torch_library.after_autograd),
        ("inplace or view", "ADInplaceOrView", _torch_library.after_inplace_or_view),
        ("backend select", "BackendSelect", _torch_library.after_backend_select),
    ):
        _torch_library.impl(_lib, "vtcontract::ordered", passing(name, keys), key)

    class Mode(_torch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            order.append("mode")
            return func(*args)

    x = torch.ones(1)
    with Mode():
        op(x)
    assert order == ["autograd", "inplace or view", "mode", "backend select", "backend"]


def test_as_called_undoes_what_kernels_exclude_and_nothing_else():
    excluded = _torch_library.excluded_keys()
    x = torch.ones(2, requires_grad=True) * 1
    with _torch_library.below_inplace_or_view():
        assert x[:1]._base is None
        with _torch_library.as_called(excluded):
            assert x[:1]._base is x
            assert x[:1].grad_fn is not None
    with torch.inference_mode():
        excluded = _torch_library.excluded_keys()
        with _torch_library.as_called(excluded):
            assert _torch.below_autograd()


def test_modes_come_back_in_their_order_also_after_an_error():
    class Mode(_torch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.append(self)
            return func(*args, **(kwargs or {}))

    seen = []
    with Mode() as outer, Mode() as inner:
        with pytest.raises(ZeroDivisionError), _torch_library.without_modes():
            _fail_after(lambda: torch.ones(1))
        assert seen == []
        torch.ones(1)
    assert seen == [inner, outer]


def _fail_after(fn):
    fn()
    raise ZeroDivisionError


def test_rebasing_a_history_counts_nothing_and_copies_nothing():
    base = torch.ones(3, requires_grad=True) * 1
    view, out = base[:2], torch.full((2,), 7.0, requires_grad=True)
    _torch_library.rebase_history(view, out)
    assert base._version == 0
    assert base.tolist() == [1, 1, 1]
    (grad,) = torch.autograd.grad(base.sum(), out)
    assert grad.tolist() == [1, 1]


def test_check_inplace_raises_before_anything_happens():
    leaf = torch.ones(2, requires_grad=True)
    with pytest.raises(RuntimeError, match="a leaf Variable that requires grad"):
        _torch_library.check_inplace(leaf)
    assert leaf.is_leaf
    assert leaf.tolist() == [1, 1]


def test_a_fake_stand_in_refuses_to_show_its_memory():
    mode, (fake,) = _torch_library.fake_like([torch.ones(3, 2).t()])
    assert fake.stride() == (1, 2)
    with pytest.raises(RuntimeError, match="data pointer"):
        fake.data_ptr()
    with pytest.raises(RuntimeError, match="data pointer"), mode:
        fake[:1].data_ptr()


@pytest.mark.parametrize("needs", [False, True])
def test_a_fake_stand_in_is_like_its_tensor(needs):
    t = torch.ones(3, 4, dtype=torch.complex64)[1:].t().conj()
    t = torch._neg_view(t).requires_grad_(needs)
    _, (fake,) = _torch_library.fake_like([t])
    for like in (torch.Tensor.size, torch.Tensor.stride, torch.Tensor.storage_offset):
        assert like(fake) == like(t)
    assert (fake.is_conj(), fake.is_neg(), fake.requires_grad) == (True, True, needs)
    assert not fake._is_view()
    assert fake.mul_(2) is fake  # a leaf that requires grad would refuse


@pytest.mark.parametrize("how", ["destroyed", "died"])
def test_the_end_of_a_library_is_heard(how):
    lib = torch.library.Library("vtend", "FRAGMENT")
    heard = []
    _torch_library.on_destroy(lib, lambda: lambda: heard.append("end"))
    _torch_library.on_destroy(lib, lambda: None)  # a weak reference whose object is gone
    assert not _torch_library.is_destroyed(lib)
    if how == "destroyed":
        lib._destroy()
        assert _torch_library.is_destroyed(lib)
    else:
        del lib
        gc.collect()
    assert heard == ["end"]


def test_single_level_functions_are_allowed_inside_only():
    allowed = torch._C._functorch.get_single_level_autograd_function_allowed
    assert not allowed()
    inside = []
    with pytest.raises(ZeroDivisionError), _torch_library.single_level_functions():
        _fail_after(lambda: inside.append(allowed()))
    assert (inside, allowed()) == ([True], False)


def test_a_tangent_is_seen_through_the_wrappers_of_transforms():
    seen = []

    def fn(x):
        seen.append(_torch_library.has_tangent_inside(x))
        return x * 1

    x = torch.ones(2, 3)
    torch.func.vmap(fn)(x)
    torch.func.jvp(torch.func.vmap(fn), (x,), (x,))
    torch.func.jvp(lambda y: torch.func.vmap(fn)(x) * y, (x,), (x,))
    with torch.autograd.forward_ad.dual_level():
        torch.func.vmap(fn)(torch.autograd.forward_ad.make_dual(x, x))
        torch.func.vmap(fn)(x)
    assert seen == [False, True, False, True, False]


def test_a_gradient_is_seen_through_the_wrappers_of_transforms():
    asked = []

    def fn(x):
        asked.append(_torch_library.needs_grad_inside(x))
        return x.sum()

    torch.func.vmap(fn)(torch.ones(2, 2))
    torch.func.grad(lambda x: torch.func.vmap(fn)(x).sum())(torch.ones(2, 2))
    torch.func.vmap(torch.func.grad(fn))(torch.ones(2, 2))
    assert asked == [False, True, True]


def test_ops_are_found_by_name():
    assert _torch_library.lookup("aten::add.Tensor") is torch.ops.aten.add.Tensor
    assert _torch_library.lookup("aten::relu") is torch.ops.aten.relu.default
    with pytest.raises(AttributeError):
        _torch_library.lookup("aten::no_such_op")
    assert _torch_library.overload_of(torch.ops.aten.relu_) is torch.ops.aten.relu_.default
    assert _torch_library.overload_of(torch.ops.aten.add) is None


def test_the_dispatcher_tells_where_an_op_is_from_and_lists_them():
    _lib.define("placed(Tensor x) -> Tensor")
    assert "vtcontract::placed" in _torch_library.op_names()
    assert "aten::add.Tensor" in _torch_library.op_names()
    assert _torch_library.defined_at("aten::add.Tensor").partition(":")[0].endswith(".cpp")
    placed = _torch_library.defined_at("vtcontract::placed")
    if torch.__version__ < "2.9" and placed is None:
        return
    assert placed is not None, f"_dispatch_dump has another form in torch {torch.__version__}"
    filename, _, line = placed.rpartition(":")
    assert filename == __file__
    assert "torch.library.Library(" in Path(__file__).read_text().splitlines()[int(line) - 1]


def test_the_kernel_of_a_custom_op_counts_before_the_body_runs():
    versions = []

    @torch.library.custom_op("vtcontract::counted", mutates_args=("x",))
    def counted(x: torch.Tensor) -> None:
        versions.append(x._version)

    x = torch.ones(2)
    counted(x)
    assert versions == [1]
    assert x._version == 1
    assert _torch_library.custom_op_def("vtcontract::counted") is counted
    library = _torch_library.custom_op_library(counted)
    assert not _torch_library.is_destroyed(library)
    torch.library.custom_op(
        "vtcontract::counted", lambda x: None, mutates_args=(), schema="(Tensor x) -> ()"
    )
    assert _torch_library.is_destroyed(library)


def test_the_body_of_a_custom_op_is_found_and_its_refusal_known():
    @torch.library.custom_op("vtcontract::returns_it", mutates_args=())
    def returns_it(x: torch.Tensor) -> torch.Tensor:
        return x

    body = _torch_library.custom_op_body("vtcontract::returns_it")
    x = torch.ones(2)
    assert body is not None
    assert body(x) is x
    with pytest.raises(RuntimeError, match="may not alias"):
        returns_it(x)


def test_fake_implementations_are_found():
    _lib.define("with_fake(Tensor x) -> Tensor")
    assert not _torch_library.has_fake("vtcontract::with_fake")
    torch.library.register_fake("vtcontract::with_fake", lambda x: x.clone(), lib=_lib)
    assert _torch_library.has_fake("vtcontract::with_fake")


def test_autograd_records_as_it_did_elsewhere():
    def modes():
        return torch.is_grad_enabled(), torch._C._is_fwd_grad_enabled()

    on = _torch_library.recording_as_here()
    with torch.no_grad(), torch.autograd.forward_ad._set_fwd_grad_enabled(False):
        off = _torch_library.recording_as_here()
        with on():
            assert modes() == (True, True)
            with off():
                assert modes() == (False, False)
            assert modes() == (True, True)
        with pytest.raises(KeyError), on():
            raise KeyError
        assert modes() == (False, False)
    assert modes() == (True, True)


def test_a_tangent_is_taken_off_at_one_level():
    found = []

    def inner(x):
        bare = _torch_library.without_tangent(x)
        found.append(
            (_torch_library.without_tangent(3), _torch_library.without_tangent(bare) is bare)
        )
        return bare * 2

    x = torch.tensor(3.0)
    outer, inner_tangent = torch.func.jvp(
        lambda x: torch.func.jvp(inner, (x,), (x,)), (x,), (torch.tensor(5.0),)
    )[1]
    assert (outer.item(), inner_tangent.item()) == (10, 0)
    assert found == [(3, True)]


def test_a_tensor_takes_the_place_of_another():
    base = torch.ones(4, requires_grad=True) * 1
    view = base[:2]
    alias = view.detach()
    key = weakref.ref(alias)  # as tracers take it
    assert _torch_library.take_place(alias, view)
    assert alias._base is base
    assert alias.grad_fn.name() == "SliceBackward0"
    assert not view._is_view()
    assert not view.requires_grad
    del view
    assert key() is alias
    alias.mul_(3)
    assert base._version == alias._version == 1
    assert base.tolist() == [3, 3, 1, 1]


def test_a_tensor_that_is_referred_to_elsewhere_stays():
    """From 2.10 on its object would otherwise be freed while it is in use."""
    base = torch.ones(4, requires_grad=True) * 1
    view = base[:2]
    alias = view.detach()
    part = alias[:1]  # its C++ base is `alias`
    assert not _torch_library.take_place(alias, view)
    assert part._base is alias
    assert view._base is base
    assert not _torch_library.take_place(torch.nn.Parameter(torch.ones(2)), view)


def test_a_fake_mode_takes_real_tensors_where_it_is_allowed_to():
    mode, (fake,) = _torch_library.fake_like([torch.ones(2)])
    assert _fakes.fake_mode_of([torch.ones(1), fake]) is mode
    with _fakes.real_allowed(mode):
        assert _torch_library.is_fake(fake * torch.ones(2))
    with pytest.raises(AssertionError, match="FakeTensor"):
        fake * torch.ones(2)
    with _fakes.real_allowed(None):
        assert _fakes.fake_mode_of([torch.ones(1)]) is None


def test_a_new_tensor_is_lifted():
    class Looking(_torch.QuietMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.append((_fakes.is_lift(func), [_torch_library.is_fake(t) for t in args]))
            return func(*args, **(kwargs or {}))

    seen = []
    mode, _ = _torch_library.fake_like([])
    with mode, Looking():
        torch.tensor(3.0)
    assert seen[0] == (True, [False])
    assert all(is_lift or fakes == [True] for is_lift, fakes in seen)
