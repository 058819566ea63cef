"""`mark_as_view` in a compiled function: dynamo breaks the graph there, and eager runs it."""

from __future__ import annotations

import pytest
import torch

import viewtrack as vt


def marked(x, view_fn):
    base = x * 2
    view = vt.mark_as_view(base.detach()[1].detach(), base, view_fn=view_fn)
    view.mul_(3)
    base.add_(1)
    return base.sum() * 5 + view.sum()


def shared(x, _view_fn):
    base = x * 2
    view = vt.share_version(base.detach()[1].detach(), base)
    base.mul_(view._version + 3)
    return base.sum() * (view._version + 1)


def asked(x, _view_fn):
    view = (x * 2)[1]
    return view.sum() * (vt.view_info(view).nbytes + vt.version(view))


def second_row(t):
    return t[1]


@pytest.mark.parametrize(
    ("function", "view_fn"),
    [(marked, None), (marked, second_row), (shared, None), (asked, None)],
    ids=["strided", "view_fn", "share_version", "view_info"],
)
def test_compiled_gives_what_eager_gives(function, view_fn):
    torch.compiler.reset()
    results = []
    for f in (function, torch.compile(function, backend="eager")):
        x = torch.ones(2, 3, requires_grad=True)
        out = f(x, view_fn)
        out.backward()
        results.append((out.item(), x.grad.tolist()))
    assert results[0] == results[1]
