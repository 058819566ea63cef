"""`tracked`: what a handler issues is tracked natively, and what it returns is taken."""

from __future__ import annotations

import contextlib
import inspect

import pytest
import torch
from handlers import NoOp
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

import viewtrack as vt

aten = torch.ops.aten


def _class_mode(body):
    """A tracked mode class whose handler is `body(mode, func, args, kwargs)`."""

    @vt.tracked
    class Mode(TorchDispatchMode):
        def __init__(self):
            super().__init__()
            self.kept = []

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            return body(self, func, args, kwargs or {})

    return Mode()


def _handler_mode(body):
    """The same by a decorated handler."""

    class Mode(TorchDispatchMode):
        def __init__(self):
            super().__init__()
            self.kept = []

        @vt.tracked
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            return body(self, func, args, kwargs or {})

    return Mode()


def _bare_mode(body):
    """The same by a handler of another name, that takes func first."""

    class Mode(TorchDispatchMode):
        def __init__(self):
            super().__init__()
            self.kept = []

            @vt.tracked
            def handle(func, types, args, kwargs):
                return body(self, func, args, kwargs or {})

            self.handle = handle

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            return self.handle(func, types, args, kwargs)

    return Mode()


@pytest.fixture(params=[_class_mode, _handler_mode, _bare_mode])
def make(request):
    return request.param


def _on(op, then):
    def body(mode, func, args, kwargs):
        out = func(*args, **kwargs)
        if func is op:
            mode.kept.append(then(out, *args))
        return out

    return body


@pytest.mark.parametrize("requires_grad", [False, True])
def test_views_in_it_are_real(make, requires_grad):
    mode = make(_on(aten.mul.Tensor, lambda out, *_: (out[1:], out[1:].view(-1), out.split(2)[0])))
    x = torch.ones(4, requires_grad=requires_grad)
    with mode:
        y = x * 2
    for kept in mode.kept[0]:
        assert kept._is_view()
        assert kept._base is y
        before = y._version
        with torch.no_grad():
            kept.add_(1)
        assert y._version == before + 1
    assert y.requires_grad is requires_grad
    if requires_grad:
        y.sum().backward()
        assert x.grad.tolist() == [2, 2, 2, 2]


def test_writes_in_it_are_counted(make):
    mode = make(_on(aten.exp.default, lambda out, *_: (out.add_(1), out[0].zero_(), out._version)))
    with mode:
        y = torch.zeros(3).exp()
    assert mode.kept[0][2] == 2
    assert y._version == 2
    assert y.tolist() == [0, 2, 2]


WRITES = [
    ("add_", lambda x: x.add_(1)),
    ("out=", lambda x: torch.add(x.detach(), 1, out=x)),
    ("view", lambda x: x[1:].mul_(2)),
    ("by name", lambda x: torch.ops.aten.add_.Tensor(self=x, other=torch.ones(3))),
    ("copy_", lambda x: x.copy_(torch.ones(3))),
    ("index_put_", lambda x: x.__setitem__(0, 3.0)),
    ("foreach", lambda x: torch._foreach_add_([x], 1.0)),
    ("resize_", lambda x: x.resize_(2)),
    ("uniform_", lambda x: x.uniform_()),
]


@pytest.mark.parametrize(("name", "write"), WRITES, ids=[name for name, _ in WRITES])
@pytest.mark.parametrize("under", ["nothing", "track", "no-op mode", "tracked"])
@pytest.mark.parametrize("over", ["nothing", "no-op mode", "tracked"])
def test_write_that_is_passed_on_counts_once(make, name, write, under, over):
    x = torch.zeros(3)
    write(x)
    stock = x._version
    passing = lambda mode, func, args, kwargs: func(*args, **kwargs)  # noqa: E731
    places = {
        "nothing": torch.enable_grad,
        "track": vt.track,
        "no-op mode": NoOp,
        "tracked": lambda: make(passing),
    }
    if name == "foreach" and under == "no-op mode":
        stock = 0  # stock torch loses these under any mode, and the lowest one decides
    x = torch.zeros(3)
    with places[under](), make(passing), places[over]():
        write(x)
    assert x._version == stock


@pytest.mark.parametrize("tracker", [vt.track, torch.enable_grad])
@pytest.mark.parametrize("between", [NoOp, torch.enable_grad])
def test_write_that_it_issues_itself_counts_too(make, tracker, between):
    def body(mode, func, args, kwargs):
        if func is aten.add_.Tensor:
            args[0].mul_(2)
        return func(*args, **kwargs)

    x = torch.ones(3)
    with tracker(), between(), make(body):
        x.add_(1)
    assert x._version == 2
    assert x.tolist() == [3, 3, 3]


@pytest.mark.parametrize("tracker", [vt.track, torch.enable_grad])
def test_write_by_another_op_counts_once(make, tracker):
    def body(mode, func, args, kwargs):
        if func is aten.add_.Tensor:
            return args[0].copy_(args[0] + args[1])
        return func(*args, **kwargs)

    x = torch.ones(3)
    with tracker(), make(body):
        x.add_(1)
    assert (x._version, x.tolist()) == (1, [2, 2, 2])


