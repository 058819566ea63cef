"""What marking a view relies on in torch. A failure names the torch release that broke it."""

from __future__ import annotations

import pytest
import torch
import torch.autograd.forward_ad as fwAD
from torch.utils._python_dispatch import TorchDispatchMode
from view_makers import bare_alias, share_a_counter

from viewtrack import _torch
from viewtrack._torch import nested as _nested
from viewtrack._torch import view_fn as _torch_view_fn

HERE = f"torch {torch.__version__}"


def second_row(t):
    return t[1]


def new_base():
    return torch.ones(2, 3, requires_grad=True) * 2


def test_as_strided_kernel_marks_the_tensor_it_is_answered():
    base = new_base()
    alias = bare_alias(base, second_row)
    _torch.as_view_strided(alias, base)
    assert alias._base is base, HERE
    assert alias.grad_fn.name() == "AsStridedBackward0", HERE
    assert share_a_counter(alias, base), HERE


def test_as_strided_kernel_refuses_a_tensor_with_metadata():
    base = new_base()
    with pytest.raises(RuntimeError, match="autograd metadata"):
        _torch.as_view_strided(base[1], base)


def test_detach_kernel_shares_the_counter_with_the_tensor_it_is_answered():
    base = new_base()
    alias = bare_alias(base, second_row)
    _torch.as_view_version_only(alias, base)
    assert share_a_counter(alias, base), HERE
    assert not alias._is_view(), HERE


def test_view_func_owns_the_python_function_and_replays_it():
    base, replayed = new_base(), []

    def replay(t):
        replayed.append(t)
        return t[1]

    alias = bare_alias(base, second_row)
    _torch_view_fn.as_view_with_fn(alias, base, replay)
    assert alias._base is base, HERE
    assert replayed == [], HERE
    base.mul_(2)
    assert alias.grad_fn.name() == "SelectBackward0", HERE
    assert len(replayed) == 1, HERE
    assert replayed[0] is base, HERE


def test_alias_kernel_gives_a_view_its_history_and_leaves_it_a_view():
    base = new_base()
    alias = bare_alias(base, second_row)
    _torch_view_fn.as_view_with_fn(alias, base, second_row)
    _torch.take_history(alias, base[1])
    assert alias._base is base, HERE
    assert alias.grad_fn.name() == "AliasBackward0", HERE
    assert alias._version == base._version == 0, HERE


def test_stale_grad_fn_is_not_seen_by_the_leaf_check():
    """Why take_history is called at once: check_inplace reads grad_fn without regenerating it."""
    base = new_base()
    alias = bare_alias(base, second_row)
    _torch_view_fn.as_view_with_fn(alias, base, second_row)
    with pytest.raises(RuntimeError, match="a leaf Variable"):
        alias.mul_(2)


def test_make_dual_kernel_makes_the_tensor_it_is_answered_dual():
    with fwAD.dual_level():
        t, tangent = torch.zeros(3), torch.ones(3)
        assert _torch.tangent(t) is None, HERE
        _torch.set_tangent(t, tangent)
        assert _torch.tangent(t) is tangent, HERE
        assert _torch.forward_ad_level() == 0, HERE
    assert _torch.forward_ad_level() == -1, HERE
    assert _torch.tangent(t) is None, HERE


def test_fw_primal_is_a_backward_view_only():
    with fwAD.dual_level():
        base = fwAD.make_dual(torch.zeros(3), torch.ones(3)) * 1
        primal = _torch.fw_primal(base)
        assert primal._base is base, HERE
        assert _torch.tangent(primal) is None, HERE


def test_creation_meta_can_be_read_and_set_and_has_one_object_for_each_member():
    view = torch.zeros(3)[1:]
    assert _torch.creation_meta(view) is _torch.CreationMeta.DEFAULT, HERE
    for member in _torch.CreationMeta.__members__.values():
        _torch.set_creation_meta(view, member)
        assert _torch.creation_meta(view) is member, HERE
    assert len(_torch.CreationMeta.__members__) == 5, HERE
    assert _torch.creation_meta(torch.zeros(3)) is _torch.CreationMeta.DEFAULT, HERE


