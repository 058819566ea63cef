"""What the package relies on in torch: every private name, and how the dispatcher behaves.

A failure names the torch release that broke it. `test_torch_contract_views.py` has what marking a
view relies on.
"""

from __future__ import annotations

import ast
import gc
import importlib
import weakref
from pathlib import Path

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from view_makers import below_autograd, share_a_counter

import viewtrack
from viewtrack import _torch
from viewtrack._torch import kernels as _torch_kernels
from viewtrack._torch import opinfo as _torch_opinfo

HERE = f"torch {torch.__version__}"
ROOMS = sorted((Path(viewtrack.__file__).parent / "_torch").glob("*.py"))
aten = torch.ops.aten

# Names that not every release has; each is looked for before it is used.
NOT_EVERYWHERE = {
    "set_code_exec_strategy": "from 2.7 on",
    "_FrameAction": "from 2.7 on",
    "_FrameExecStrategy": "from 2.7 on",
    "skip_code": "before 2.7",
}


# Names.


def names_in(source, namespace):
    """(Dotted name, root object, attributes) of each path that starts at something of torch's."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and node.level == 0 and node.module.startswith("torch"):
            for alias in node.names:
                yield f"{node.module}.{alias.name}", node.module, [alias.name]
        if isinstance(node, ast.Attribute):
            path, inner = [node.attr], node.value
            while isinstance(inner, ast.Attribute):
                path.insert(0, inner.attr)
                inner = inner.value
            if isinstance(inner, ast.Name) and is_torch(namespace.get(inner.id)):
                yield ".".join([inner.id, *path]), namespace[inner.id], path


def is_torch(value):
    return getattr(value, "__name__", "").startswith("torch") and hasattr(value, "__dict__")


def has(value, name):
    if hasattr(value, name):
        return True
    try:
        importlib.import_module(f"{value.__name__}.{name}")
    except ImportError:
        return False
    return True


def missing(source, namespace):
    lost = []
    for dotted, root, path in names_in(source, namespace):
        value = importlib.import_module(root) if isinstance(root, str) else root
        for name in path:
            if not has(value, name):
                if name not in NOT_EVERYWHERE:
                    lost.append(dotted)
                break
            value = getattr(value, name)
            if not is_torch(value):
                break
    return lost


@pytest.mark.parametrize("room", ROOMS, ids=lambda path: path.name)
def test_every_name_exists(room):
    name = "" if room.stem == "__init__" else f".{room.stem}"
    module = importlib.import_module(f"viewtrack._torch{name}")
    source = room.read_text()
    assert list(names_in(source, vars(module))), "the probe sees nothing"
    assert missing(source, vars(module)) == [], HERE


@pytest.mark.parametrize(
    "source",
    [
        "torch._C._no_such_function()",
        "_C._no_such_function",
        "from torch._C import _no_such_name",
        "def f():\n    from torch.utils._pytree import no_such_name",
    ],
)
def test_a_name_that_is_gone_is_found(source):
    assert missing(source, vars(_torch))


@pytest.mark.parametrize("key", ["ADInplaceOrView", "Conjugate", "Negative", "Python"])
def test_dispatch_keys_by_name(key):
    assert hasattr(_torch.DispatchKey, key), HERE


# What holds in a handler.


def in_a_handler(body):
    found, trigger = [], torch.zeros(())

    class Asks(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            found.append(body())
            return func(*args, **(kwargs or {}))

    with Asks():
        trigger.sin()
    (only,) = found
    return only


@pytest.mark.parametrize("key", ["ADINPLACEORVIEW", "AUTOGRAD", "CONJUGATE", "NEGATIVE"])
def test_a_handler_excludes_what_is_above_it_and_that_is_undone(key):
    key = getattr(_torch, key)
    assert not _torch.is_excluded(key), HERE
    assert in_a_handler(lambda: _torch.is_excluded(key)), HERE
    assert not _torch.is_excluded(key), HERE


def test_asking_for_a_backends_autograd_key_always_says_no():
    assert not in_a_handler(lambda: _torch.is_excluded(_torch.DispatchKey.AutogradCPU)), HERE


def test_with_adinplaceorview_on_a_handlers_views_and_writes_are_native():
    base = torch.zeros(4)

    def body():
        with _torch.inplace_or_view():
            view = base.view(2, 2)
            view.add_(1)
        return view

    view = in_a_handler(body)
    assert view._base is base, HERE
    assert base._version == 1, HERE


def test_detaching_under_the_guard_keeps_the_counter_and_drops_the_metadata():
    base = torch.zeros(4)

    def body():
        with _torch.inplace_or_view():
            return base.view(2, 2).detach()

    view = in_a_handler(body)
    assert not view._is_view(), HERE
    assert share_a_counter(view, base), HERE


def test_a_kernel_above_refuses_a_tensor_with_metadata():
    base = torch.zeros(4)

    class Marks(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            with _torch.inplace_or_view():
                return func(*args, **(kwargs or {}))

    with Marks(), pytest.raises(RuntimeError, match="autograd metadata"):
        base.view(2, 2)


def test_a_kernel_above_counts_a_write_after_the_handler():
    x, seen = torch.zeros(1), []

    class Looks(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            seen.append(args[0]._version)
            return out

    with Looks():
        x.add_(1)
    assert (seen, x._version) == ([0], 1), HERE


def test_a_composite_op_comes_whole_to_a_mode_from_a_handler_only():
    ops = []

    class Below(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            ops.append(func)
            return func(*args, **(kwargs or {}))

    x = torch.zeros(2, 2)
    with Below():
        torch.flatten(x)
        assert aten.flatten.using_ints not in ops, HERE
        in_a_handler(lambda: torch.flatten(x))
    assert aten.flatten.using_ints in ops, HERE


def test_a_mode_that_declines_hands_over_to_the_subclass_with_the_mode_still_on():
    depth, answer = [], torch.zeros(1)

    class Inner(torch.Tensor):
        @staticmethod
        def __new__(cls):
            return torch.Tensor._make_wrapper_subclass(cls, (1,))

        @classmethod
        def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
            depth.append(_torch.mode_stack_len())
            return answer

    class Declines(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            return NotImplemented

    inner = Inner()
    with Declines():
        inner.sin()
    assert depth == [1], HERE


def test_cpp_asks_a_handler_for_detach_directly_without_excluding_anything():
    """A shallow copy of a wrapper (`.data`) is such a call."""
    seen = []

    class Inner(torch.Tensor):
        @staticmethod
        def __new__(cls):
            return torch.Tensor._make_wrapper_subclass(cls, (1,))

        @classmethod
        def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
            seen.append((func, _torch.is_excluded(_torch.ADINPLACEORVIEW)))
            return Inner()

    _ = Inner().data
    assert seen == [(aten.detach.default, False)], HERE


def test_above_autograd_a_handlers_ops_are_recorded():
    x = torch.ones(1, requires_grad=True)

    def body():
        with _torch.above_autograd():
            return x * 2

    assert in_a_handler(body).grad_fn is not None, HERE
    assert in_a_handler(lambda: x * 2).grad_fn is None, HERE


def test_conj_bits_are_resolved_in_a_handler_when_the_key_is_on():
    x = torch.tensor([1j]).conj()

    def body():
        _torch.set_excluded(_torch.CONJUGATE, False)
        try:
            return x * 1
        finally:
            _torch.set_excluded(_torch.CONJUGATE, True)

    assert in_a_handler(body).resolve_conj().tolist() == [-1j], HERE


# The stack of modes.


def test_push_and_pop():
    class Mode(_torch.QuietMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            return func(*args, **(kwargs or {}))

    mode = Mode()
    _torch.push_mode(mode)
    assert _torch.mode_stack_len() == 1, HERE
    assert _torch.pop_mode() is mode, HERE
    assert _torch.mode_stack_len() == 0, HERE


def test_in_a_handler_its_own_mode_does_not_count():
    assert in_a_handler(_torch.mode_stack_len) == 0, HERE


def test_a_quiet_modes_handler_is_not_wrapped():
    class Mode(_torch.QuietMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            return func(*args, **(kwargs or {}))

    assert Mode.__torch_dispatch__.__code__.co_filename == __file__, HERE


# Ops and their kernels.


def test_the_builtin_in_an_overload_is_one_and_the_same():
    assert aten.add.Tensor._op is aten.add.Tensor._op, HERE
    assert hash(aten.add.Tensor._op) != hash(aten.mul.Tensor._op), HERE
    assert aten.add.Tensor._op(torch.ones(1), torch.ones(1)).item() == 2, HERE


@pytest.mark.parametrize(
    ("name", "native", "composite", "autograd", "of_others"),
    [
        ("aten::add_.Tensor", True, False, True, False),
        ("aten::mm", False, False, True, False),
        ("aten::view", True, False, True, False),
        ("aten::flatten.using_ints", False, True, False, False),
        ("aten::matmul.out", True, True, False, False),
        ("aten::_foreach_add_.Scalar", False, False, True, True),
        ("aten::linalg_pinv.atol_rtol_tensor", False, False, True, True),
        ("aten::no_such_op", False, False, False, False),
        ("prim::device", False, False, False, False),
    ],
)
def test_what_kernels_an_op_has(name, native, composite, autograd, of_others):
    assert _torch_kernels.has_native_kernel(name) is native, HERE
    assert _torch_kernels.has_composite_kernel(name) is composite, HERE
    if not composite:
        assert _torch_kernels.has_autograd_kernel(name) is autograd, HERE
    assert _torch_kernels.is_made_of_other_ops(name) is of_others, HERE


def test_the_composite_kernel_runs_past_the_kernel_of_the_op_itself():
    out = torch.zeros(5)
    _torch_kernels.composite_kernel(aten.matmul.out)(torch.ones(10), torch.ones(10, 5), out=out)
    assert out.tolist() == [10.0] * 5, HERE
    assert out._version == 2, HERE


def test_ops_of_a_library_fall_through_autograd_and_are_recorded():
    lib = torch.library.Library("vt_contract", "DEF")
    lib.define("twice(Tensor x) -> Tensor")
    lib.impl("twice", lambda x: x * 2, "CompositeExplicitAutograd")
    out = torch.ops.vt_contract.twice(torch.ones(1, requires_grad=True))
    assert out.grad_fn.name() == "MulBackward0", HERE
    lib._destroy()  # torch 2.9 compiles nothing by aot_eager after a library has died by itself


def test_the_op_database_is_there():
    names = {op.name for op in _torch_opinfo.op_database()}
    assert {"add", "_foreach_add", "linalg.pinv"} <= names, HERE


# Storages and counters.


def test_a_storage_has_one_python_object_for_as_long_as_it_lives():
    x = torch.zeros(3)
    storage = weakref.ref(x.untyped_storage())
    gc.collect()
    assert storage() is not None, HERE
    assert x.view(3).untyped_storage() is storage(), HERE
    assert x.detach().untyped_storage()._cdata == x.untyped_storage()._cdata, HERE
    died = []
    weakref.finalize(x.untyped_storage(), died.append, True)
    del x
    assert storage() is None, HERE
    assert died == [True], HERE


def test_resize_keeps_the_storage_and_set_exchanges_it():
    x = torch.zeros(3)
    address = x.untyped_storage()._cdata
    x.resize_(100)
    x.untyped_storage().resize_(0)
    assert x.untyped_storage()._cdata == address, HERE
    x.set_(torch.zeros(2))
    assert x.untyped_storage()._cdata != address, HERE


def test_a_counter_can_be_overwritten_for_all_that_share_it():
    x = torch.zeros(3)
    view = x.view(3)
    _torch.set_version(view, 41)
    assert (x._version, view._version) == (41, 41), HERE
    x.add_(1)
    assert view._version == 42, HERE


def test_an_inference_tensor_has_no_counter():
    with torch.inference_mode():
        x = torch.zeros(1)
    with pytest.raises(RuntimeError, match="version counter"):
        _ = x._version


def test_below_autograd_is_told():
    assert not _torch.below_autograd(), HERE
    assert below_autograd(_torch.below_autograd), HERE
