"""Copies of ATen ops, made with viewtrack.library, held to the ATen ops themselves.

Over the samples of torch's OpInfo database: relation, base, creation_meta, versions, gradients and
errors, before and after random in-place ops on view and base.
"""

import itertools
import random

import pytest
import torch
from library_ops import CONTEXTS, fresh
from torch.testing._internal.common_methods_invocations import op_db

import viewtrack as vt
from viewtrack import library

INFOS = {info.name: info for info in op_db if not info.variant_test_name}
aten = torch.ops.aten

VIEWS = {
    "select": aten.select.int,
    "narrow": aten.slice.Tensor,
    "transpose": aten.transpose.int,
    "unbind": aten.unbind.int,
    "split": aten.split.Tensor,
    "view_as_real": aten.view_as_real.default,
}


def copied(native, define=library.op):
    """An op with the schema of an ATen op, whose body is that op."""
    _, _, signature = str(native._schema).partition("(")
    return define(fresh("(" + signature), lambda *args, **kwargs: native(*args, **kwargs))


def registered(native):
    """The same by `Library.define`, and `register`."""
    lib = torch.library.Library("vtlib", "FRAGMENT")
    _, _, signature = str(native._schema).partition("(")
    schema = fresh("(" + signature)
    name, qualified = schema.partition("::")[2], schema.partition("(")[0]
    lib.define(name)
    lib.impl(qualified, lambda *args, **kwargs: native(*args, **kwargs), "CPU")
    op = library.register(qualified, lib=lib)
    op.lib = lib
    return op


MAKERS = {"defined": copied, "registered": registered}
COPIES = {
    (how, name): make(native) for how, make in MAKERS.items() for name, native in VIEWS.items()
}


def samples(name, dtype, most=12):
    """Tensors and further arguments as the database has them; `narrow` calls aten.slice."""
    for sample in itertools.islice(INFOS[name].sample_inputs("cpu", dtype), most):
        args = sample.args
        if name == "split" and not isinstance(args[0], int):
            continue
        if name == "narrow":
            dim, start, length = args
            if isinstance(start, torch.Tensor):
                continue
            start = start + sample.input.shape[dim] if start < 0 else start
            args = (dim, start, start + length)
        yield sample.input.detach().clone(), args


def listed(out):
    return list(out) if isinstance(out, (list, tuple)) else [out]


def facts(t, base):
    info = vt.view_info(t)
    return {
        "shape": t.shape,
        "stride": t.stride(),
        "offset": t.storage_offset(),
        "is_view": t._is_view(),
        "of": t._base is base if t._is_view() else None,
        "creation_meta": info and info.creation_meta,
        "version": vt.version(t),
        "requires_grad": t.requires_grad,
        "grad_fn": t.grad_fn is None if not _is_stale(t) else "stale",
        "values": t.detach().clone(),
    }


def _is_stale(t):
    """Whether reading grad_fn is refused; native refuses for some views whose base was written."""
    try:
        t.grad_fn  # noqa: B018
    except RuntimeError:
        return True
    return False


EDITS = {
    "mul_": lambda t, other: t.mul_(2),
    "add_": lambda t, other: t.add_(other),
    "neg_": lambda t, other: t.neg_(),
    "zero_": lambda t, other: t.zero_(),
    "copy_": lambda t, other: t.copy_(other * 3),
}


def program(op, start, args, seed, grad_mode):
    """What can be seen of a program that calls `op`, and then edits what it gave and its base."""
    choose = random.Random(seed)
    differentiable = start.is_floating_point() or start.is_complex()
    leaf = start.clone().requires_grad_(differentiable)
    weight = torch.tensor(1.5, requires_grad=True)
    root = leaf * 1
    base = root.view_as(root) if choose.random() < 0.5 else root
    with grad_mode():
        outs = listed(op(base, *args))
    seen = [[facts(t, root) for t in outs]]
    tensors = [base, *outs]
    for _ in range(4):
        target, name = choose.choice(tensors), choose.choice(sorted(EDITS))
        other = weight.detach() if not differentiable else weight
        other = other.to(target.dtype)
        seen.append(outcome(lambda f=EDITS[name], t=target, o=other: f(t, o)))
        seen.append([vt.version(t) for t in tensors])
    seen.append([outcome(lambda t=t: facts(t, root)) for t in tensors])
    if differentiable:
        seen.append(outcome(lambda: backward(tensors, leaf, weight)))
    return seen


def backward(tensors, leaf, weight):
    loss = sum(((i + 1) * (t * t.conj()).real).sum() for i, t in enumerate(tensors))
    loss.backward()
    return leaf.grad, weight.grad


def outcome(fn):
    """What a call returns, or the text of its error. The tensor that an edit returns is no news."""
    try:
        result = fn()
    except RuntimeError as error:
        return str(error)
    return None if isinstance(result, torch.Tensor) else result


def compare(ours, native, path=""):
    """Fail with the place where two programs went apart."""
    assert type(ours) is type(native), (path, ours, native)
    if isinstance(ours, torch.Tensor):
        torch.testing.assert_close(ours, native, equal_nan=True, msg=lambda m: f"{path}: {m}")
    elif isinstance(ours, dict):
        assert ours.keys() == native.keys()
        for key, value in ours.items():
            compare(value, native[key], f"{path}.{key}")
    elif isinstance(ours, (list, tuple)) and not isinstance(ours, torch.Size):
        assert len(ours) == len(native), path
        for index, (a, b) in enumerate(zip(ours, native, strict=True)):
            compare(a, b, f"{path}[{index}]")
    else:
        assert ours == native, path