def test_storage_can_be_pointed_at_another():
    base, t = torch.arange(6.0), torch.zeros(6)[2:4].detach()
    assert not _torch.is_alias_of(t, base), HERE
    _torch.set_storage_of(t, base)
    assert _torch.is_alias_of(t, base), HERE
    assert t.tolist() == [2.0, 3.0], HERE


def test_is_alias_of_knows_no_part_of_these_sparse_layouts():
    """Why their parts are asked for one by one; once torch knows them, that can go."""
    csc = torch.eye(3).to_sparse_csc()
    assert not _torch.is_alias_of(csc.values(), csc), HERE
    assert _torch.is_alias_of(csc.values().detach(), csc.values()), HERE


def test_python_key_tells_a_wrapper():
    class Wrapper(torch.Tensor):
        @classmethod
        def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
            return NotImplemented

    wrapper = torch.Tensor._make_wrapper_subclass(Wrapper, (3,))
    assert _torch.has_python_key(wrapper), HERE
    assert not _torch.has_python_key(torch.zeros(3)), HERE
    assert not _torch.has_python_key(torch.nn.Parameter(torch.zeros(3))), HERE


def test_keys_are_as_user_code_has_them_again_after_a_handler():
    seen = []

    class Look(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            before = _torch.below_autograd()
            with _torch.above_autograd():
                view = torch.zeros(2, 3, requires_grad=True)[1]
                seen.append((before, _torch.below_autograd(), view.grad_fn is not None))
            seen.append(_torch.below_autograd())
            return func(*args, **(kwargs or {}))

    with Look():
        torch.zeros(3).sin()
    assert seen[-2:] == [(True, False, True), True], HERE
    assert not _torch.below_autograd(), HERE


def test_a_nested_tensor_tells_where_its_parts_lie_and_is_made_of_a_buffer():
    parts = [torch.ones(1, 4), torch.ones(2, 4)]
    nested = torch.nested.as_nested_tensor(parts, layout=torch.strided)
    assert _nested.is_strided_nested(nested), HERE
    assert not _nested.is_strided_nested(torch.ones(2)), HERE
    jagged = torch.nested.as_nested_tensor(parts, layout=torch.jagged)
    assert not _nested.is_strided_nested(jagged), HERE
    assert _nested.places(nested) == [([1, 4], [4, 1], 0), ([2, 4], [4, 1], 4)], HERE
    buffer = torch.arange(12.0, requires_grad=True)
    view = _nested.view_of_buffer(buffer, _nested.geometry(nested))
    assert view._base is buffer, HERE
    assert [t.tolist() for t in view.unbind()] == [[[0, 1, 2, 3]], [[4, 5, 6, 7], [8, 9, 10, 11]]]
    (view * 2).values().sum().backward()
    assert buffer.grad.tolist() == [2.0] * 12, HERE


def test_data_of_a_nested_tensor_can_be_put_in_another_buffer():
    nested = torch.nested.as_nested_tensor([torch.ones(1, 4)], layout=torch.strided)
    buffer = torch.zeros(4)
    nested.data = _nested.view_of_buffer(buffer, _nested.geometry(nested))
    assert nested.untyped_storage().data_ptr() == buffer.untyped_storage().data_ptr(), HERE
    assert nested._version == 0, HERE


def test_a_jagged_tensor_has_the_keys_of_nested_ones_and_a_view_op_for_its_values():
    x = torch.nested.nested_tensor([torch.ones(1, 4), torch.ones(2, 4)], layout=torch.jagged)
    keys = torch._C._dispatch_keys(x)
    assert repr(keys | _nested.KEYS) == repr(keys), HERE  # 2.6 cannot compare them
    x.requires_grad_()
    y = x * 1
    assert _nested.values_of_jagged(y)._base is y, HERE
    (_nested.values_of_jagged(x) * 2).sum().backward()
    assert x.grad.values().tolist() == [[2.0] * 4] * 3, HERE
