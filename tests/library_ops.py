"""Custom ops and contexts that several tests of viewtrack.library share."""

import contextlib
import ctypes
import itertools

import torch
from torch.utils._python_dispatch import TorchDispatchMode

import viewtrack as vt
from viewtrack import library

_serial = itertools.count()


def fresh(schema):
    """A schema whose op nobody has defined: `(...) -> ...` with a name of its own."""
    return f"vtlib::op{next(_serial)}{schema}"


class PassThrough(TorchDispatchMode):
    """Hands every op on, and keeps their names."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen.append(func)
        return func(*args, **(kwargs or {}))


class Issue(TorchDispatchMode):
    """Calls `fn` with the argument of each `aten.sin`, in its handler, and keeps what came back."""

    def __init__(self, fn):
        super().__init__()
        self.fn = fn
        self.results = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.sin.default:
            self.results.append(self.fn(*args))
        return func(*args, **(kwargs or {}))


CONTEXTS = {
    "plain": contextlib.nullcontext,
    "mode": PassThrough,
    "track": vt.track,
}


def memset(t):
    """Zero a tensor's memory unseen by PyTorch."""
    ctypes.memset(t.data_ptr(), 0, t.numel() * t.element_size())


@library.view_op("vtlib::head(Tensor(a) x, int n) -> Tensor(a)")
def head(x, n):
    return x[:n]


@library.view_op("vtlib::hidden_head(Tensor(a) x, int n) -> Tensor(a)")
def hidden_head(x, n):
    return x.detach()[:n]


@library.view_op("vtlib::no_grad_head(Tensor(a) x, int n) -> Tensor(a)")
@torch.no_grad()
def no_grad_head(x, n):
    return x[:n]


@library.view_op("vtlib::inference_head(Tensor(a) x, int n) -> Tensor(a)")
@torch.inference_mode()
def inference_head(x, n):
    return x[:n]


@library.view_op("vtlib::half_hidden_head(Tensor(a) x, int n) -> Tensor(a)")
def half_hidden_head(x, n):
    with torch.no_grad():
        hidden = x[:n]
    return hidden[:]


@library.view_op("vtlib::formula_head(Tensor(a) x, int n) -> Tensor(a)")
def formula_head(x, n):
    return x.detach()[:n]


def _save_length(ctx, inputs, output):
    ctx.length = inputs[0].shape[0]


def _pad(ctx, grad):
    rest = grad.new_zeros(ctx.length - grad.shape[0], *grad.shape[1:])
    return torch.cat([grad, rest]), None


formula_head.register_autograd(_pad, setup_context=_save_length)

HIDDEN = {
    "hidden": hidden_head,
    "no_grad": no_grad_head,
    "inference": inference_head,
    "half hidden": half_hidden_head,
}
HEADS = {"derived": head, **HIDDEN, "formula": formula_head}


@library.inplace_op("vtlib::axpy_(Tensor(a!) x, Tensor y, Scalar alpha=1) -> Tensor(a!)")
def axpy_(x, y, alpha):
    return x.add_(y, alpha=alpha)


@library.inplace_op("vtlib::raw_zero_(Tensor(a!) x) -> Tensor(a!)")
def raw_zero_(x):
    memset(x)
    return x


@library.inplace_op("vtlib::numpy_zero_(Tensor(a!) x) -> Tensor(a!)")
def numpy_zero_(x):
    x.numpy()[...] = 0
    return x


@library.inplace_op("vtlib::raw_clear(Tensor(a!) x) -> ()")
def raw_clear(x):
    memset(x)


@library.inplace_op("vtlib::formula_zero_(Tensor(a!) x) -> Tensor(a!)")
def formula_zero_(x):
    memset(x)
    return x


formula_zero_.register_autograd(lambda ctx, grad: torch.zeros_like(grad))

RAW = {
    "ctypes": raw_zero_,
    "numpy": numpy_zero_,
    "no output": raw_clear,
    "with a formula": formula_zero_,
}


@library.inplace_op("vtlib::double_rows(Tensor(a!) x, int[] rows) -> Tensor(a!)")
def double_rows(x, rows):
    for row in rows:
        x[row].mul_(2)
    return x
