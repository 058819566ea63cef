"""The one room that touches private torch.

Every private name is reached here and nowhere else, and `tests/test_torch_contract.py` checks each
name and the behaviour it is used for. Unless a function says otherwise it was tried on torch 2.6.0,
2.9.1, 2.13.0 and 2.14.1.

Some words on the mechanism that the whole library rests on. The C++ function ``as_view`` has no
Python face, but every ATen view op has an ADInplaceOrView kernel that redispatches, and then calls
``as_view(base, result)`` on whatever came back. So a dispatch mode that answers the redispatch with
a tensor of our choice makes the native kernel mark *that* tensor, in place (`answering`).
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch._ops import HigherOrderOperator, OpOverload
from torch.utils import _python_dispatch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map, tree_map_only

from .quiet_mode import QuietMode, is_dynamo_disable

__all__ = [
    "CreationMeta",
    "DispatchKey",
    "HigherOrderOperator",
    "OpOverload",
    "QuietMode",
    "TensorBase",
    "TorchDispatchMode",
    "is_dynamo_disable",
    "tree_leaves",
    "tree_map",
    "tree_map_only",
]

_C: Any = torch._C  # its stubs lack names, and differ over versions
_autograd: Any = torch._C._autograd
DispatchKey = torch._C.DispatchKey
TensorBase = torch._C.TensorBase
aten = torch.ops.aten

CreationMeta: Any = _autograd.CreationMeta
"""Why a view may not be written in place; see NOTE [ View + Inplace detection ] in variable.h."""

ADINPLACEORVIEW = DispatchKey.ADInplaceOrView
AUTOGRAD = DispatchKey.AutogradFunctionality
CONJUGATE = DispatchKey.Conjugate
NEGATIVE = DispatchKey.Negative

# ------------------------------------------------------------------------------ dispatch keys

set_excluded: Callable[[Any, bool], None] = _C._dispatch_tls_set_dispatch_key_excluded
"""Exclude a dispatch key in this thread, or stop excluding it."""

is_excluded: Callable[[Any], bool] = _C._dispatch_tls_is_dispatch_key_excluded
"""Whether this thread excludes a dispatch key."""

# A key above Autograd that nothing in torch uses, so tensors that have it can have kernels of ours.
CARRIER = "TESTING_ONLY_GenericWrapper"


def key_set(*names: str) -> Any:
    """A DispatchKeySet of the keys so named."""
    keys = (_C.DispatchKeySet(_C._parse_dispatch_key(name)) for name in names)
    return functools.reduce(operator.or_, keys)


_AUTOGRAD = key_set("AutogradFunctionality", "AutogradOther", "AutogradNestedTensor")
_ADINPLACEORVIEW = key_set("ADInplaceOrView")
_NONE = _AUTOGRAD - _AUTOGRAD
# What a Python key handler, or an Autograd kernel, excludes and a call from user code does not.
_BELOW_AUTOGRAD = key_set(
    *("AutogradFunctionality", "AutogradOther", "AutogradNestedTensor", "ADInplaceOrView"),
    *("Conjugate", "Negative", "ZeroTensor", "PythonTLSSnapshot", CARRIER),
)


# Below Python, since the dispatcher excludes all keys above it before it calls a handler.
_HANDLER_MARK = _C._parse_dispatch_key("FPGA")


@contextmanager
def marked_as_handler() -> Iterator[None]:
    """Mark this thread's dispatch state as that of a handler, by a key that nothing in torch uses.

    ``torch.overrides.enable_reentrant_dispatch`` restores the state from before the handler, and
    the mark goes with it: that is how `in_reentrant_dispatch` tells.
    """
    was = is_excluded(_HANDLER_MARK)
    set_excluded(_HANDLER_MARK, True)
    try:
        yield
    finally:
        set_excluded(_HANDLER_MARK, was)


def in_reentrant_dispatch() -> bool:
    """Whether a handler that `marked_as_handler` ran for has gone above autograd again."""
    return not is_excluded(_HANDLER_MARK)


def in_backward() -> bool:
    """Whether a backward is running in this thread, at whose end its stack of modes is restored."""
    return bool(_C._current_graph_task_id() != -1)


def below_autograd() -> bool:
    """Whether Autograd kernels are out of reach here.

    AutogradFunctionality must be asked for: AutogradCPU and its like always answer no.
    """
    return is_excluded(AUTOGRAD)


@contextmanager
def inplace_or_view() -> Iterator[None]:
    """Let ADInplaceOrView kernels run inside, also below autograd."""
    was = is_excluded(ADINPLACEORVIEW)
    set_excluded(ADINPLACEORVIEW, False)
    try:
        yield
    finally:
        set_excluded(ADINPLACEORVIEW, was)


def only_inplace_or_view() -> AbstractContextManager[None]:
    """Let ADInplaceOrView kernels run inside, and no Autograd kernel."""
    return _exclusion(_AUTOGRAD | key_set(CARRIER), _ADINPLACEORVIEW)


def above_autograd() -> AbstractContextManager[None]:
    """Dispatch inside as user code does, whatever handler or kernel we are called from."""
    return _exclusion(_NONE, _BELOW_AUTOGRAD)


def recording_only() -> AbstractContextManager[None]:
    """Dispatch inside as user code does, but mark no view: for what is one already."""
    return _exclusion(_ADINPLACEORVIEW, _BELOW_AUTOGRAD)


def _exclusion(add: Any, remove: Any) -> AbstractContextManager[None]:
    """Change what is excluded by one guard; one call for each key would take six times as long."""
    exclude = (_C._dispatch_tls_local_exclude_set() - remove) | add
    guard: AbstractContextManager[None] = _C._ForceDispatchKeyGuard(
        _C._dispatch_tls_local_include_set(), exclude
    )
    return guard


# ------------------------------------------------------------------------------ dispatch modes

push_mode: Callable[[Any], None] = _C._push_on_torch_dispatch_stack
"""Push a mode without the bookkeeping that `TorchDispatchMode.__enter__` does for dynamo.