@pytest.mark.parametrize("name", VIEWS)
@pytest.mark.parametrize("how", MAKERS)
@pytest.mark.parametrize("context", CONTEXTS.values(), ids=CONTEXTS)
def test_views(name, how, context):
    checked = 0
    dtypes = [torch.complex64] if name == "view_as_real" else [torch.float32, torch.int64]
    for dtype in dtypes:
        for number, (start, args) in enumerate(samples(name, dtype)):
            for grad_mode in (torch.enable_grad, torch.no_grad, torch.inference_mode):
                native = program(VIEWS[name], start, args, number, grad_mode)
                with context():
                    ours = program(COPIES[how, name], start, args, number, grad_mode)
                compare(ours, native)
                checked += 1
    assert checked >= (6 if name == "view_as_real" else 12)


def test_the_comparison_can_fail():
    start = torch.arange(6.0).view(2, 3)
    native = program(aten.select.int, start, (0, 1), 1, torch.enable_grad)
    unmarked = library.op(fresh("(Tensor x, int d, int i) -> Tensor"), lambda x, d, i: x[i].clone())
    with pytest.raises(AssertionError, match=r"\[0\]\[0\]"):
        compare(program(unmarked, start, (0, 1), 1, torch.enable_grad), native)


add_ = copied(aten.add_.Tensor, library.inplace_op)
mul_out = copied(aten.mul.out, library.out_op)
foreach_add_ = copied(aten._foreach_add_.List, library.inplace_op)


def pairs(dtype):
    for sample in itertools.islice(INFOS["add"].sample_inputs("cpu", dtype), 12):
        x, other = sample.input, sample.args[0]
        fits = isinstance(other, torch.Tensor) and other.dtype == x.dtype
        if fits and torch.broadcast_shapes(x.shape, other.shape) == x.shape:
            yield x.detach().clone(), other.detach().clone(), sample.kwargs


def write_program(op, x, other, kwargs, through):
    """What can be seen of a program in which `op` writes a tensor, or a view of it."""
    differentiable = x.is_floating_point() or x.is_complex()
    leaves = [t.clone().requires_grad_(differentiable) for t in (x, other)]
    root, second = (leaf * 1 for leaf in leaves)
    target = through(root)
    saved = root.exp() if differentiable else root.clone()
    seen = [outcome(lambda: [op(target, second, **kwargs) is target])]
    seen.append([vt.version(t) for t in (root, target, second)])
    seen.append(outcome(lambda: [op(saved.detach(), second, **kwargs) is None]))
    seen.append(facts(target, root))
    if differentiable:
        seen.append(outcome(lambda: (target.sum() + (root * root.conj()).real.sum()).backward()))
        seen.append([leaf.grad for leaf in leaves])
        seen.append(outcome(lambda: saved.sum().backward()))
        seen.append(outcome(lambda: op(leaves[0], second, **kwargs)))
    return seen


THROUGH = {
    "itself": lambda root: root,
    "view": lambda root: root.view_as(root),
    "no_grad view": lambda root: _under(torch.no_grad, root),
    "one of many": lambda root: root.unsqueeze(0).unbind()[0],
}


def _under(mode, root):
    with mode():
        return root.view_as(root)


@pytest.mark.parametrize("through", THROUGH.values(), ids=THROUGH)
@pytest.mark.parametrize("context", CONTEXTS.values(), ids=CONTEXTS)
@pytest.mark.parametrize("foreach", [False, True])
def test_in_place(through, context, foreach):
    checked = 0
    ours, native = (foreach_add_, aten._foreach_add_.List) if foreach else (add_, aten.add_.Tensor)

    def on_lists(op):
        def call(x, y, **kwargs):
            op([x], [y], **kwargs)
            return x

        return call if foreach else op

    for dtype in (torch.float32, torch.int64):
        for x, other, kwargs in pairs(dtype):
            expected = write_program(on_lists(native), x, other, kwargs, through)
            with context():
                found = write_program(on_lists(ours), x, other, kwargs, through)
            compare(found, expected)
            checked += 1
    assert checked >= 5


@pytest.mark.parametrize("context", CONTEXTS.values(), ids=CONTEXTS)
def test_out(context):
    def look(op, x, other, needs):
        x = x.clone().requires_grad_(needs)
        out = torch.zeros_like(x)
        saved = torch.ones_like(x, requires_grad=True)
        kept = saved.exp()
        seen = [_kind(outcome(lambda: [op(x, other, out=out) is out])), out.detach(), out._version]
        seen.append(outcome(lambda: [op(other, other, out=kept.detach()) is None]))
        seen.append(outcome(lambda: kept.sum().backward()))
        return seen

    checked = 0
    for x, other, kwargs in pairs(torch.float32):
        if kwargs or x.shape != other.shape:
            continue
        for needs in (False, True):
            expected = look(aten.mul.out, x, other, needs)
            with context():
                found = look(mul_out, x, other, needs)
            compare(found, expected)
            checked += 1
    assert checked >= 2


def _kind(said):
    """An error names its op; the rest of it must be the same up to the mend."""
    if isinstance(said, str):
        return said.split("(): ", 1)[-1].split(" requires grad")[0]
    return said
