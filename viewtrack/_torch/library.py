"""Private torch that custom ops need: key sets, guards, schemas, tracing.

A part of the one room that touches private torch; tried on torch 2.6.0, 2.9.1, 2.13.0 and 2.14.1.
"""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch

from .. import _torch
from . import DispatchKey, OpOverload
from .fakes import is_fake as is_fake

_C = torch._C
aten = torch.ops.aten

CompositeExplicit = "CompositeExplicitAutograd"

after_autograd: Any = _C._after_autograd_keyset
"""The keys below Autograd."""

after_inplace_or_view: Any = _C._after_ADInplaceOrView_keyset
"""The keys below ADInplaceOrView."""

after_backend_select: Any = _C._dispatch_keyset_full_after(DispatchKey.BackendSelect)
"""The keys below BackendSelect, which itself comes right below Python: the backends."""

below_autograd: Callable[[], AbstractContextManager[None]] = _C._AutoDispatchBelowAutograd
"""Exclude Autograd's keys inside, as an Autograd kernel does before it redispatches."""

below_inplace_or_view: Callable[[], AbstractContextManager[None]] = (
    _C._AutoDispatchBelowADInplaceOrView
)
"""Exclude ADInplaceOrView's key too, as an ADInplaceOrView kernel does before it redispatches."""


def recording_as_here() -> Callable[[], AbstractContextManager[None]]:
    """What makes autograd record inside as where this is called, in backward and forward mode."""
    grad, forward_grad = torch.is_grad_enabled(), _C._is_fwd_grad_enabled()

    @contextmanager
    def recording() -> Iterator[None]:
        before = _C._is_fwd_grad_enabled()
        _C._set_fwd_grad_enabled(forward_grad)
        try:
            with torch.set_grad_enabled(grad):
                yield
        finally:
            _C._set_fwd_grad_enabled(before)

    return recording


def without_tangent(t: Any) -> Any:
    """A tensor without its tangent; itself if it has none, or is no tensor."""
    if not isinstance(t, torch.Tensor) or _torch.tangent(t) is None:
        return t
    primal: torch.Tensor = torch.autograd.forward_ad.unpack_dual(t).primal
    return primal


def excluded_keys() -> Any:
    """The keys that this thread excludes, for `as_called`."""
    return _C._dispatch_tls_local_exclude_set()


def as_called(excluded: Any) -> AbstractContextManager[None]:
    """Dispatch inside as where `excluded_keys` was asked, as far as autograd goes."""
    exclude = _C._dispatch_tls_local_exclude_set() - (_torch._BELOW_AUTOGRAD - excluded)
    guard: AbstractContextManager[None] = _C._ForceDispatchKeyGuard(
        _C._dispatch_tls_local_include_set(), exclude
    )
    return guard


@contextmanager
def without_modes() -> Iterator[None]:
    """Take all dispatch modes off the stack inside, so that they do not see what marking does.

    AOTAutograd's stay: its tensors cannot do without.
    """
    functional = _C._get_dispatch_mode(_C._TorchDispatchModeKey.FUNCTIONAL) is not None
    modes = [] if functional else [_torch.pop_mode() for _ in range(_torch.mode_stack_len())]
    try:
        yield
    finally:
        for mode in reversed(modes):
            _torch.push_mode(mode)


# ------------------------------------------------------------------------------ ops


def parse_schema(schema: str) -> Any:
    """A FunctionSchema of its text. Raises RuntimeError."""
    return _C.parse_schema(schema)


def lookup(qualified: str) -> OpOverload:
    """The OpOverload of ``"ns::name.overload"``. Raises AttributeError."""
    namespace, _, name = qualified.partition("::")
    name, _, overload = name.partition(".")
    packet = getattr(getattr(torch.ops, namespace), name)
    op: OpOverload = getattr(packet, overload or "default")
    return op


def overload_of(op: Any) -> OpOverload | None:
    """The OpOverload behind an OpOverload, a packet with one overload, or torch's CustomOpDef."""
    if isinstance(op, OpOverload):
        return op
    if is_custom_op_def(op):
        found: OpOverload = op._opoverload
        return found
    if isinstance(op, torch._ops.OpOverloadPacket):
        names = op.overloads()
        return getattr(op, names[0]) if len(names) == 1 else None
    return None


def is_custom_op_def(op: Any) -> bool:
    """Whether `op` is what ``torch.library.custom_op`` returns."""
    return isinstance(op, torch._library.custom_ops.CustomOpDef)


def custom_op_def(qualified: str) -> Any:
    """What ``torch.library.custom_op`` returned for an op, or None."""
    return torch._library.custom_ops.OPDEFS.get(qualified)


def custom_op_library(definition: Any) -> torch.library.Library:
    """The library in which ``torch.library.custom_op`` defined an op: destroyed with the op."""
    library: torch.library.Library = definition._lib
    return library


