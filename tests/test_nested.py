"""Nested tensors of layout strided: views of them, views that they are, what is said of them."""

import pytest
import torch

import viewtrack as vt
from viewtrack._torch import nested as nested_room


def parts(requires_grad=True):
    return [torch.ones(1, 4, requires_grad=requires_grad), torch.ones(2, 4, requires_grad=True)]


def nested_of(tensors):
    return torch.nested.as_nested_tensor(tensors, layout=torch.strided)


def in_a_buffer(source, **kwargs):
    """The nested tensor `source` again, as a view of a flat buffer."""
    buffer = source.values().clone()
    return buffer, vt.mark_as_view(source.detach(), buffer, alias_storage=True, **kwargs)


def test_stock_refuses_a_write_to_the_buffer_of_a_nested_tensor():
    values = nested_of(parts()).clone().values()
    with pytest.raises(RuntimeError, match="doesn't support sizes"):
        values.mul_(2)


@pytest.mark.parametrize("tracked", [False, True])
def test_the_buffer_of_a_nested_tensor_in_a_buffer_may_be_written(tracked):
    tensors = parts()
    with vt.track() if tracked else torch.enable_grad():
        buffer, nested = in_a_buffer(nested_of(tensors))
        values = nested.values()
        assert nested._base is values._base is buffer
        values.mul_(2)
        assert values._version == nested._version == buffer._version == 1
        assert nested.grad_fn.name() == "NestedViewFromBufferBackward0"
        nested.values().sum().backward()
    assert buffer.tolist() == [2.0] * 12
    assert [t.grad.flatten().tolist() for t in tensors] == [[2.0] * 4, [2.0] * 8]


def test_a_write_to_the_buffer_reaches_the_gradient_of_the_nested_tensor():
    tensors = parts()
    buffer, nested = in_a_buffer(nested_of(tensors))
    buffer[:6].mul_(3)
    (nested * nested).values().sum().backward()
    assert tensors[0].grad.tolist() == [[18.0] * 4]
    assert tensors[1].grad.tolist() == [[18.0, 18, 2, 2], [2.0] * 4]


def test_a_write_to_a_part_reaches_the_buffer():
    tensors = parts()
    buffer, nested = in_a_buffer(nested_of(tensors))
    with torch.no_grad():
        nested.mul_(5)
    nested.values()[4:].mul_(2)
    assert buffer.tolist() == [5.0] * 4 + [10.0] * 8
    buffer.sum().backward()
    assert tensors[1].grad.tolist() == [[2.0] * 4] * 2


def test_a_base_of_two_dimensions():
    whole = torch.arange(12.0).requires_grad_()
    base = (whole * 1).view(3, 4).clone()
    t = vt.mark_as_view(nested_of(parts(False)).detach(), base, alias_storage=True)
    assert t._base is base
    base[1:].mul_(2)
    (t * 3).values().sum().backward()
    assert whole.grad.tolist() == [3.0] * 4 + [6.0] * 8


def test_a_base_in_a_larger_buffer_needs_a_view_fn():
    base = (torch.ones(20, requires_grad=True) * 1)[4:16]
    t = nested_of(parts(False)).detach()
    with pytest.raises(vt.ViewTrackError, match=r"fill base's storage; give a view_fn"):
        vt.mark_as_view(t, base, alias_storage=True)
    assert not t._is_view()


def test_a_view_fn_of_a_nested_tensor_is_replayed():
    buffer = torch.ones(12, requires_grad=True) * 1
    where = nested_room.geometry(nested_of(parts(False)))
    calls = []

    def view_fn(b):
        calls.append(b)
        return nested_room.view_of_buffer(b, where)

    t = view_fn(buffer.detach()).detach()
    vt.mark_as_view(t, buffer, view_fn=view_fn)
    buffer.mul_(2)
    before = len(calls)
    assert t.grad_fn.name() == "NestedViewFromBufferBackward0"
    assert len(calls) == before + 1


def test_a_view_fn_that_gives_other_parts_is_named():
    buffer = torch.ones(12, requires_grad=True) * 1
    t = nested_room.view_of_buffer(buffer.detach(), nested_room.geometry(nested_of(parts(False))))
    other = nested_room.geometry(nested_of([torch.ones(3, 4)]))
    with pytest.raises(vt.ViewTrackError, match=r"\[\[3, 4\]\] where .*\[\[1, 4\], \[2, 4\]\]"):
        vt.mark_as_view(t.detach(), buffer, view_fn=lambda b: nested_room.view_of_buffer(b, other))


def test_what_does_not_fit_is_left_as_it_is():
    source = nested_of(parts()).detach()
    for alias_storage in (False, True):
        with pytest.raises(vt.AliasingError):
            vt.mark_as_view(source, torch.ones(11), alias_storage=alias_storage)
    assert not source._is_view()
    assert source.values().tolist() == [1.0] * 12


def test_a_tensor_marked_as_a_view_of_a_nested_one_is_regenerated():
    tensors = parts()
    base = nested_of(tensors).clone()
    t = base.detach().values().detach()
    vt.mark_as_view(t, base)
    assert t._base is base
    base.mul_(3)
    assert t._version == 1
    t.sum().backward()
    assert tensors[0].grad.tolist() == [[3.0] * 4]


@pytest.mark.parametrize("flags", [(True, False), (False, True), (False, False)])
def test_other_flags(flags):
    buffer = torch.ones(12, requires_grad=True) * 1
    where = nested_room.geometry(nested_of(parts(False)))
    t = nested_room.view_of_buffer(buffer.detach(), where).detach()
    vt.mark_as_view(t, buffer, *flags)
    buffer.mul_(2)
    assert t._version == 1
    assert t._is_view() is flags[0]
    if flags[0]:
        assert t.grad_fn is not None


def test_explain_names_the_parts_and_what_a_write_would_do():
    nested = nested_of(parts()).clone()
    text = vt.explain(nested)
    assert "float32[[1, 4], [2, 4]]" in text
    assert "in-place  allowed" in text
    assert "in-place  refused: CopySlices asks a nested tensor" in vt.explain(nested.values())
    _, in_buffer = in_a_buffer(nested_of(parts()))
    assert "in-place  allowed" in vt.explain(in_buffer.values())
    assert "in-place  refused: CopySlices asks a nested tensor" in vt.explain(in_buffer)


def test_the_guard_names_a_nested_tensor():
    with vt.MutationGuard() as guard:
        nested = nested_of(parts(False)).detach()
        entry = guard.save(nested)
        nested.mul_(2)
        with pytest.raises(vt.MutatedTensorError, match=r"f32\[\[1, 4\], \[2, 4\]\]"):
            entry.get()
        entry.release()


@pytest.mark.parametrize("written", [False, True])
def test_what_autograd_saves_of_a_nested_tensor_is_guarded(written):
    tensors = parts()
    nested = nested_of(tensors)
    with vt.guard_saved_tensors():
        squares = nested * nested
        if written:
            with torch.no_grad():
                nested.mul_(2)
            with pytest.raises((vt.MutatedTensorError, RuntimeError), match=r"modified|mutated"):
                squares.values().sum().backward()
            return
        squares.values().sum().backward()
    assert tensors[1].grad.tolist() == [[2.0] * 4] * 2
