"""What wrapper subclasses rely on in torch; a failure names the release that broke it."""

import pytest
import torch
from wrappers import aliases, make_wrapper

from viewtrack import _torch
from viewtrack._torch import subclass as _torch_subclass

HERE = f"torch {torch.__version__}"
aten = torch.ops.aten


def wrapper(inner):
    return make_wrapper()(inner)


def test_pointing_a_storage_keeps_dtype_and_geometry():
    t, base = wrapper(torch.zeros(2, dtype=torch.int32)), wrapper(torch.zeros(6))
    _torch_subclass.point_storage(t, base)
    assert aliases(t, base), HERE
    assert (t.dtype, t.shape, t.stride()) == (torch.int32, (2,), (1,)), HERE


def test_a_metadata_op_runs_on_the_wrapper_itself():
    w = wrapper(torch.zeros(2, 3))
    _torch_subclass.run_metadata_op(aten.t_.default, (w,), {})
    assert (w.shape, w.stride()) == ((3, 2), (1, 3)), HERE
    assert w.e.shape == (2, 3), HERE
    assert (w + 1).shape == (2, 3), f"{HERE}: the Meta key is left on"


def test_an_error_in_a_metadata_op_leaves_nothing_behind():
    w = wrapper(torch.zeros(2, 3))
    with pytest.raises(RuntimeError):
        _torch_subclass.run_metadata_op(aten.as_strided_.default, (w, (9, 9), (9, 1), 0), {})
    assert torch.equal((w + 1).e, torch.ones(2, 3)), HERE


def test_a_storage_grows_on_its_device():
    w = wrapper(torch.zeros(2))
    v = w.view(2)
    _torch_subclass.grow_storage(v, 8)
    assert v.untyped_storage().nbytes() == 32, HERE
    assert v.untyped_storage().device.type == "cpu", HERE
    assert aliases(v, w), HERE


def test_bits_on_a_wrapper_are_served_by_the_kernels_above_python():
    seen = []
    w = make_wrapper(correct=lambda func, args, kwargs, out: (seen.append(str(func)), out)[1])(
        torch.tensor([1j])
    )
    _torch_subclass.set_conj_and_neg(w, torch.tensor([1j]).conj())
    assert w.is_conj(), HERE
    w.mul(2)
    assert seen[-1] == "aten.mul.Tensor", HERE
    assert len(seen) > 1, f"{HERE}: nothing resolved the bit"


def test_the_guard_lets_kernels_resolve_bits_and_puts_the_keys_back():
    keys = (_torch.CONJUGATE, _torch.NEGATIVE, _torch.ADINPLACEORVIEW)
    seen = []

    def correct(func, args, kwargs, out):
        def excluded():
            return [_torch.is_excluded(key) for key in keys]

        seen.append(excluded())
        for views in (False, True):
            with _torch_subclass.as_below_autograd(views):
                seen.append(excluded())
        seen.append(excluded())
        return out

    make_wrapper(correct=correct)(torch.ones(2)).sin()
    handler = [True, True, True]
    assert seen == [handler, [False, False, True], [False, False, False], handler], HERE


def test_counters_move_by_one_and_inference_tensors_have_none():
    t = torch.ones(2)
    _torch_subclass.increment_version((t,))
    assert t._version == 1, HERE
    with torch.inference_mode():
        t = torch.ones(2)
    _torch_subclass.increment_version((t,))  # no error
    with pytest.raises(RuntimeError, match="Inference tensors do not track version counter"):
        t._version  # noqa: B018
