"""What a marked view keeps alive: its base and its view_fn, as long as it lives, and no longer."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from view_makers import bare_alias

import viewtrack as vt


class Replay:
    def __call__(self, base):
        return base[1]


@pytest.mark.parametrize("requires_grad", [False, True])
def test_nothing_is_kept_alive_by_the_relation(requires_grad):
    base = torch.ones(2, 3, requires_grad=requires_grad).view_as(torch.empty(2, 3)) * 1
    fn = Replay()
    view = vt.mark_as_view(bare_alias(base, fn), base, view_fn=fn)
    view.mul_(2)
    base.mul_(2)
    view.grad_fn  # noqa: B018
    dead = [weakref.ref(thing) for thing in (view, base, fn)]
    del view, base, fn
    gc.collect()
    assert [ref() for ref in dead] == [None] * 3


def test_view_keeps_its_base_and_view_fn_alive_and_its_own_views_do_too():
    base = torch.zeros(2, 3)
    fn = Replay()
    view = vt.mark_as_view(bare_alias(base, fn), base, view_fn=fn)
    kept = [weakref.ref(base), weakref.ref(fn)]
    del base, fn
    child = view[1:]
    del view
    gc.collect()
    assert all(ref() is not None for ref in kept)
    assert child._base is kept[0]()
    child.mul_(torch.ones(2, requires_grad=True))
    assert child.grad_fn is not None
    del child
    gc.collect()
    assert [ref() for ref in kept] == [None] * 2