def test_write_that_does_not_happen_is_counted_as_on_stock(make):
    x = torch.ones(3)
    with make(lambda mode, func, args, kwargs: args[0]):
        x.add_(1)
    assert (x._version, x.tolist()) == (1, [1, 1, 1])


def test_write_that_an_untracked_handler_issues_is_counted(make):
    class Writer(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            if func is aten.exp.default:
                out.add_(1)
            return out

    with make(lambda mode, func, args, kwargs: func(*args, **kwargs)), Writer():
        assert torch.zeros(2).exp()._version == 1


def test_gradients_of_writes_are_those_of_stock(make):
    def run():
        x = torch.arange(1.0, 5).requires_grad_()
        y = x * 3
        y[1:].mul_(y[0].detach().clone())
        y.sin_()
        y.sum().backward()
        return y._version, x.grad

    want_version, want = run()
    with make(lambda mode, func, args, kwargs: func(*args, **kwargs)):
        version, grad = run()
    assert version == want_version
    torch.testing.assert_close(grad, want)


@pytest.mark.parametrize("requires_grad", [False, True])
@pytest.mark.parametrize(
    "call",
    [
        lambda x: x.view(4),
        lambda x: x.split(2),
        lambda x: x.unbind(),
        lambda x: x.t(),
        lambda x: x.detach(),
        lambda x: x[0].unsqueeze(0),
        lambda x: torch._foreach_neg([x]),
    ],
)
def test_views_that_it_returns_are_marked_by_the_kernel_above(make, call, requires_grad):
    x = torch.ones(2, 2, requires_grad=requires_grad)
    passing = lambda mode, func, args, kwargs: func(*args, **kwargs)  # noqa: E731
    with make(passing):
        got = call(x)
    want = call(x)
    single = isinstance(got, torch.Tensor)
    for t, stock in [(got, want)] if single else zip(got, want, strict=True):
        assert t._is_view() == stock._is_view()
        assert t._base is stock._base
        assert type(t.grad_fn) is type(stock.grad_fn)
        assert t._version == stock._version


@pytest.mark.parametrize(
    "answer",
    [
        pytest.param(lambda x, kept: kept, id="kept"),
        pytest.param(lambda x, kept: x, id="argument"),
        pytest.param(lambda x, kept: x[0:], id="another view"),
        pytest.param(lambda x, kept: x.detach().requires_grad_(), id="leaf"),
    ],
)
def test_whatever_a_view_op_is_answered_with_is_taken(make, answer):
    x = torch.ones(4, requires_grad=True)
    kept = (x * 1)[0:]

    def body(mode, func, args, kwargs):
        return answer(args[0], kept) if func is aten.view.default else func(*args, **kwargs)

    with make(body):
        y = x.view(4)
    assert y._base is x
    assert y.grad_fn.name() == "ViewBackward0"
    y.sum().backward()
    assert x.grad.tolist() == [1, 1, 1, 1]


def test_view_as_the_result_of_a_functional_op_is_no_view(make):
    def body(mode, func, args, kwargs):
        out = func(*args, **kwargs)
        return out[1:] if func is aten.exp.default else out

    x = torch.zeros(3, requires_grad=True)
    with make(body):
        y = x.exp()
    assert not y._is_view()
    assert y.shape == (2,)


@vt.tracked
class TrackedWrapper(torch.Tensor):
    """Keeps, of each result, a view of it."""

    @staticmethod
    def __new__(cls, inner, part=None):
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)

    def __init__(self, inner, part=None):
        self.inner = inner
        self.part = part

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        plain, named = tree_map_only(cls, lambda t: t.inner, (args, kwargs or {}))
        out = func(*plain, **named)
        if func._schema.is_mutable:
            return args[0]
        return tree_map_only(torch.Tensor, lambda t: cls(t, t[0:1]), out)


def test_wrapper_class():
    w = TrackedWrapper(torch.zeros(3))
    y = w + 1
    assert y.part._base is y.inner
    y.part.mul_(2)
    assert y.inner._version == 1
    v = y.view(3, 1)
    assert v._base is y
    assert v.inner._base is y.inner
    y.add_(1)
    assert (y._version, y.inner._version) == (1, 2)
    assert y.detach().inner.tolist() == [3, 2, 2]


@pytest.mark.parametrize(
    "order",
    [
        lambda handler: classmethod(vt.tracked(handler)),
        lambda handler: vt.tracked(classmethod(handler)),
    ],
)
def test_classmethod_may_be_decorated_either_way(order):
    kept = []

    def body(cls, func, types, args=(), kwargs=None):
        with torch._C.DisableTorchFunctionSubclass(), torch._C._DisableTorchDispatch():
            out = func(*args, **(kwargs or {}))
            kept.append(out.view(-1)._is_view())
        return out

    class Sub(torch.Tensor):
        __torch_dispatch__ = order(body)

    torch.ones(2).as_subclass(Sub) + 1
    assert kept == [True]


