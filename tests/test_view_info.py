"""What can be asked of a tensor without touching it, and views tracked by one call at a time."""

from __future__ import annotations

import gc
import textwrap

import pytest
import torch
import torch.autograd.forward_ad as fwAD
from expecttest import assert_expected_inline
from torch.utils._python_dispatch import TorchDispatchMode
from view_makers import MARKED, bare_alias, below_autograd, every_maker, share_a_counter

import viewtrack as vt

Meta = vt.CreationMeta


def second_row(t):
    return t[1]


def new_base():
    return torch.ones(2, 3, requires_grad=True) * 2


# view_info


def no_views():
    leaf = torch.ones(2, 3, requires_grad=True)
    yield pytest.param(torch.ones(2, 3), id="plain")
    yield pytest.param(leaf, id="leaf")
    yield pytest.param(leaf * 2, id="result")
    yield pytest.param(leaf.detach(), id="detached")
    yield pytest.param((leaf * 2).view(torch.int32), id="dtype")
    yield pytest.param(torch.eye(3).to_sparse(), id="sparse")
    yield pytest.param(torch.ones(2, device="meta"), id="meta")


@pytest.mark.parametrize("t", list(no_views()))
def test_none_for_what_is_no_view(t):
    assert vt.view_info(t) is None


@every_maker
def test_tells_of_a_differentiable_view(make):
    base = new_base()
    view = make(base, second_row)
    info = vt.view_info(view)
    assert info.base is base
    assert info.is_bw_differentiable
    assert info.is_fw_differentiable
    assert info.creation_meta is Meta.DEFAULT
    assert (info.view_fn is not None) == make.name.startswith("view_fn")
    assert info.version == 0
    assert info.requires_grad
    assert info.has_grad_fn
    assert (info.nbytes, info.storage_nbytes) == (12, 24)


@every_maker
def test_tells_of_the_root_of_a_chain(make):
    base = new_base()
    assert vt.view_info(make(base.t(), second_row)).base is base


@pytest.mark.parametrize("view_fn", [None, second_row], ids=["strided", "view_fn"])
@pytest.mark.parametrize("flags", [(True, True), (True, False), (False, True), (False, False)])
def test_tells_the_flags_and_the_view_fn_of_a_marked_view(flags, view_fn):
    base = new_base()
    info = vt.view_info(vt.mark_as_view(bare_alias(base, second_row), base, *flags, view_fn))
    assert (info.is_bw_differentiable, info.is_fw_differentiable) == flags
    assert info.base is base
    assert info.view_fn is view_fn


@pytest.mark.parametrize("meta", Meta.__members__.values(), ids=Meta.__members__)
def test_tells_the_creation_meta(meta):
    view = MARKED(new_base(), second_row, meta)
    assert vt.view_info(view).creation_meta is meta


def test_tells_the_creation_meta_of_native_views():
    base = new_base()
    with torch.no_grad():
        assert vt.view_info(base[1]).creation_meta is Meta.NO_GRAD_MODE
    with torch.inference_mode():
        assert vt.view_info(base[1]).creation_meta is Meta.INFERENCE_MODE
    assert vt.view_info(base.unbind(0)[1]).creation_meta is Meta.MULTI_OUTPUT_NODE


def test_tells_an_unpacked_primal_from_a_forward_view():
    with fwAD.dual_level():
        dual = fwAD.make_dual(new_base(), torch.ones(2, 3))
        primal = fwAD.unpack_dual(dual).primal
        assert not vt.view_info(primal).is_fw_differentiable
        assert vt.view_info(dual[1]).is_fw_differentiable


def test_no_grad_view_acts_as_a_leaf():
    base = new_base()
    with torch.no_grad():
        view = base[1]
    info = vt.view_info(view)
    assert info.requires_grad
    assert info.has_grad_fn is False


def test_does_not_hold_the_base_of_a_non_differentiable_view():
    base = torch.ones(2, 3)
    view = vt.share_version(bare_alias(base, second_row), base)
    assert vt.view_info(view).base is base
    del base
    gc.collect()
    info = vt.view_info(view)
    assert info.base is None
    assert not info.is_bw_differentiable


@every_maker
def test_asks_nothing_of_a_stale_view_that_native_refuses(make):
    base = torch.zeros(2, 3)
    with torch.no_grad():
        view = make(base, second_row)
    base.copy_(torch.ones(2, 3, requires_grad=True))
    info = vt.view_info(view)
    assert info.creation_meta is Meta.NO_GRAD_MODE
    assert info.requires_grad
    assert info.has_grad_fn is None
    with pytest.raises(RuntimeError, match="no_grad mode"):
        view.grad_fn  # noqa: B018


def test_asks_nothing_of_a_stale_view_whose_view_fn_raises():
    def refuse(base):
        raise KeyError("no such view")

    base = torch.zeros(2, 3)
    view = vt.mark_as_view(bare_alias(base, second_row), base, view_fn=refuse)
    base.copy_(torch.ones(2, 3, requires_grad=True))
    assert vt.view_info(view).has_grad_fn is None


def test_below_autograd():
    base = new_base()
    view = base[1]
    base.mul_(2)  # stale: reading grad_fn below autograd would abort
    info = below_autograd(lambda: vt.view_info(view))
    assert info.base is base
    assert info.has_grad_fn is None
    assert view.grad_fn is not None


