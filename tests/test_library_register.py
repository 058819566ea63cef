"""Kernels for ops that others defined: by `Library.define`, by `custom_op`, by other keys."""

import ctypes
import gc
import weakref

import pytest
import torch
from library_ops import CONTEXTS, Issue, memset
from torch.utils._python_dispatch import TorchDispatchMode

import viewtrack as vt
from viewtrack import AliasingError, ViewTrackError, library


class Heard(TorchDispatchMode):
    def __init__(self, seen):
        super().__init__()
        self.seen = seen

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen.append(func)
        return func(*args, **(kwargs or {}))


contexts = pytest.mark.parametrize("context", CONTEXTS.values(), ids=CONTEXTS)
_foreign = torch.library.Library("vtforeign", "DEF")


def _zero_raw_(x):
    memset(x)
    return x


def _fill_into(x, out):
    ctypes.memmove(out.data_ptr(), x.data_ptr(), out.numel() * out.element_size())
    return out


_foreign.define("head(Tensor(a) x, int n) -> Tensor(a)")
_foreign.define("hidden_head(Tensor(a) x, int n) -> Tensor(a)")
_foreign.define("zero_raw_(Tensor(a!) x) -> Tensor(a!)")
_foreign.define("fill_into(Tensor x, Tensor(a!) out) -> Tensor(a!)")
_foreign.define("composite(Tensor(a) x) -> Tensor(a)")
_foreign.define("two.a(Tensor(a) x) -> Tensor(a)")
_foreign.define("two.b(Tensor(a) x, int n) -> Tensor(a)")
_foreign.impl("head", lambda x, n: x[:n], "CPU")
_foreign.impl("hidden_head", lambda x, n: x.detach()[:n], "CPU")
_foreign.impl("zero_raw_", _zero_raw_, "CPU")
_foreign.impl("fill_into", _fill_into, "CPU")
_foreign.impl("fill_into", lambda x, out: out, "Meta")
_foreign.impl("composite", lambda x: x[:1], "CompositeImplicitAutograd")

head = library.register("vtforeign::head")
hidden_head = library.register(torch.ops.vtforeign.hidden_head.default)
zero_raw_ = library.register(torch.ops.vtforeign.zero_raw_)
zero_raw_.register_autograd(lambda ctx, grad: torch.zeros_like(grad))
fill_into = library.register(torch.ops.vtforeign.fill_into)


@pytest.mark.parametrize("name", ["head", "hidden_head"])
@contexts
def test_views(name, context):
    op = getattr(torch.ops.vtforeign, name)
    with context():
        leaf = torch.ones(4, requires_grad=True)
        base = leaf * 1
        view = op(base, 2)
        assert view._base is base
        view.mul_(3)
        assert base._version == 1
        base.mul_(2)
        base.sum().backward()
    assert leaf.grad.tolist() == [6, 6, 2, 2]


@contexts
def test_writes(context):
    with context():
        leaf = torch.ones(4, requires_grad=True)
        base = leaf * 1
        assert torch.ops.vtforeign.zero_raw_(base[2:])._base is base
        assert base._version == 1
        base.sum().backward()
    assert leaf.grad.tolist() == [1, 1, 0, 0]


@contexts
def test_a_destination_that_is_passed_by_position(context):
    with context():
        out = torch.zeros(2)
        assert torch.ops.vtforeign.fill_into(torch.ones(2), out) is out
        assert out._version == 1
        y = torch.ones(2, requires_grad=True).exp()
        torch.ops.vtforeign.fill_into(torch.zeros(2), y.detach())
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.sum().backward()


def test_a_handler_that_issues_a_raw_write_counts_it():
    x = torch.ones(2)
    with Issue(torch.ops.vtforeign.zero_raw_):
        x.sin()
    assert x._version == 1


def test_an_op_that_was_called_under_track_before():
    lib = torch.library.Library("vtlate", "DEF")
    lib.define("zero_(Tensor(a!) x) -> ()")
    lib.impl("zero_", lambda x: memset(x), "CPU")
    x = torch.ones(2)
    with vt.track(), Issue(torch.ops.vtlate.zero_):
        x.sin()
        assert x._version == 0
        library.register("vtlate::zero_", lib=lib)
        torch.ops.vtlate.zero_(x)
        x.sin()
    assert x._version == 2
    lib._destroy()


@contexts
def test_what_custom_op_returned(context):
    @library.register
    @torch.library.custom_op("vtlib::scale_", mutates_args=("x",))
    def scale_(x: torch.Tensor, k: float) -> None:
        x.detach().numpy()[...] *= k

    scale_.register_autograd(
        lambda ctx, grad: (grad * ctx.k, None),
        setup_context=lambda ctx, inputs, output: setattr(ctx, "k", inputs[1]),
    )
    with context():
        leaf = torch.ones(2, requires_grad=True)
        x = leaf * 1
        scale_(x, 5.0)
        torch.ops.vtlib.scale_(x, 2.0)
        assert x._version == 2
        x.sum().backward()
    assert leaf.grad.tolist() == [10, 10]


def _defined_again(schema):
    def fn(x, k=1.0):
        return x * k

    return library.register(
        torch.library.custom_op("vtlib::anew", fn, mutates_args=(), schema=schema)
    )


