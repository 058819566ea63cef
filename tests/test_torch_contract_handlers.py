"""What `track`, `tracked` and ``views="full"`` rely on in torch."""

from __future__ import annotations

import inspect
from types import MethodType
from typing import ClassVar

import torch
from handlers import NoOp, Wrapper
from torch.utils._python_dispatch import TorchDispatchMode

from viewtrack import _torch
from viewtrack._torch.rules import find_rule, rules_of

HERE = f"torch {torch.__version__}"


class _Noted(torch.Tensor):
    asked: ClassVar[list[str]] = []

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        cls.asked.append(func.__name__)
        args[0].__class__ = torch.Tensor
        return func(*args, **(kwargs or {}))


def test_a_plain_tensor_may_be_lent_a_class_and_take_it_back():
    t = torch.ones(2)
    t.__class__ = _Noted
    assert not t._is_view(), HERE
    assert _Noted.asked == ["_is_view"], HERE
    assert type(t) is torch.Tensor, HERE


def test_cpp_asks_the_instance_of_a_mode_for_its_handler():
    class Mode(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            return func(*args, **(kwargs or {}))

    seen = []

    def instead(mode, func, types, args=(), kwargs=None):
        seen.append(func)
        return func(*args, **(kwargs or {}))

    mode = Mode()
    mode.__torch_dispatch__ = MethodType(instead, mode)
    with mode:
        torch.ones(2).neg()
    assert torch.ops.aten.neg.default in seen, HERE


def test_base_class_enters_and_leaves_every_mode():
    class Mode(TorchDispatchMode):
        def __enter__(self):
            return super().__enter__()

    assert "__enter__" in vars(TorchDispatchMode), HERE
    assert "__exit__" in vars(TorchDispatchMode), HERE
    assert Mode.__exit__ is TorchDispatchMode.__exit__, HERE


def test_the_code_that_enters_and_leaves_can_be_exchanged():
    for name, arguments in (("__enter__", 1), ("__exit__", 4)):
        code = getattr(TorchDispatchMode, name).__code__
        assert not code.co_freevars, HERE
        assert code.co_argcount == arguments, HERE


def test_has_storage():
    assert _torch.has_storage(torch.ones(2)), HERE
    assert not _torch.has_storage(torch.eye(2).to_sparse()), HERE


def test_a_running_transform_is_told():
    found = []

    def f(x):
        found.append(_torch.functorch_is_active())
        return x.sum()

    torch.func.grad(f)(torch.ones(2))
    assert found == [True], HERE
    assert not _torch.functorch_is_active(), HERE


def test_dynamo_disable_of_a_handler_is_told():
    class Mode(TorchDispatchMode):
        def handler(self, func, types, args=(), kwargs=None):
            return func(*args, **(kwargs or {}))

        __torch_dispatch__ = handler

    handler = Mode.__dict__["__torch_dispatch__"]
    plain = Mode.__dict__["handler"]
    assert not _torch.is_dynamo_disable(plain), HERE
    if handler is not plain:  # from 2.13 on
        assert _torch.is_dynamo_disable(handler), HERE
        assert handler.__wrapped__ is plain, HERE


def test_fake_tensors_are_told():
    from torch._subclasses.fake_tensor import FakeTensor

    assert _torch.is_infra_class(FakeTensor), HERE
    assert not _torch.is_infra_class(torch.nn.Parameter), HERE


def test_the_native_kernel_takes_an_answer_in_place_of_a_list_of_views():
    base = torch.ones(4, requires_grad=True) * 1
    pieces = [torch.empty(0).set_(base.untyped_storage(), n, (2,), (1,)) for n in (0, 2)]
    split = torch.ops.aten.split.Tensor
    _torch.answering(split, pieces, split, base, 2)
    assert all(piece._base is base for piece in pieces), HERE
    assert pieces[1].grad_fn.name() == "SplitBackward0", HERE


def test_tracing_is_told():
    from torch.fx.experimental.proxy_tensor import make_fx

    from viewtrack._torch.dynamo import is_tracing

    found = []

    def f(x):
        found.append(is_tracing())
        return x + 1

    make_fx(f)(torch.ones(2))
    assert found == [True], HERE
    assert not is_tracing(), HERE


# ------------------------------------------------------------------------------ the stack of modes


def test_torch_puts_modes_on_the_stack_and_takes_them_off_by_two_functions(monkeypatch):
    """`handlers_above.py` exchanges their code, with these names of arguments."""
    module = torch.utils._python_dispatch
    assert _torch.stack_push is module._push_mode, HERE
    assert _torch.stack_pop is module._pop_mode, HERE
    assert list(inspect.signature(_torch.stack_push).parameters) == ["mode"], HERE
    assert list(inspect.signature(_torch.stack_pop).parameters) == ["k"], HERE
    seen = []
    monkeypatch.setattr(
        module, "_push_mode", lambda mode: (seen.append("+"), _torch.stack_push(mode))[1]
    )
    monkeypatch.setattr(
        module, "_pop_mode", lambda k=None: (seen.append("-"), _torch.stack_pop(k))[1]
    )
    with NoOp():
        seen.append("in")
        with module._disable_current_modes():
            seen.append("off")
    assert seen == ["+", "in", "-", "off", "+", "-"], HERE


def test_backward_puts_the_stack_back_that_it_began_with():
    mode = NoOp()
    found = []
    x = torch.ones(1, requires_grad=True)

    def leave(_):
        found.append(_torch.in_backward())
        mode.__exit__(None, None, None)

    x.register_hook(leave)
    assert not _torch.in_backward(), HERE
    y = x * 2
    mode.__enter__()
    y.backward()
    assert found == [True], HERE
    assert not _torch.in_backward(), HERE
    assert _torch.mode_stack_len() == 1, HERE
    _torch.pop_mode()


def test_cpp_looks_for_a_rule_and_calls_it_with_the_mode_or_the_class_first(monkeypatch):
    asked = []

    def found(op, cls):
        asked.append((op, cls))
        return rule

    def rule(*given):
        owner, _, _, args, _ = given
        asked.append(owner)
        return NotImplemented if owner is mode else args[0]

    def look(op, torch_dispatch_class, found=found):
        return found(op, torch_dispatch_class)

    x = Wrapper(torch.ones(2))
    monkeypatch.setattr(find_rule, "__defaults__", look.__defaults__)
    monkeypatch.setattr(find_rule, "__code__", look.__code__)
    with NoOp() as mode:
        x.neg()
    neg = torch.ops.aten.neg.default
    assert asked == [(neg, NoOp), mode, (neg, Wrapper), Wrapper], HERE


def test_an_op_keeps_its_rules_by_class():
    op = torch.ops.aten.neg.default
    kept = rules_of(op)
    assert NoOp not in kept, HERE
    with torch.library._scoped_library("aten", "FRAGMENT") as library:
        torch.library.register_torch_dispatch(op, NoOp, print, lib=library)
        assert kept[NoOp] is print, HERE
    assert NoOp not in kept, HERE