def custom_op_body(qualified: str) -> Callable[..., Any] | None:
    """The function that an op of ``torch.library.custom_op`` was made of, or None."""
    definition = custom_op_def(qualified)
    body: Callable[..., Any] | None = getattr(definition, "_init_fn", None)
    return body


def defined_at(qualified: str) -> str | None:
    """``file:line`` of the registration of an op's schema, as the dispatcher prints it, or None.

    Of ops that Python defined it does not know in 2.6; it does in 2.9.
    """
    for line in _C._dispatch_dump(qualified).splitlines():
        place = str(line.removeprefix("debug: registered at "))
        if place != line:
            return place if not place.startswith("/dev/null:") else None
    return None


def op_names() -> list[str]:
    """The names of all ops of the dispatcher, ``"ns::name.overload"``."""
    return list(_C._dispatch_get_all_op_names())


def has_fake(qualified: str) -> bool:
    """Whether the op has a fake implementation, or a Meta kernel."""
    entry = torch._library.simple_registry.singleton.find(qualified)
    meta = _C._dispatch_has_kernel_for_dispatch_key(qualified, "Meta")
    return bool(meta) or entry.fake_impl.kernel is not None


def backend_of(args: Any, kwargs: Any) -> Any:
    """The key set that leads to the backend kernel for these arguments and nowhere else."""
    first = next(t for t in _torch.tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor))
    return _C.DispatchKeySet(getattr(DispatchKey, _C._dispatch_key_for_device(first.device.type)))


def destroy(lib: torch.library.Library) -> None:
    """Take back all that was registered in a library."""
    lib._destroy()


def is_destroyed(lib: torch.library.Library) -> bool:
    """Whether all that was registered in a library was taken back."""
    return lib.m is None


def on_destroy(lib: torch.library.Library, find: Callable[[], Callable[[], None] | None]) -> None:
    """Call what `find` gives once the library is destroyed, or dies: a weak reference will do.

    Whatever `find` holds on to is held as long as the library, which it must not keep alive.
    """
    lib._registration_handles.append(_Handle(find))  # type: ignore[arg-type]


class _Handle:
    """Stands with the handles of fake implementations, which are destroyed with the library."""

    def __init__(self, find: Callable[[], Callable[[], None] | None]) -> None:
        self._find = find

    def destroy(self) -> None:
        found = self._find()
        if found is not None:
            found()


def impl(lib: torch.library.Library, name: str, kernel: Any, key: str) -> None:
    """Register a kernel that takes the key set, in the place of an older one if there is one."""
    torch.library._impls.discard(f"{lib.ns}/{name.partition('::')[2]}/{key}")  # refused before 2.9
    lib.impl(name, kernel, key, with_keyset=True)


def vmap_by_rule(rule: Callable[..., Any], op: OpOverload, args: Any, kwargs: Any) -> Any:
    """Apply a rule as ``torch.library.register_vmap`` takes it. For a FuncTorchBatched kernel."""
    from torch._functorch.autograd_function import custom_function_call_vmap_helper
    from torch._functorch.pyfunctorch import retrieve_current_functorch_interpreter

    interpreter = retrieve_current_functorch_interpreter()
    return custom_function_call_vmap_helper(interpreter, rule, op, *args, **kwargs)  # type: ignore[arg-type]


def needs_grad_inside(t: torch.Tensor) -> bool:
    """Whether what a wrapper of torch.func wraps requires grad, at any level."""
    while _torch.is_functorch_wrapped(t):
        if t.requires_grad:
            return True
        t = _C._functorch.get_unwrapped(t)
    return t.requires_grad


def has_tangent_inside(t: torch.Tensor) -> bool:
    """Whether forward mode looks at a tensor from outside of vmap. For a FuncTorchBatched kernel.

    Inside of vmap nobody can be asked for a tangent: what is at a level of jvp counts as dual, and
    the tensor inside of all levels is asked in a thread where vmap is not.
    """
    functorch = _C._functorch
    stack = functorch.get_interpreter_stack() or ()
    duals = {i.level() for i in stack if i.key() == functorch.TransformType.Jvp}
    while _torch.is_functorch_wrapped(t):
        if functorch.maybe_get_level(t) in duals:
            return True
        t = functorch.get_unwrapped(t)
    found: list[bool] = []
    thread = threading.Thread(target=lambda: found.append(_torch.tangent(t) is not None))
    thread.start()
    thread.join()
    return found == [True]


# ------------------------------------------------------------------------------ tensors


def is_functional(t: torch.Tensor) -> bool:
    """Whether t is a FunctionalTensor: AOTAutograd is tracing it."""
    return isinstance(t, _functional_tensor())


@functools.cache
def _functional_tensor() -> Any:
    return sys.modules["torch._subclasses.functional_tensor"].FunctionalTensor