The caller must hold a reference to the mode until it is popped: on 2.6 and 2.9 the stack frees a
mode that only it refers to while popping it, and the process dies.
"""

_pop: Callable[[Any], Any] = _C._pop_torch_dispatch_stack


def pop_mode() -> Any:
    """Pop what `push_mode` pushed."""
    return _pop(None)


stack_push: Callable[[Any], None] = _python_dispatch._push_mode
"""What torch itself puts a mode on the stack by, where it enters one and where it puts one back."""

stack_pop: Callable[[Any], Any] = _python_dispatch._pop_mode
"""What torch itself takes a mode off the stack by."""

mode_stack_len: Callable[[], int] = _C._len_torch_dispatch_stack
"""How many user modes are on this thread's stack; in a handler its own mode does not count."""


class _Answer(QuietMode):
    """Answers one op on `base`, and the `detach` that its kernel may ask of the answer, with `t`.

    On `base` alone: where base is a stale view, the kernel first has native replay it from its
    root, and that replay may use the very op.
    """

    def __init__(self, op: OpOverload, base: torch.Tensor, t: torch.Tensor) -> None:
        # No super().__init__(): it makes state that only __enter__ needs, and we never enter.
        self.op: OpOverload | None = op
        self.base = base
        self.t = t

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is self.op and args[0] is self.base:
            self.op = None  # once: what a kernel computes besides (tangents) must really run
            return self.t
        if func is _DETACH and args[0] is self.t:
            return self.t  # TensorImpl::shallow_copy_and_detach asks the mode stack first
        return func(*args, **(kwargs or {}))


_ALIAS = aten.alias.default
_AS_STRIDED = aten.as_strided.default
_DETACH = aten.detach.default
_MAKE_DUAL = aten._make_dual.default


def answering(op: OpOverload, t: torch.Tensor, call: Callable[..., Any], *args: Any) -> Any:
    """Run ``call(*args)``, whose kernel for `op` on the first of `args` is handed `t`."""
    mode = _Answer(op, args[0], t)
    push_mode(mode)
    try:
        return call(*args)
    finally:
        pop_mode()


def as_view_strided(t: torch.Tensor, base: torch.Tensor) -> None:
    """Native ``as_view(base, t)`` by as_strided of t's geometry, with AsStridedBackward0."""
    mode = _Answer(_AS_STRIDED, base, t)
    push_mode(mode)
    try:
        offset = t.storage_offset()
        if offset == base.storage_offset():
            _as_strided(base, t.size(), t.stride())  # the default, and 0.4 microseconds less
        else:
            _as_strided(base, t.size(), t.stride(), offset)
    finally:
        _pop(None)


_as_strided = TensorBase.as_strided


def as_view_version_only(t: torch.Tensor, base: torch.Tensor) -> None:
    """Native ``as_view(base, t, false, false)``: t gets base's counter, and no metadata.

    Relies on the ADInplaceOrView kernel of detach. Drops any autograd metadata of t.
    """
    with inplace_or_view():
        answering(_DETACH, t, TensorBase.detach, base)


def set_tangent(t: torch.Tensor, tangent: torch.Tensor) -> None:
    """Make t itself dual at the current forward-AD level, with this very tangent.

    Relies on the Autograd kernel of _make_dual; its ADInplaceOrView kernel must not run, since t
    may carry metadata.
    """
    with recording_only():
        answering(_MAKE_DUAL, t, _MAKE_DUAL, t, tangent, 0)


