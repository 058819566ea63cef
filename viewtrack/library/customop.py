"""`CustomOp`: an op with the kernels of `kernels.py`, and what can be registered for it."""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any
from weakref import WeakValueDictionary

import torch

from .._torch import library as _torch_library
from .._torch.dynamo import skip_dynamo
from ..errors import ViewTrackError
from ..plan import forget
from .checks import checked_body
from .formula import Formula
from .kernels import Kernels
from .native import NativeKernels
from .signature import check_signature
from .spec import Body, Spec
from .traced import define_companion, fake_of


class CustomOp:
    """An op with a faithful ADInplaceOrView kernel.

    Calling it calls the op, as ``torch.ops.mylib.name`` does. The ``register_*`` methods are named
    as those of ``torch.library``, and work as methods and as decorators.

    It is one with the op, as a function is with its name: copies of it are itself, and it is
    pickled by name.
    """

    def __init__(self, spec: Spec, fn: Body) -> None:
        self._spec = spec
        self._op: Any = spec.op
        self._fn = fn
        self.__name__ = getattr(fn, "__name__", spec.name)
        self.__doc__ = getattr(fn, "__doc__", None)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the op."""
        return self._op(*args, **kwargs)

    def __repr__(self) -> str:
        return f"<CustomOp({self._spec.schema})>"

    def __copy__(self) -> CustomOp:
        return self

    def __deepcopy__(self, memo: Any) -> CustomOp:
        return self

    def __reduce__(self) -> Any:
        return _by_name, (self._spec.name, getattr(self._fn, "__module__", None))

    @property
    def op(self) -> Any:
        """The OpOverload."""
        return self._spec.op

    def _end(self) -> None:
        """The library that defined the op is gone, and a call through the OpOverload may crash."""
        self._op = self._has_ended

    def _has_ended(self, *args: Any, **kwargs: Any) -> Any:
        raise ViewTrackError(
            f"`{self._spec.name}` ({self._spec.where}) is gone: the library that defined it was "
            f"destroyed, or the op was defined again; keep the library as long as the op, or call "
            f"what defined it last"
        )

    def _check_takes(self, method: str) -> None:
        if self._spec.plan.is_aten:
            raise ViewTrackError(
                f"`{self._spec.plan.name}` is torch's own op, of which only the writes are counted "
                f"here; `{method}` is for ops of your own"
            )
        library = self._spec.library()
        if library is None or _torch_library.is_destroyed(library):
            self._has_ended()

    def register_kernel(self, device_types: str | Sequence[str], fn: Body | None = None) -> Any:
        """Register what runs for a device type; the body runs for the others.

        Autograd looks into it as into the body. Compilers are given the body.

        Args:
            device_types: ``"cpu"``, ``"cuda"``, ..., or several.
            fn: the kernel, with the signature and the outputs of the body.

        Returns:
            `fn`, or a decorator if it is left out.
        """
        self._check_takes("register_kernel")

        def register(fn: Body) -> Body:
            kernel = checked_body(self._spec, fn, "kernel")
            types = [device_types] if isinstance(device_types, str) else device_types
            self._spec.kernel_devices.update(types)
            torch.library.impl(self._spec.name, device_types, kernel, lib=self._spec.library())
            return fn

        return register if fn is None else register(fn)

    def register_autograd(
        self, backward: Callable[..., Any], /, *, setup_context: Callable[..., Any] | None = None
    ) -> None:
        """Register a gradient formula, in the place of what autograd finds in the body.

        The formula is that of the op's functional form: its outputs are those of the schema, in
        order, and then each written argument that is not returned. For views it is replayed: an
        in-place op on the view or on its base later sends the right gradient through it.

        Args:
            backward: ``backward(ctx, *grads)``, with one gradient for each output of the
                functional form (a list for a list), returns one gradient for each argument of the
                schema, None for those without.
            setup_context: ``setup_context(ctx, inputs, output)`` saves what `backward` needs, as
                in ``torch.library.register_autograd``; with keyword-only arguments it is
                ``setup_context(ctx, inputs, keyword_only_inputs, output)``. A written argument has
                its new value here. It may save tensors of `output`, and inputs.
        """
        self._check_takes("register_autograd")
        jvp = self._spec.formula.jvp if self._spec.formula is not None else None
        self._spec.formula = Formula(backward, setup_context, jvp)

    def register_jvp(self, jvp: Callable[..., Any]) -> Callable[..., Any]:
        """Register a formula for forward mode, beside the one of `register_autograd`.

        A view op with a gradient formula needs none: a view is linear in its base.

        Args:
            jvp: ``jvp(ctx, *tangents)``, with one tangent for each argument (None for those
                without), returns one for each output of the functional form. `ctx` is that of
                `register_autograd`'s setup_context (``ctx.save_for_forward``).

        Returns:
            `jvp`, so that this is a decorator too.
        """
        self._check_takes("register_jvp")
        formula = self._spec.formula or Formula()
        self._spec.formula = Formula(formula.backward, formula.setup_context, jvp)
        return jvp

    def register_fake(self, fn: Body) -> Body:
        """Register what the op does on tensors without memory, if the body does not serve.

        Args:
            fn: as in ``torch.library.register_fake``; where the schema has a view it must return
                one, where it has an argument that argument.

        Returns:
            `fn`, so that this is a decorator too.
        """
        self._check_takes("register_fake")
        self._spec.fake = checked_body(self._spec, fn, "fake implementation")
        return fn

    def register_vmap(self, fn: Body) -> Body:
        """Register a batching rule, if the body does not serve.

        Args:
            fn: ``fn(info, in_dims, *args, **kwargs)`` returns outputs and out_dims, as in
                ``torch.library.register_vmap``.

        Returns:
            `fn`, so that this is a decorator too.
        """
        self._check_takes("register_vmap")
        where = f"`{self._spec.name}` ({self._spec.where})"
        check_signature(self._spec.schema, where, fn, "batching rule", before=2)
        self._spec.vmap = fn
        return fn


_specs: WeakValueDictionary[str, Spec] = WeakValueDictionary()


def _by_name(name: str, module: str | None) -> CustomOp:
    """The op of a name, defined by its module if need be: what a pickle holds.

    Raises:
        ViewTrackError: nobody has defined it.
    """
    if name not in _specs and module is not None:
        with suppress(ImportError):
            importlib.import_module(module)
    spec = _specs.get(name)
    if spec is None:
        raise ViewTrackError(
            f"a pickle refers to `{name}`, which viewtrack.library knows no op for; import what "
            f"defines it before unpickling"
        )
    custom: CustomOp = spec.custom
    return custom


def body_of(name: str) -> Body | None:
    """The function that an op of viewtrack.library was made of; None if it is no such op."""
    spec = _specs.get(name)
    return spec.custom._fn if spec is not None else None


def install(custom: CustomOp, *, autograd: bool = True, fake: bool = True) -> CustomOp:
    """Register the kernels that every op gets.

    Args:
        custom: the op.
        autograd: whether to register an Autograd kernel.
        fake: whether to register a fake implementation.
    """
    spec = custom._spec
    kernels = Kernels(spec)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*verriding a previously registered kernel")
        warnings.filterwarnings("ignore", message="Warning only once for all operators")
        if autograd:
            _impl(spec, kernels.autograd, "Autograd")
        _impl(spec, kernels.inplace_or_view, "ADInplaceOrView")
        _impl(spec, kernels.bottom, "BackendSelect")
        _impl(spec, kernels.functionalize, "Functionalize")
        _impl(spec, kernels.batched, "FuncTorchBatched")
    if fake:
        torch.library.register_fake(spec.name, fake_of(spec), lib=spec.library())
    if not spec.views:
        spec.companion = define_companion(spec)
    forget(spec.op)
    spec.custom = custom
    _specs[spec.name] = spec
    return custom


def install_counting(custom: CustomOp) -> CustomOp:
    """Register the kernels that an op of torch's own gets."""
    spec = custom._spec
    kernels = NativeKernels(spec)
    _impl(spec, kernels.inplace_or_view, "ADInplaceOrView")
    _impl(spec, kernels.bottom, "BackendSelect")
    forget(spec.op)
    return custom


def _impl(spec: Spec, kernel: Any, key: str) -> None:
    _torch_library.impl(spec.library(), spec.name, kernel, key)
    skip_dynamo(kernel)
