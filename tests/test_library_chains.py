"""Random programs of custom ops that call each other's results, against the same of ATen's ops.

Views of views, in-place ops by custom and native ops on any of them, under grad and no_grad, in
random order: relation, creation_meta, versions, gradients and errors are those of the ATen ops, if
the bodies are these ops, hide them from autograd, or have a formula.
"""

import random
import re

import pytest
import torch
from library_ops import CONTEXTS, fresh
from test_library_aten import compare, facts, listed

import viewtrack as vt
from viewtrack import library

aten = torch.ops.aten
VIEWS = {
    "alias": aten.alias.default,
    "expand": aten.expand.default,
    "select": aten.select.int,
    "slice": aten.slice.Tensor,
    "split": aten.split.Tensor,
    "transpose": aten.transpose.int,
    "unbind": aten.unbind.int,
    "unsqueeze": aten.unsqueeze.default,
}
WRITES = {
    "add_": aten.add_.Tensor,
    "copy_": aten.copy_.default,
    "foreach": aten._foreach_mul_.Tensor,
    "mul_": aten.mul_.Tensor,
}
LISTS = ("split", "unbind")


def schema_of(native):
    return fresh("(" + str(native._schema).partition("(")[2])


def copied(native):
    return library.op(schema_of(native), lambda *args, **kwargs: native(*args, **kwargs))


def hidden(native):
    @torch.no_grad()
    def body(*args, **kwargs):
        return native(*args, **kwargs)

    return library.op(schema_of(native), body)


def by_formula(native):
    op = library.op(
        schema_of(native), lambda x, *args, **kwargs: native(x.detach(), *args, **kwargs)
    )

    def save(ctx, inputs, output, keyword_only_inputs=None):
        ctx.shape, ctx.rest = inputs[0].shape, inputs[1:]

    def backward(ctx, grad):
        with torch.enable_grad():
            x = torch.zeros(ctx.shape, requires_grad=True)
            found = torch.autograd.grad(native(x, *ctx.rest), x, grad, create_graph=True)
        return (*found, *[None] * (len(native._schema.arguments) - 1))

    op.register_autograd(backward, setup_context=save)
    return op


COPIES = {name: copied(native) for name, native in VIEWS.items()}
SINGLE = {name: native for name, native in VIEWS.items() if name not in LISTS}
MADE = {
    "derived": COPIES,
    "hidden": {**COPIES, **{name: hidden(native) for name, native in SINGLE.items()}},
    "formula": {**COPIES, **{name: by_formula(native) for name, native in SINGLE.items()}},
}
WRITTEN = {name: copied(native) for name, native in WRITES.items()}


def arguments(choose, name, x):
    """Further arguments of a view op for `x`; None if it has none that fit."""
    if name in ("alias", "expand", "unsqueeze"):
        return {"alias": (), "expand": ([2, *x.shape],), "unsqueeze": (0,)}[name]
    if x.dim() == 0:
        return None
    dim = choose.randrange(x.dim())
    return {
        "select": (dim, choose.randrange(x.shape[dim])),
        "slice": (dim, 0, choose.choice([1, 2, 2**63 - 1]), choose.choice([1, 2])),
        "split": (2, dim),
        "transpose": (dim, choose.randrange(x.dim())),
        "unbind": (dim,),
    }[name]


def outcome(fn):
    """What a call returns, or the text of its error without the name of a grad_fn."""
    try:
        return fn()
    except RuntimeError as error:
        return re.sub(r"Output (\d+) of \w+", r"Output \1", str(error))


def program(views, writes, seed):
    """What can be seen of a random program."""
    choose = random.Random(seed)
    leaf = (torch.arange(1.0, 13).view(3, 4) / 5).requires_grad_()
    weight = torch.tensor(1.5, requires_grad=True)
    root = leaf * 1 if choose.random() < 0.8 else leaf.detach().clone()
    pool, seen = [root], []
    for _ in range(choose.randrange(3, 9)):
        x = choose.choice(pool)
        mode = choose.choice([torch.enable_grad] * 5 + [torch.no_grad])
        if choose.random() < 0.55 and len(pool) < 9:
            name = choose.choice(sorted(views))
            rest = arguments(choose, name, x)
            if rest is not None:
                outs = outcome(lambda: under(mode, lambda: listed(views[name](x, *rest))))  # noqa: B023
                seen.append((name, outs if isinstance(outs, str) else None))
                pool += [] if isinstance(outs, str) else outs
        else:
            name, other = choose.choice(sorted(writes)), choose.choice([weight, weight.detach()])
            op = torch.Tensor.mul_ if choose.random() < 0.3 else writes[name]
            seen.append((name, outcome(lambda: write(op, mode, x, other))))  # noqa: B023
        seen.append([vt.version(t) for t in pool])
    seen.append([outcome(lambda t=t: facts(t, root)) for t in pool])
    seen.append(outcome(lambda: gradients(pool, leaf, weight)))
    return seen


def under(mode, fn):
    with mode():
        return fn()


def write(op, mode, x, other):
    takes_list = op in (WRITES["foreach"], WRITTEN["foreach"])
    with mode():
        op([x] if takes_list else x, other.detach() if takes_list else other)


def gradients(pool, leaf, weight):
    sum(((i + 1) * t * t).sum() for i, t in enumerate(pool)).backward()
    return leaf.grad, weight.grad


@pytest.mark.parametrize("made", MADE.values(), ids=MADE)
@pytest.mark.parametrize("context", CONTEXTS.values(), ids=CONTEXTS)
def test_chains(made, context):
    errors = 0
    for seed in range(40):
        native = program(VIEWS, WRITES, seed)
        with context():
            compare(program(made, WRITTEN, seed), native, str(seed))
        errors += "forbidden" in str(native) or "inplace" in str(native)
    assert 5 < errors < 35


def test_the_comparison_can_fail():
    wrong = {**COPIES, "select": lambda x, dim, index: x.detach().select(dim, index)}
    failures = 0
    for seed in range(40):
        native = program(VIEWS, WRITES, seed)
        try:
            compare(program(wrong, WRITTEN, seed), native)
        except AssertionError:
            failures += 1
    assert failures > 5
