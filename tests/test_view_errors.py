"""What `mark_as_view` refuses: the error names the mend, and t and base are untouched."""

from __future__ import annotations

import textwrap

import pytest
import torch
import torch.autograd.forward_ad as fwAD
from expecttest import assert_expected_inline
from view_makers import below_autograd

import viewtrack as vt

Meta = vt.CreationMeta
WHERE = {"above": lambda body: body(), "below": below_autograd}
anywhere = pytest.mark.parametrize("where", WHERE.values(), ids=WHERE)


def state(t):
    """All that a refused call might have changed."""
    return {
        "requires_grad": t.requires_grad,
        "grad_fn": t.grad_fn,
        "grad": t.grad if t.is_leaf else None,
        "is_view": t._is_view(),
        "base": id(t._base),
        "version": vt.version(t),
        "storage": t.untyped_storage()._cdata,
        "geometry": (t.size(), t.stride(), t.storage_offset()),
        "info": vt.view_info(t) is None,
    }


def refused(error, t, base, *args, where=WHERE["above"], **kwargs):
    """The text of the error, after a look at everything that it must have left alone."""
    before = state(t), state(base)
    with pytest.raises(error) as caught:
        where(lambda: vt.mark_as_view(t, base, *args, **kwargs))
    assert (state(t), state(base)) == before
    if not t.is_inference() and not base.is_inference() and t is not base and not t._is_view():
        torch.autograd.graph.increment_version(base)
        assert vt.version(t) == before[0]["version"]
    return str(caught.value)


def base_and_alias():
    base = torch.ones(2, 3, requires_grad=True) * 2
    return base, base.detach()[1].data


# t carries autograd metadata


def a_leaf(alias):
    return alias.requires_grad_()


def a_result(alias):
    return alias * alias.new_ones(3, requires_grad=True)


def a_native_view(alias):
    return alias[1:]


def with_grad(alias):
    alias.grad = torch.ones(3)
    return alias


def once_a_leaf(alias):
    return alias.requires_grad_().requires_grad_(False)


def with_hook(alias):
    alias.requires_grad_().register_hook(print)
    return alias.requires_grad_(False)


def detached_in_place(alias):
    return alias.detach_()


CARRIES = [a_leaf, a_result, a_native_view, with_grad, with_hook]
EMPTY = [once_a_leaf, detached_in_place]
FLAGS = [(True, True), (True, False), (False, True), (False, False)]


@anywhere
@pytest.mark.parametrize("flags", FLAGS)
@pytest.mark.parametrize("carry", CARRIES, ids=lambda carry: carry.__name__)
def test_autograd_metadata(carry, flags, where):
    base, alias = base_and_alias()
    t = carry(alias)
    text = refused(vt.AutogradMetadataError, t, base, *flags, where=where)
    assert "autograd metadata" in text
    assert "detach()" in text


@pytest.mark.parametrize("fw", [True, False])
@pytest.mark.parametrize("carry", EMPTY, ids=lambda carry: carry.__name__)
def test_empty_metadata(carry, fw):
    """Native refuses it where it must put its own, and drops it where none is needed."""
    base, alias = base_and_alias()
    refused(vt.AutogradMetadataError, carry(alias), base, True, fw)
    assert vt.mark_as_view(alias, base, False, fw) is alias


@pytest.mark.parametrize("flags", FLAGS)
def test_tangent_of_t(flags):
    base, alias = base_and_alias()
    with fwAD.dual_level():
        alias.copy_(fwAD.make_dual(torch.ones(3), torch.ones(3)))
        refused(vt.AutogradMetadataError, alias, base, *flags)
        assert torch.equal(fwAD.unpack_dual(alias).tangent, torch.ones(3))


def test_marking_twice():
    base, alias = base_and_alias()
    vt.mark_as_view(alias, base)
    assert "is a view already" in refused(vt.AutogradMetadataError, alias, base)


def test_version_may_be_shared_anew():
    base, alias = base_and_alias()
    vt.share_version(alias, base)
    assert vt.share_version(alias, base) is alias
    assert vt.mark_as_view(alias, base)._base is base


# t and base


@anywhere
@pytest.mark.parametrize("flags", FLAGS)
def test_t_is_base(flags, where):
    base = torch.zeros(3)
    assert "`t` is `base`" in refused(vt.ViewTrackError, base, base, *flags, where=where)


