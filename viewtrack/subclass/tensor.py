"""`TrackedTensor`: a wrapper that behaves as the tensor inside it, down to counters and views.

Its own metadata is the inner tensor's, conj and neg bits included: those bits are served by kernels
above Python, which look at the wrapper and never at the inner tensor.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any, TypeVar

import torch

from .. import _torch
from .._torch import nested
from .._torch import subclass as _torch_subclass
from ..errors import ViewTrackError
from .correct import correct_aliasing
from .counters import share_counter
from .memory import InnerMemory, without_inner
from .running import run_counted

T = TypeVar("T", bound="TrackedTensor")


class TrackedTensor(InnerMemory):
    """Wraps any tensor; every op on it gives what the same op on the inner tensor gives.

    That holds for values, sizes, strides, dtype, device, view relations, version counters,
    gradients and errors. The counters of the inner tensors move with those of the wrappers, and
    inner views share them.

    As a base class: override `run` to change how ops are run (logged, offloaded, on quantized
    values), and `like` if your wrapper has more to it than the inner tensor. Aliasing and counters
    are seen to, whatever `run` returns.

    Semantics: NOTE [ Autograd View Variables ] in torch/csrc/autograd/variable.h; the protocol of
    traceable wrapper subclasses in torch/utils/_python_dispatch.py.

    Args:
        inner: a tensor of any shape, dtype, device and layout. The wrapper is a leaf: no gradient
            flows from it to `inner`.
        dtype: the dtype that the wrapper shows; default: inner's.
        requires_grad: whether the wrapper requires grad; default: as `inner` does.

    Raises:
        TypeError: `inner` is no tensor.
        ViewTrackError: `inner` is a nested tensor of layout strided.
    """

    counts_itself = True
    __torch_function__ = _torch_subclass.no_torch_function_impl

    def __new__(  # noqa: D102 - the class tells
        cls: type[T],
        inner: torch.Tensor,
        *args: Any,
        dtype: torch.dtype | None = None,
        requires_grad: bool | None = None,
        **kwargs: Any,
    ) -> T:
        if not isinstance(inner, torch.Tensor):
            raise TypeError(f"`{cls.__name__}` wraps a tensor, got `{type(inner).__name__}`")
        if nested.is_strided_nested(inner):
            raise ViewTrackError(
                f"`{cls.__name__}` cannot wrap a nested tensor of layout strided, which has no "
                f"sizes to show; wrap `torch.nested.as_nested_tensor(t.unbind(), "
                f"layout=torch.jagged)`"
            )
        if requires_grad is None:
            requires_grad = inner.requires_grad
        self = _blank(cls, inner, dtype or inner.dtype, requires_grad)
        # Its own gradient is none of the wrapper's business, and must not come out of inner ops.
        with _torch.inplace_or_view():  # below autograd a detached tensor has another counter
            self._inner = inner.detach() if inner.requires_grad else inner
        return self

    def __init__(self, inner: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        super().__init__()

    def unwrap(self) -> torch.Tensor:
        """The inner tensor itself, no copy."""
        return self._inner

    def like(self: T, inner: torch.Tensor) -> T:
        """A wrapper such as this one around another inner tensor.

        Override it if your constructor needs more than the inner tensor.

        Args:
            inner: a tensor of any shape.
        """
        return type(self)(inner)

    @classmethod
    def run(cls, func: Any, args: Any, kwargs: Any) -> Any:
        """Run an op; override it to run ops in another way.

        It is called below autograd, with the wrappers themselves among the arguments. For view ops
        return views of the inner tensor in a wrapper; for in-place ops write the inner tensor in
        place. What is returned for the arguments that an op writes does not matter.

        Args:
            func: the OpOverload.
            args: its positional arguments.
            kwargs: its keyword arguments.

        Returns:
            What the op returns: tensors of any class, or what is no tensor.
        """
        if func is _NEW_EMPTY_STRIDED and args[0].unwrap().layout is torch.jagged:
            # CopySlices asks for it after a write to `values()`, and NestedTensor does not have it.
            func, args, kwargs = _EMPTY_LIKE, args[:1], {}
        wrappers = [t for t in _torch.tree_leaves((args, kwargs)) if cls._is_mine(t)]
        inner = _inner_as_required if func in _ASKS_REQUIRES_GRAD else TrackedTensor.unwrap
        inner_args, inner_kwargs = _torch.tree_map(
            lambda t: inner(t) if cls._is_mine(t) else t, (args, kwargs)
        )
        out = func(*inner_args, **inner_kwargs)
        return cls._wrapped(out, wrappers, (inner_args, inner_kwargs))

    @classmethod
    def _is_mine(cls, t: Any) -> bool:
        return isinstance(t, TrackedTensor) and (isinstance(t, cls) or issubclass(cls, type(t)))

    @classmethod
    def _wrapped(cls, out: Any, wrappers: list[Any], inner_args: Any) -> Any:
        """The outputs in wrappers; those that are arguments stay the arguments that they are."""
        if not wrappers:
            return out
        known = {id(t): t for t in _torch.tree_leaves(inner_args) if isinstance(t, torch.Tensor)}
        known |= {id(w._inner): w for w in wrappers}
        model = next((w for w in wrappers if type(w) is cls), wrappers[0])

        def wrap(t: torch.Tensor) -> torch.Tensor:
            same = known.get(id(t))
            if same is None or (same is not t and same.size() != t.size()):  # resized by out=
                return model.like(_without_metadata(t))
            return same

        return _torch.tree_map_only(torch.Tensor, wrap, out)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        out = run_counted(func, args, kwargs, cls.run)
        return correct_aliasing(func, args, kwargs, out)

    def __tensor_flatten__(self) -> tuple[Sequence[str], Any]:
        return ["_inner"], None

    @classmethod
    def __tensor_unflatten__(
        cls: type[T], inner_tensors: dict[str, torch.Tensor], context: Any, size: Any, stride: Any
    ) -> T:
        return cls(inner_tensors["_inner"])

    def __deepcopy__(self: T, memo: Any) -> T:
        if not self.is_leaf:
            raise RuntimeError(
                "only a tensor that the user created can be deep-copied, and this one has the "
                f"grad_fn {self.grad_fn}; copy `.detach()` of it"
            )
        if id(self) in memo:
            known: T = memo[id(self)]
            return known
        inner = copy.deepcopy(self._inner, memo)
        new = _blank(type(self), inner, self.dtype, self.requires_grad)
        memo[id(self)] = new
        new._inner = inner
        new.__dict__.update(copy.deepcopy(without_inner(self), memo))
        if self.grad is not None:
            new.grad = copy.deepcopy(self.grad, memo)
        return new

    def __reduce_ex__(self, protocol: Any) -> Any:
        arguments = (type(self), self._inner, self.dtype, self.requires_grad, without_inner(self))
        return _rebuild, arguments

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        history = ""
        if self.grad_fn is not None:
            history = f", grad_fn=<{self.grad_fn.name()}>"
        elif self.requires_grad:
            history = ", requires_grad=True"
        return f"{type(self).__name__}({self._inner!r}{history})"


def _rebuild(cls: Any, inner: Any, dtype: Any, requires_grad: bool, state: Any) -> Any:
    new = _blank(cls, inner, dtype, requires_grad)
    new._inner = inner
    new.__dict__.update(state)
    return new


_NEW_EMPTY_STRIDED = torch.ops.aten.new_empty_strided.default
_EMPTY_LIKE = torch.ops.aten.empty_like.default

# Its kernel makes what its backward reads only if its arguments require grad, and the backward does
# not look: with inner tensors, which never do, it would read beyond an empty tensor.
_ASKS_REQUIRES_GRAD = frozenset({torch.ops.aten._sparse_mm_reduce_impl.default})


def _inner_as_required(t: TrackedTensor) -> torch.Tensor:
    """An alias of the inner tensor that requires grad as the wrapper does."""
    return t.unwrap().detach().requires_grad_(t.requires_grad)


def _blank(cls: type[T], inner: torch.Tensor, dtype: torch.dtype, requires_grad: bool) -> T:
    """A wrapper with inner's geometry, bits and counter, around nothing yet."""
    self: T = _torch_subclass.make_wrapper(
        cls,
        inner.size(),
        dtype=dtype,
        device=inner.device,
        **_geometry(inner, dtype),
    )
    if inner.is_conj() or inner.is_neg():
        _torch_subclass.set_conj_and_neg(self, inner)
    share_counter(self, inner)  # which drops the metadata that a tensor has
    if requires_grad:
        self.requires_grad_()
    return self


def _geometry(inner: torch.Tensor, dtype: torch.dtype) -> dict[str, Any]:
    if inner.layout is torch.sparse_coo:
        return {"layout": inner.layout}
    # A wrapper cannot have any other layout itself, but it can be asked for it.
    asked: dict[str, Any] = {} if inner.layout is torch.strided else {"dispatch_layout": True}
    if inner.layout not in (torch.strided, torch.jagged):
        return asked
    nbytes = inner.untyped_storage().size()
    if inner.layout is torch.jagged:
        asked["_extra_dispatch_keys"] = nested.KEYS
    if dtype is not inner.dtype:  # as many elements, in the dtype that the wrapper shows
        nbytes = nbytes // inner.element_size() * dtype.itemsize
    return {
        "strides": inner.stride(),
        "storage_offset": inner.storage_offset(),
        "storage_size": nbytes,
        **asked,
    }


def _without_metadata(t: torch.Tensor) -> torch.Tensor:
    """Inner views come with view metadata, which a kernel that they are returned to would refuse.

    Detached where ADInplaceOrView is on, they keep the counter and drop the metadata.
    """
    return t.detach() if t._is_view() or t.requires_grad else t