def test_the_words_of_a_view_info():
    base = torch.zeros(2, 3)
    view = vt.mark_as_view(bare_alias(base, second_row), base)
    view.add_(1)
    text = " ".join(repr(vt.view_info(view)).split())
    assert_expected_inline(
        textwrap.fill(text, 80),
        """\
ViewInfo(base=tensor([[0., 0., 0.], [1., 1., 1.]]), is_bw_differentiable=True,
is_fw_differentiable=True, creation_meta=<CreationMeta.DEFAULT: 0>,
view_fn=None, version=1, requires_grad=False, has_grad_fn=False, nbytes=12,
storage_nbytes=24)""",
    )


# version


def test_version_counts_writes():
    t = torch.zeros(3)
    assert vt.version(t) == 0
    t.add_(1)
    assert vt.version(t) == t._version == 1


def any_tensors():
    with torch.inference_mode():
        inference = torch.ones(3)
    yield pytest.param(inference, None, id="inference")
    yield pytest.param(torch.eye(3).to_sparse(), 0, id="sparse")
    yield pytest.param(torch.ones(3, device="meta"), 0, id="meta")
    yield pytest.param(torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]), 0, id="nested")
    yield pytest.param(torch.nn.Parameter(torch.ones(3)), 0, id="parameter")
    yield pytest.param(torch.ones(3)[1:], 0, id="view")


@pytest.mark.parametrize(("t", "expected"), list(any_tensors()))
def test_version_never_raises(t, expected):
    assert vt.version(t) == expected
    assert below_autograd(lambda: vt.version(t)) == expected


def test_version_never_raises_under_inference_mode():
    """Code that reads `_version` to notice edits breaks there: k2 issue 1210."""
    outside = torch.ones(3)
    with torch.inference_mode():
        made_here = torch.ones(3)
        with pytest.raises(RuntimeError):
            made_here._version  # noqa: B018
        assert vt.version(made_here) is None
        assert vt.version(made_here[1:]) is None
        outside[1:].add_(1)
        assert vt.version(outside) == 1
    assert vt.version(made_here) is None


def test_version_never_raises_under_function_transforms():
    seen = []

    def f(x):
        seen.append(vt.version(x))
        return x.sin().sum()

    torch.func.grad(f)(torch.ones(3))
    torch.func.vmap(f)(torch.ones(2, 3))
    assert all(isinstance(version, int) for version in seen)
    assert len(seen) == 2


# share_version


def test_share_version_is_mark_as_view_without_flags():
    base = new_base()
    view = bare_alias(base, second_row)
    assert vt.share_version(view, base) is view
    assert share_a_counter(view, base)
    assert not view._is_view()
    assert not view.requires_grad
    info = vt.view_info(view)
    assert (info.is_bw_differentiable, info.is_fw_differentiable) == (False, False)


def test_share_version_refuses_other_memory():
    """Counters are shared exactly when storages are: pytorch issue 128611."""
    base = new_base()
    copy = base.detach().clone()
    with pytest.raises(vt.AliasingError):
        vt.share_version(copy, base)
    assert not share_a_counter(copy, base)


# with_tracking


def test_with_tracking_makes_real_views_below_autograd():
    base = new_base()
    plain, view = below_autograd(
        lambda: (base.view(3, 2), vt.with_tracking(torch.Tensor.view)(base, 3, 2))
    )
    assert not plain._is_view()
    assert not share_a_counter(plain, base)
    assert view._base is base
    assert share_a_counter(view, base)


def test_with_tracking_moves_the_counter_below_autograd():
    t = torch.zeros(3)

    def write():
        t.add_(1)
        untracked = t._version
        vt.with_tracking(t.add_)(1)
        return untracked, t._version

    assert below_autograd(write) == (0, 1)


def test_with_tracking_changes_nothing_above_autograd():
    leaf = torch.ones(2, 3, requires_grad=True)
    view = vt.with_tracking(torch.Tensor.view)(leaf * 2, 6)
    assert view._is_view()
    assert view.grad_fn.name() == "ViewBackward0"
    view.mul_(3)
    assert view._version == 1
    view.sum().backward()
    assert torch.equal(leaf.grad, torch.full((2, 3), 6.0))


def test_with_tracking_is_over_when_its_call_raises():
    base = torch.zeros(2, 3)

    def body():
        with pytest.raises(RuntimeError):
            vt.with_tracking(torch.Tensor.view)(base, 7)
        return base.view(6)

    assert not below_autograd(body)._is_view()


def test_with_tracking_keeps_name_and_signature():
    def my_view(t, *, rows: int = 1):
        """Doc."""

    tracked = vt.with_tracking(my_view)
    assert (tracked.__name__, tracked.__doc__) == ("my_view", "Doc.")


def test_with_tracking_view_detached_may_be_returned_from_a_handler():
    kept = []

    class Keep(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if func is torch.ops.aten.select.int:
                kept.append(vt.with_tracking(func)(*args))
                return kept[-1].detach()
            return func(*args, **(kwargs or {}))

    base = new_base()
    with Keep():
        view = base[1]
    assert view.grad_fn.name() == "SelectBackward0"
    assert kept[0]._base is base
    assert share_a_counter(kept[0], view)