@anywhere
@pytest.mark.parametrize("flags", FLAGS)
@pytest.mark.parametrize("view_fn", [None, lambda b: b[1]], ids=["strided", "view_fn"])
def test_no_shared_storage(flags, view_fn, where):
    base, _ = base_and_alias()
    text = refused(vt.AliasingError, torch.ones(3), base, *flags, view_fn, where=where)
    assert "do not share storage" in text
    assert "alias_storage=True" in text


@anywhere
@pytest.mark.parametrize("alias_storage", [False, True])
def test_other_device(alias_storage, where):
    base, _ = base_and_alias()
    t = torch.ones(3, device="meta")
    text = refused(vt.AliasingError, t, base, alias_storage=alias_storage, where=where)
    assert "cpu" in text
    assert "meta" in text


@anywhere
@pytest.mark.parametrize(
    "t",
    [torch.zeros(7), torch.zeros(2, 4), torch.zeros(6).double(), torch.zeros(9)[6:].detach()],
    ids=["numel", "shape", "dtype", "offset"],
)
def test_more_elements_than_the_storage_holds(t, where):
    base, _ = base_and_alias()
    text = refused(vt.AliasingError, t, base, alias_storage=True, where=where)
    assert "24" in text  # the bytes that base's storage has


@anywhere
@pytest.mark.parametrize("flags", FLAGS)
@pytest.mark.parametrize("nbytes", [0, 12, 20])
def test_storage_that_was_shrunk_under_the_view(nbytes, flags, where):
    base, alias = base_and_alias()
    base.untyped_storage().resize_(nbytes)
    assert f"holds {nbytes};" in refused(vt.AliasingError, alias, base, *flags, where=where)


def test_inference_tensor_as_t():
    base, _alias = base_and_alias()
    with torch.inference_mode():
        t = torch.empty(0)
        t.set_(base.untyped_storage(), 3, (3,), (1,))
    assert t.is_inference()
    assert "inference" in refused(vt.ViewTrackError, t, base)
    assert vt.version(t) is None


# Flags, creation_meta, types


@anywhere
@pytest.mark.parametrize("fw", [True, False])
@pytest.mark.parametrize("meta", [m for m in Meta.__members__.values() if m != Meta.DEFAULT])
def test_creation_meta_without_backward(meta, fw, where):
    base, alias = base_and_alias()
    text = refused(ValueError, alias, base, False, fw, creation_meta=meta, where=where)
    assert "CreationMeta.DEFAULT" in text


@pytest.mark.parametrize("flags", [(False, True), (False, False)])
def test_default_creation_meta_by_another_object_is_still_the_default(flags):
    base, alias = base_and_alias()
    default = vt.view_info(base[1]).creation_meta
    vt.mark_as_view(alias, base, *flags, creation_meta=default)


WRONG_TYPES = {
    "t": (None, torch.zeros(3), {}),
    "base": (torch.zeros(3), [1.0, 2.0], {}),
    "creation_meta": (torch.zeros(3).data, torch.zeros(3), {"creation_meta": 2}),
    "view_fn": (torch.zeros(3).data, torch.zeros(3), {"view_fn": "t[1]"}),
}


@pytest.mark.parametrize("name", WRONG_TYPES)
def test_wrong_type_is_named(name):
    t, base, kwargs = WRONG_TYPES[name]
    with pytest.raises(TypeError, match=f"`{name}` must be"):
        vt.mark_as_view(t, base, **kwargs)


def test_errors_are_runtime_errors_of_one_family():
    for error in (vt.AutogradMetadataError, vt.AliasingError, vt.MutatedTensorError):
        assert issubclass(error, vt.ViewTrackError)
    assert issubclass(vt.ViewTrackError, RuntimeError)


# The words