def test_key_is_as_it_was_after_an_exception(make):
    def body(mode, func, args, kwargs):
        if func is aten.exp.default:
            raise KeyError("planted")
        if args and isinstance(args[0], torch.Tensor):
            mode.kept.append(args[0][0:]._is_view())
        return func(*args, **kwargs)

    with make(body) as mode:
        with pytest.raises(KeyError):
            torch.ones(2).exp()
        x = torch.ones(2)
        x.neg()
        assert x.view(2, 1)._base is x
    assert mode.kept[-1] is True


def test_inherited_handler():
    class Base(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            self.kept = out.view(-1)
            return out

    @vt.tracked
    class Mode(Base):
        pass

    for cls, is_view in ((Mode, True), (Base, False)):
        with cls() as mode:
            torch.ones(2) + 1
        assert mode.kept._is_view() is is_view


def test_twice_is_once():
    once = _class_mode(lambda mode, func, args, kwargs: func(*args, **kwargs))
    vt.tracked(type(once))
    x = torch.ones(2)
    with once:
        x.add_(1)
        assert x.view(2, 1)._base is x
    assert x._version == 1


@pytest.mark.parametrize(
    ("target", "text"),
    [
        (3, "expected a class"),
        (torch.Tensor, "`Tensor` has no `__torch_dispatch__`"),
        (torch.nn.Parameter, "`Parameter` has no `__torch_dispatch__`"),
        (TorchDispatchMode, "`TorchDispatchMode` has no `__torch_dispatch__`"),
        (type("Bare", (TorchDispatchMode,), {}), "`Bare` has no `__torch_dispatch__`"),
        (int, "`int`"),
        (lambda func: func(), r"`.*<lambda>` takes `\(func\)`, .* parameters `\(func, types"),
        (lambda self, func: func(), r"takes `\(self, func\)`, .* parameters `\(self, func, types"),
        (staticmethod(lambda func: func()), r"takes `\(func\)`"),
        (
            type("Short", (TorchDispatchMode,), {"__torch_dispatch__": lambda self, func: func()}),
            r"takes `\(self, func\)`",
        ),
    ],
)
def test_refuses_what_has_no_handler(target, text):
    with pytest.raises(TypeError, match=text):
        vt.tracked(target)


def test_torchs_own_classes_are_left_as_they_are():
    before = [
        inspect.getattr_static(c, "__torch_dispatch__") for c in (TorchDispatchMode, torch.Tensor)
    ]
    for cls in (TorchDispatchMode, torch.Tensor):
        with pytest.raises(TypeError):
            vt.tracked(cls)
    after = [
        inspect.getattr_static(c, "__torch_dispatch__") for c in (TorchDispatchMode, torch.Tensor)
    ]
    assert after == before


@pytest.mark.parametrize(
    "handler",
    [
        lambda *args: args[1](*args[3], **(args[4] or {})),
        lambda mode, *rest: rest[0](*rest[2], **(rest[3] or {})),
        lambda mode, func, types, *rest: func(*rest[0], **(rest[1] or {})),
    ],
)
def test_handler_of_a_class_may_take_what_comes(handler):
    mode = vt.tracked(type("Mode", (TorchDispatchMode,), {"__torch_dispatch__": handler}))
    x = torch.ones(2, 2)
    with mode():
        x.add_(1)
        assert x.view(4)._base is x
    assert x._version == 1


def test_bare_handler_may_take_what_comes():
    @vt.tracked
    def handler(*args):
        return args[0](*args[2], **(args[3] or {}))

    class Mode(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            return handler(func, types, args, kwargs)

    x = torch.ones(2)
    with Mode():
        x.add_(1)
    assert x._version == 1


@pytest.mark.parametrize("around", [contextlib.nullcontext, vt.track])
def test_what_it_writes_beside_an_op_that_is_recorded_counts_once(around):
    lib = torch.library.Library("vt_handler", "FRAGMENT")
    lib.define("head(Tensor(a) x) -> Tensor(a)")
    lib.impl("head", lambda x: x[:1], "CPU")
    other = torch.zeros(2)

    def then(func, args, kwargs):
        if func is torch.ops.vt_handler.head.default:
            other.add_(1)
        return func(*args, **kwargs)

    x = torch.ones(2, requires_grad=True) * 1
    with around(), _class_mode(lambda mode, *call: then(*call)):
        torch.ops.vt_handler.head(x).mul_(3)
    assert (other._version, x._version, x.grad_fn.name()) == (1, 1, "torch::autograd::CopySlices")
    lib._destroy()


def test_in_a_higher_order_op_and_in_compiled_code():
    mode = _class_mode(lambda mode, func, args, kwargs: func(*args, **kwargs))
    with mode:
        out = torch.compile(lambda x: x.view(-1).sin(), backend="eager")(torch.ones(2, 2))
    assert out.shape == (4,)