def take_history(t: torch.Tensor, out: torch.Tensor) -> None:
    """Give the view t the gradient history (and tangent) of an alias of `out`.

    Relies on the Autograd kernel of alias, whose ``set_history`` keeps t's view metadata and counts
    the grad_fn as fresh; its ADInplaceOrView kernel must not run, since t is a view already.
    """
    with recording_only():
        answering(_ALIAS, t, _ALIAS, out)


no_torch_function: Callable[[], AbstractContextManager[None]] = _C.DisableTorchFunction
"""Switch off __torch_function__ of modes and subclasses inside."""

torch_function_modes: Callable[[], int] = _C._len_torch_function_stack
"""How many __torch_function__ modes are on this thread's stack."""


# ------------------------------------------------------------------------------ views


def creation_meta(t: torch.Tensor) -> Any:
    """The CreationMeta of a differentiable view; DEFAULT for any other tensor."""
    return canonical(_autograd._get_creation_meta(t)) if t._is_view() else CreationMeta.DEFAULT


def canonical(value: Any) -> Any:
    """The member of CreationMeta equal to `value`, to compare by identity.

    C++ hands out a new Python object each time.
    """
    return _MEMBERS[int(value)]


_MEMBERS = {int(member): member for member in CreationMeta.__members__.values()}


def set_creation_meta(t: torch.Tensor, value: Any) -> None:
    """Overwrite the CreationMeta of a differentiable view."""
    _autograd._set_creation_meta(t, value)


def set_version(t: torch.Tensor, value: int) -> None:
    """Overwrite the number in t's version counter, which all that share it then see."""
    set_versions((t,), (value,))


set_versions: Callable[[Sequence[torch.Tensor], Sequence[int]], None]
"""The same for several. The signature takes sequences from 2.7 on, and one tensor before."""

if "arg0: torch.Tensor," not in (_autograd._unsafe_set_version_counter.__doc__ or ""):
    set_versions = _autograd._unsafe_set_version_counter
else:

    def set_versions(tensors: Sequence[torch.Tensor], values: Sequence[int]) -> None:
        for t, value in zip(tensors, values, strict=True):
            _autograd._unsafe_set_version_counter(t, value)


is_alias_of: Callable[[torch.Tensor, torch.Tensor], bool] = _C._is_alias_of
"""Whether two tensors have one storage. Raises for tensors without storage (sparse)."""


has_storage: Callable[[torch.Tensor], bool] = _C._has_storage
"""Whether a tensor has a storage: a sparse one has not, nor has one of a lazy device."""


def set_storage_of(t: torch.Tensor, base: torch.Tensor) -> None:
    """Point t's storage at base's; sizes, strides and offset stay. Wrapper subclasses included."""
    torch._functionalize_unsafe_set(t, base)


def is_functorch_wrapped(t: torch.Tensor) -> bool:
    """Whether t is a wrapper of a torch.func transform."""
    # The engine's is_grads_batched has a batched tensor of its own.
    functorch = _C._functorch
    return bool(functorch.is_functorch_wrapped_tensor(t) or functorch.is_legacy_batchedtensor(t))


def functorch_is_active() -> bool:
    """Whether a torch.func transform is running."""
    return _C._functorch.peek_interpreter_stack() is not None


def has_python_key(t: torch.Tensor) -> bool:
    """Whether t's ops go to a __torch_dispatch__ of its class: a wrapper has no memory, often."""
    return bool(_C._dispatch_keys(t).has(DispatchKey.Python))


def is_infra_class(cls: type) -> bool:
    """Whether a tensor class is torch's own machinery: fake and functional tensors."""
    return cls.__module__.startswith("torch._subclasses")


def neg_view(t: torch.Tensor) -> torch.Tensor:
    """The lazily negated view of t."""
    return torch._neg_view(t)


def fw_primal(t: torch.Tensor) -> torch.Tensor:
    """A view of t for backward mode only (native: unpack_dual)."""
    view: torch.Tensor = aten._fw_primal.default(t, 0)
    return view


def coo_parts(t: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Indices and values of a sparse COO tensor, coalesced or not, as they lie in it."""
    return t._indices(), t._values()


def forward_ad_level() -> int:
    """The current forward-AD level, -1 outside `dual_level`."""
    return int(torch.autograd.forward_ad._current_level)


def tangent(t: torch.Tensor) -> torch.Tensor | None:
    """The tangent of t at the current forward-AD level; None without one, or outside a level."""
    if forward_ad_level() < 0:
        return None
    with above_autograd(), torch.no_grad():
        dual = torch.autograd.forward_ad.unpack_dual(t)
        found: torch.Tensor | None = dual.tangent
        return found