def call_functionalized(op: OpOverload, args: Any, kwargs: Any) -> Any:
    """From a Functionalize kernel, let AOTAutograd's mode handle an op that writes.

    The kernel gets the C++ halves of FunctionalTensors, so they are made whole again.
    """
    whole = _functional_tensor()
    module = sys.modules[whole.__module__]
    with module.FunctionalTensorMode() as mode, _torch._exclusion(_FUNCTIONALIZE, _torch._NONE):

        def wrap(t: torch.Tensor) -> torch.Tensor:
            wrapped: torch.Tensor = whole(t, mode) if torch._is_functional_tensor(t) else t
            return wrapped

        args, kwargs = _torch.tree_map_only(torch.Tensor, wrap, (args, kwargs))
        out = op(*args, **kwargs)
    return _torch.tree_map_only(whole, lambda t: t.elem, out)


_FUNCTIONALIZE = _C.DispatchKeySet(DispatchKey.Functionalize)


SingleLevelFunction: Any = torch.autograd.function._SingleLevelFunction
"""An autograd.Function for one level of torch.func, under `single_level_functions`."""


@contextmanager
def single_level_functions() -> Iterator[None]:
    """Allow `SingleLevelFunction` inside: for an Autograd kernel that a transform has called."""
    functorch = _C._functorch
    before = functorch.get_single_level_autograd_function_allowed()
    functorch.set_single_level_autograd_function_allowed(True)
    try:
        yield
    finally:
        functorch.set_single_level_autograd_function_allowed(before)


def fake_like(tensors: list[torch.Tensor]) -> tuple[Any, list[torch.Tensor]]:
    """A FakeTensorMode, and fake tensors like `tensors`; symbols by their hints.

    What requires grad is no leaf, so that it may be written.
    """
    mode = torch._subclasses.FakeTensorMode()
    mode._allow_unsafe_data_ptr_access = False  # raise where a raw kernel would get a null pointer
    return mode, [_fake_like(mode, t) for t in tensors]


def _fake_like(mode: Any, t: torch.Tensor) -> torch.Tensor:
    sizes, strides = [hint(n) for n in t.size()], [hint(n) for n in t.stride()]
    offset = hint(t.storage_offset())
    extent = 1 + sum((n - 1) * s for n, s in zip(sizes, strides, strict=True)) if all(sizes) else 0
    with mode, torch.no_grad():
        fake = torch.empty(offset + extent, dtype=t.dtype, device=t.device)
        fake = fake.as_strided(sizes, strides, offset)
        fake = torch._neg_view(fake) if t.is_neg() else fake
        fake = fake.conj() if t.is_conj() else fake
        fake = fake.detach()  # the views that led here are no concern of the caller
    if t.requires_grad:
        with mode, torch.enable_grad():
            root = torch.zeros((), dtype=t.dtype, device=t.device, requires_grad=True)
            set_history(fake, root.expand(sizes))
    return fake


def take_place(t: torch.Tensor, other: torch.Tensor) -> bool:
    """Let the object t be the tensor that `other` is, metadata and all, and `other` what t was.

    ``torch.utils.swap_tensors`` does so, and refuses what has a weak reference, as a tracer takes.
    Nothing is done, and False returned, where C++ refers to one of the two besides its object.
    """
    if type(t) is not type(other) or t._use_count() != 1 or other._use_count() != 1:  # type: ignore[attr-defined]
        return False
    try:
        _C._swap_tensor_impl(t, other)
    except RuntimeError:  # C++ refers to it weakly
        return False
    return True


def hint(value: Any) -> Any:
    """A symbolic number's hint; anything else as it is."""
    if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
        return value.node.hint
    return value


def rebase_history(t: torch.Tensor, out: torch.Tensor) -> None:
    """Tell autograd that t was overwritten with `out`, whose history it gets (and tangent).

    Relies on the Autograd kernel of copy_, which asks for the grad_fn of t before it writes and
    again afterwards. A view makes its grad_fn anew only where the counter has moved in between, so
    the kernel does the last move of the counter itself: call this after the write was counted.
    """
    counted = t._version
    _torch.set_version(t, max(counted - 1, 0))
    try:
        with without_modes(), _torch.above_autograd():
            _torch.answering(_COPY, t, _COPY, t, out)
    finally:
        _torch.set_version(t, counted)


def check_inplace(t: torch.Tensor) -> None:
    """Raise native's error if t may not be written in place where autograd records.

    Call it only if that is so. Relies on the Autograd kernel of copy_, which looks before it
    redispatches, and at t only if t or the source requires grad.
    """
    source = torch.zeros((), dtype=t.dtype, device=t.device, requires_grad=True)
    with without_modes(), _torch._exclusion(_torch._ADINPLACEORVIEW, _torch._BELOW_AUTOGRAD):
        _torch.answering(_COPY, t, _COPY, t, source)


def set_history(t: torch.Tensor, out: torch.Tensor) -> None:
    """Give t, of the shape and dtype of `out`, its history (and tangent)."""
    with without_modes():
        _torch.take_history(t, out)


_COPY = aten.copy_.default
_ALIAS = aten.alias.default


def alias(t: torch.Tensor) -> torch.Tensor:
    """A view of the whole of t."""
    view: torch.Tensor = _ALIAS(t)
    return view
