"""Wrapper subclasses as users write them, for tests of what helps them."""

import torch
from torch.utils._pytree import tree_map_only

import viewtrack as vt


def aliases(a, b):
    return torch._C._is_alias_of(a, b)


def make_wrapper(*, flattens=False, quiet=True, correct=vt.correct_aliasing, wrap=None):
    """A wrapper class around one tensor, `e`.

    Args:
        flattens: whether it declares `e` by ``__tensor_flatten__``.
        quiet: whether it does without ``__torch_function__``.
        correct: called last in its handler.
        wrap: makes the outputs from inner ones, ``wrap(cls, func, args, inner)``.
    """

    class Wrapper(torch.Tensor):
        @staticmethod
        def __new__(cls, e, requires_grad=False):
            return torch.Tensor._make_wrapper_subclass(
                cls,
                e.shape,
                strides=e.stride(),
                storage_offset=e.storage_offset(),
                dtype=e.dtype,
                device=e.device,
                requires_grad=requires_grad,
                storage_size=e.untyped_storage().size(),
            )

        def __init__(self, e, requires_grad=False):
            self.e = e

        def __repr__(self):
            return f"Wrapper({self.e})"

        if quiet:
            __torch_function__ = torch._C._disabled_torch_function_impl

        if flattens:

            def __tensor_flatten__(self):
                return ["e"], None

            @staticmethod
            def __tensor_unflatten__(inner, context, size, stride):
                return Wrapper(inner["e"])

        @classmethod
        def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
            inner = tree_map_only(Wrapper, lambda t: t.e, (args, kwargs or {}))
            out = func(*inner[0], **inner[1])
            if wrap is None:
                out = tree_map_only(torch.Tensor, cls, out)
            else:
                out = wrap(cls, func, args, out)
            return correct(func, args, kwargs, out)

    return Wrapper