def test_the_words():
    base, alias = base_and_alias()
    viewed, leaf = base[1], torch.ones(3, requires_grad=True)
    ints = base.detach().view(torch.int32).data
    meta = torch.ones(3, device="meta")
    no_grad = Meta.NO_GRAD_MODE
    texts = [
        text_of(None, base),
        text_of(base, base),
        text_of(viewed, base),
        text_of(leaf, base),
        text_of(leaf * 2, base),
        text_of(with_grad(alias.data), base),
        text_of(with_hook(alias.data), base),
        text_of(once_a_leaf(alias.data), base),
        text_of(torch.ones(3), base),
        text_of(meta, base),
        text_of(meta, base, alias_storage=True),
        text_of(torch.ones(7), base, alias_storage=True),
        text_of(ints, base),
        text_of(base.detach().data, base, False, creation_meta=no_grad),
        text_of(base.detach().data, base, creation_meta=3),
        text_of(base.detach().data, base, view_fn=3),
        text_of(base.detach().data, base, view_fn=Returns(base.detach()[1])),
        text_of(base.detach().data, base, view_fn=Returns(torch.ones(2, 3))),
        text_of(base.detach().data, base, view_fn=Returns(base.detach())),
        text_of(base.detach().data, base, view_fn=Returns(base)),
        text_of(base.detach().data, base, view_fn=Returns(None)),
    ]
    wrapped = "\n".join(textwrap.fill(text, 96, subsequent_indent="  ") for text in texts)
    assert_expected_inline(
        wrapped,
        """\
mark_as_view: `t` must be a torch.Tensor, got NoneType
mark_as_view: `t` is `base`; a tensor cannot be a view of itself, pass another alias, for
  instance `base.detach()`
mark_as_view: `t` (torch.float32[3]) already carries autograd metadata: it is a view already;
  pass `t.detach()`, or mark it before autograd sees it
mark_as_view: `t` (torch.float32[3]) already carries autograd metadata: it requires grad (a
  leaf); pass `t.detach()`, or mark it before autograd sees it
mark_as_view: `t` (torch.float32[3]) already carries autograd metadata: it requires grad
  (grad_fn MulBackward0); pass `t.detach()`, or mark it before autograd sees it
mark_as_view: `t` (torch.float32[3]) already carries autograd metadata: it has a `.grad`; pass
  `t.detach()`, or mark it before autograd sees it
mark_as_view: `t` (torch.float32[3]) already carries autograd metadata: it has hooks; pass
  `t.detach()`, or mark it before autograd sees it
mark_as_view: `t` (torch.float32[3]) already carries autograd metadata: it once required grad,
  or was detached in place; pass `t.detach()`, or mark it before autograd sees it
mark_as_view: `t` (torch.float32[3], cpu) and `base` (torch.float32[2, 3], cpu) do not share
  storage; pass a real alias of `base`, or alias_storage=True
mark_as_view: `t` (torch.float32[3], meta) and `base` (torch.float32[2, 3], cpu) do not share
  storage; pass a real alias of `base`
mark_as_view: alias_storage=True cannot point t's storage at base's: `t` is on meta and `base`
  on cpu; pass a real alias of `base`
mark_as_view: `t` (torch.float32[7], strides (1,), offset 0) needs 28 bytes and base's storage
  holds 24; give `t` the geometry of a view of `base`
mark_as_view: `t` (torch.int32[2, 3]) reads the bytes of `base` (torch.float32[2, 3]) as another
  dtype, and no gradient flows through that; pass is_bw_differentiable=False,
  is_fw_differentiable=False, as native does for `view(dtype)`, or give a view_fn
mark_as_view: a view that is not backward differentiable must have
  creation_meta=CreationMeta.DEFAULT
mark_as_view: `creation_meta` must be a viewtrack.CreationMeta, got int
mark_as_view: `view_fn` must be callable, got int
mark_as_view: view_fn `Returns` returned torch.float32[3] where the view that was marked with it
  is torch.float32[2, 3]; return exactly that view of its argument
mark_as_view: view_fn `Returns` returned a copy; it must return a new view of its argument (for
  the whole of it, `base.view_as(base)`)
mark_as_view: view_fn `Returns` returned a tensor that is cut off from its argument's gradient;
  leave out `detach()` and `no_grad`
mark_as_view: view_fn `Returns` returned its argument; it must return a new view of its argument
  (for the whole of it, `base.view_as(base)`)
mark_as_view: view_fn `Returns` returned NoneType; it must return a tensor""",
    )


class Returns:
    """A view_fn that returns one thing, whatever its argument."""

    def __init__(self, out):
        self.out = out

    def __call__(self, base):
        return self.out


def text_of(t, base, *args, **kwargs):
    with pytest.raises((RuntimeError, TypeError, ValueError)) as caught:
        vt.mark_as_view(t, base, *args, **kwargs)
    return str(caught.value)