def test_a_mode_is_given_the_op_that_was_defined_last():
    seen, held = [], []
    for schema in ("(Tensor x) -> Tensor", "(Tensor x, float k) -> Tensor"):
        again = _defined_again(schema)
        with vt.track(), Heard(seen):
            again(torch.ones(2), *([2.0] if "k" in schema else []))
        held.append(again)
        assert seen[-1] is again.op  # or, were it not held here, freed memory
        assert seen[-1] is torch.ops.vtlib.anew.default
    with pytest.raises(ViewTrackError, match="was defined again"):
        held[0](torch.ones(2))


def test_an_op_is_kept_that_is_defined_again_below_the_kernels():
    lib = torch.library.Library("vtbelow", "DEF")
    lib.define("f(Tensor x) -> Tensor")
    lib.impl("f", torch.clone, "CPU")
    first = weakref.ref(library.register("vtbelow::f").op)
    lib._destroy()
    lib = torch.library.Library("vtbelow", "DEF")
    lib.define("f(Tensor x) -> Tensor")
    lib.impl("f", torch.clone, "CPU")
    library.register("vtbelow::f")
    gc.collect()
    assert first() is not None  # the dispatcher points at it
    with vt.track():
        assert torch.ops.vtbelow.f(torch.ones(2)).tolist() == [1, 1]
    lib._destroy()


def test_compilers_see_the_kernel():
    def fn(x):
        base = x * 2
        torch.ops.vtforeign.head(base, 2).mul_(3)
        return base

    def inputs():
        return torch.ones(4, requires_grad=True)

    eager, compiled = inputs(), inputs()
    fn(eager).sum().backward()
    torch.compile(fn, backend="aot_eager", fullgraph=True)(compiled).sum().backward()
    assert compiled.grad.tolist() == eager.grad.tolist() == [6, 6, 2, 2]


def test_a_raw_kernel_is_opaque_to_compilers():
    def fn(x, out):
        return torch.ops.vtforeign.fill_into(x, out) + 1

    out = torch.zeros(2)
    x = torch.full((2,), 7.0)
    assert torch.compile(fn, backend="aot_eager", fullgraph=True)(x, out).tolist() == [8, 8]
    assert out.tolist() == [7, 7]


@pytest.mark.parametrize(
    ("op", "says"),
    [
        ("vtforeign::absent", "there is no op `vtforeign::absent`"),
        (torch.ops.vtforeign.two, "does not name one op.*overload"),
        (torch.ops.aten.mul.Tensor, "torch's own op, and it writes nothing"),
        (torch.ops.aten.detach_, "torch's own op, and it writes nothing"),
        (torch.ops.aten._native_batch_norm_legit.default, "neither in place nor out="),
        ("vtforeign::composite", "CompositeImplicitAutograd"),
    ],
)
def test_what_cannot_be_registered(op, says):
    with pytest.raises(ViewTrackError, match=says):
        library.register(op)


@torch.library.custom_op("vtforeign::twice", mutates_args=())
def twice(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    y = x * 2
    return y, y.view(-1)


@torch.library.custom_op(
    "vtforeign::filled", mutates_args=("buf",), schema="(Tensor(a!) buf, Tensor x) -> Tensor[]"
)
def filled(buf, x):
    buf.copy_(x)
    return [x + 1, buf[:1]]


@contexts
@pytest.mark.parametrize("requires_grad", [False, True])
def test_an_alias_that_custom_op_refuses_is_placed(context, requires_grad):
    """Case 32: torch's own text does not say which output, nor of what."""
    library.register(twice)
    library.register(filled)
    x = torch.ones(2, 2, requires_grad=requires_grad)
    with context(), pytest.raises(AliasingError) as refused:
        twice(x)
    said = str(refused.value)
    assert "`vtforeign::twice`" in said
    assert f"{__file__}:{twice._init_fn.__code__.co_firstlineno}" in said
    assert "output 0 and output 1 in one storage of 16 bytes" in said
    assert "return `.clone()` of output 1" in said
    assert "may not alias" in str(refused.value.__cause__)
    buf = torch.zeros(2)
    with context(), pytest.raises(AliasingError, match=r"output 0\[1\] in .* argument `buf`"):
        filled(buf, torch.ones(2))


def test_another_error_of_a_custom_op_is_its_own():
    @torch.library.custom_op("vtforeign::alias_error", mutates_args=())
    def fails(x: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("x may not alias y")

    library.register(fails)
    with pytest.raises(RuntimeError, match="x may not alias y") as raised:
        fails(torch.ones(2))
    assert type(raised.value) is RuntimeError

    ran = []

    @torch.library.custom_op("vtforeign::other_error", mutates_args=())
    def fails_once(x: torch.Tensor) -> torch.Tensor:
        ran.append(1)
        raise RuntimeError("something else")

    library.register(fails_once)
    with pytest.raises(RuntimeError, match="something else"):
        fails_once(torch.ones(2))
    assert ran == [1]


def test_an_autograd_kernel_of_its_own_is_kept():
    class Double(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            with torch._C._AutoDispatchBelowAutograd():
                return torch.ops.vtown.double_(x)

        @staticmethod
        def backward(ctx, grad):
            return grad * 42

    lib = torch.library.Library("vtown", "DEF")
    lib.define("double_(Tensor(a!) x) -> Tensor(a!)")

    def double_(x):
        x.detach().numpy()[...] *= 2
        return x

    lib.impl("double_", double_, "CPU")
    lib.impl("double_", lambda x: Double.apply(x), "Autograd")
    library.register("vtown::double_", lib=lib)
    x = torch.ones(2)
    with torch.no_grad():
        torch.ops.vtown.double_(x)
    assert x._version == 1
    lib._destroy()
