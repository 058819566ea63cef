"""Schemas and bodies that make no sense: what is said about them, and when."""

import gc
import weakref

import pytest
import torch
from library_ops import CONTEXTS, fresh

from viewtrack import AliasingError, ViewTrackError, library

define = {k: getattr(library, k) for k in ("view_op", "inplace_op", "out_op", "op")}


@pytest.mark.parametrize(
    ("kind", "schema", "says"),
    [
        ("view_op", "f(Tensor(a) x) -> Tensor(a)", "names no namespace.*mylib::f"),
        ("view_op", "aten::f(Tensor(a) x) -> Tensor(a)", "namespace of torch.*mylib::f"),
        ("op", "vtbad::f(Tensr x) -> Tensor", "cannot read the schema"),
        ("view_op", "vtbad::f(Tensor x) -> Tensor(a)", "output 0 .*no argument is in"),
        ("op", "vtbad::f(Tensor(a) x, Tensor y) -> (Tensor(a), Tensor(b))", "output 1 .*no argum"),
        ("op", "vtbad::f(Tensor(a) x) -> Tensor", "no output is in the alias set of `x`"),
        ("op", "vtbad::f(Tensor(a) x) -> Tensor(a!)", r"`Tensor\(a!\) x`"),
        ("op", "vtbad::f(Tensor(a) x, Tensor(a) y) -> Tensor(a)", "`x` and `y` are both"),
        ("op", "vtbad::f(Tensor(*) x) -> Tensor(*)", "wildcard"),
        ("view_op", "vtbad::f(Tensor(a!) x) -> Tensor(a!)", "writes an argument.*inplace_op"),
        ("view_op", "vtbad::f(Tensor(a!) x) -> Tensor(a)", "writes an argument.*library.op"),
        ("view_op", "vtbad::f(Tensor x) -> Tensor", "returns no view"),
        ("inplace_op", "vtbad::f(Tensor(a!) x) -> Tensor(a!)[]", "output 0 is a list.*`x`.*one te"),
        ("inplace_op", "vtbad::f(Tensor(a!)[] xs) -> Tensor(a!)", "is one tensor.*`xs`.*a list"),
        ("op", "vtbad::f(Tensor x, Tensor x) -> Tensor", "two arguments `x`"),
        ("inplace_op", "vtbad::f(Tensor(a) x) -> Tensor(a)", "returns a view.*view_op"),
        ("inplace_op", "vtbad::f(Tensor x) -> Tensor", "writes no argument"),
        ("out_op", "vtbad::f(Tensor x, *, Tensor out) -> Tensor", "writes no argument"),
    ],
)
def test_a_bad_schema_is_refused_at_registration(kind, schema, says):
    with pytest.raises(ViewTrackError, match=says) as caught:
        define[kind](schema, lambda *args: None)
    assert f"viewtrack.library.{kind}" in str(caught.value)
    assert not hasattr(torch.ops.vtbad, "f")


def test_a_decorator_refuses_before_it_sees_the_body():
    with pytest.raises(ViewTrackError, match="no argument is in"):
        library.view_op("vtbad::f(Tensor x) -> Tensor(a)")


def test_a_body_must_be_callable():
    with pytest.raises(TypeError, match="must be callable, got int"):
        library.view_op(fresh("(Tensor(a) x) -> Tensor(a)"), 3)


def _clone(x):
    return x.clone()


def _pair(x):
    y = x * 2
    return y, y.view(-1)


BAD_BODIES = [
    ("(Tensor(a) x) -> Tensor(a)", _clone, AliasingError, "output 0.*a view of `x`.*clone"),
    ("(Tensor(a) x) -> Tensor(a)[]", lambda x: [x[0], x + 1], AliasingError, r"output 0\[1\]"),
    ("(Tensor(a) x) -> Tensor(a)", lambda x: (x, x), ViewTrackError, "2 values.*return a tensor"),
    ("(Tensor(a) x) -> Tensor(a)", lambda x: 3, ViewTrackError, "returned int"),
    ("(Tensor(a) x) -> Tensor(a)[]", lambda x: x[0], ViewTrackError, "return a list"),
    ("(Tensor(a) x) -> (Tensor(a), Tensor)", lambda x: (x[0],), ViewTrackError, "1 value .*2 out"),
    ("(Tensor(a) x) -> (Tensor(a), Tensor)", lambda x: (x[0], x[1]), AliasingError,
     "output 1 in the memory of its argument `x`"),
    ("(Tensor x) -> Tensor", lambda x: x.view(-1), AliasingError, "output 0 in the memory"),
    ("(Tensor x) -> (Tensor, Tensor)", _pair, AliasingError, "output 0 and output 1 .*48 bytes"),
    ("(Tensor(a!) x) -> Tensor(a!)", lambda x: None, AliasingError, "NoneType.*`return x`"),
    ("(Tensor(a!) x) -> Tensor(a!)", _clone, AliasingError, "another tensor.*`return x`"),
    ("(Tensor(a!) x) -> ()", lambda x: x, ViewTrackError, "leave out the `return`"),
    ("(Tensor(a!)[] xs) -> ()", lambda xs: list(xs), ViewTrackError, "leave out the `return`"),
]  # fmt: skip


@pytest.mark.parametrize(("schema", "body", "error", "says"), BAD_BODIES)
@pytest.mark.parametrize("needs", [False, True], ids=["plain", "grad"])
@pytest.mark.parametrize("context", CONTEXTS.values(), ids=CONTEXTS)
def test_a_bad_body_is_refused_at_the_first_call(schema, body, error, says, needs, context):
    op = library.op(fresh(schema), body)
    x = torch.ones(3, 4, requires_grad=needs) * 1
    with context(), pytest.raises(error, match=says) as caught:
        op([x] if "xs" in schema else x)
    message = str(caught.value)
    assert op.op.name() in message
    assert f"{__file__}:{body.__code__.co_firstlineno}" in message


def test_a_body_that_aliases_for_some_shapes_only():
    op = library.view_op(fresh("(Tensor(a) x) -> Tensor(a)"), lambda x: x.contiguous())
    x = torch.ones(2, 3)
    assert op(x)._base is x
    with pytest.raises(AliasingError, match="for every shape"):
        op(x.t())


def test_an_undeclared_write_is_refused():
    def body(x, y):
        y.add_(1)
        return x.add_(y)

    op = library.inplace_op(fresh("(Tensor(a!) x, Tensor y) -> Tensor(a!)"), body)
    with pytest.raises(AliasingError, match=r"wrote its argument `y`.*Tensor\(a!\) y"):
        op(torch.ones(2), torch.ones(2))


def test_writing_an_alias_of_a_written_argument_is_no_undeclared_write():
    op = library.inplace_op(
        fresh("(Tensor(a!) x, Tensor y) -> Tensor(a!)"), lambda x, y: x.add_(y.sum())
    )
    x = torch.ones(4)
    op(x, x[:2])
    assert x.tolist() == [3] * 4


def test_errors_of_the_body_come_through():
    @library.view_op(fresh("(Tensor(a) x, int n) -> Tensor(a)"))
    def row(x, n):
        return x[n]

    with pytest.raises(IndexError):
        row(torch.ones(2), 5)
    assert row(torch.ones(2), 1).dim() == 0


def test_defaults_reach_a_body_that_has_none():
    @library.view_op(fresh("(Tensor(a) x, int n=2, *, int skip=1) -> Tensor(a)"))
    def part(x, n, skip):
        return x[skip : skip + n]

    x = torch.arange(5)
    assert part(x).tolist() == [1, 2]
    assert part(x, 3).tolist() == [1, 2, 3]
    assert part(x, skip=0).tolist() == [0, 1]
    assert part(x=x, n=1, skip=3).tolist() == [3]


def test_an_op_can_be_defined_again():
    first = library.view_op("vtlib::again(Tensor(a) x) -> Tensor(a)", lambda x: x[:1])
    second = library.view_op("vtlib::again(Tensor(a) x) -> Tensor(a)", lambda x: x[:2])
    x = torch.ones(3)
    assert second(x).shape == (2,)
    assert torch.ops.vtlib.again(x).shape == (2,)
    assert first.op is not second.op


def test_a_library_owns_the_registration():
    lib = torch.library.Library("vtowned", "FRAGMENT")
    op = library.view_op("vtowned::one(Tensor(a) x) -> Tensor(a)", lambda x: x[:1], lib=lib)
    assert op(torch.ones(3)).shape == (1,)
    lib._destroy()
    assert not hasattr(torch.ops.vtowned, "one")
    with pytest.raises(ViewTrackError, match="`lib` is of the namespace `vtowned`"):
        library.view_op("vtother::one(Tensor(a) x) -> Tensor(a)", lambda x: x[:1], lib=lib)


@pytest.mark.parametrize("how", ["destroyed", "defined again"])
def test_an_op_that_is_gone_says_so(how):
    lib = torch.library.Library("vtgone", "FRAGMENT")
    given = {} if how == "defined again" else {"lib": lib}
    schema = "vtgone::one(Tensor(a) x) -> Tensor(a)"
    op = library.view_op(schema, lambda x: x[:1], **given)
    assert op(torch.ones(3)).shape == (1,)
    if how == "defined again":
        again = library.view_op(schema, lambda x: x[:2])
        assert again(torch.ones(3)).shape == (2,)
    else:
        lib._destroy()
    with pytest.raises(ViewTrackError, match=r"`vtgone::one`.*is gone.*was destroyed.*again"):
        op(torch.ones(3))
    with pytest.raises(ViewTrackError, match=r"`vtgone::one`.*is gone"):
        op.register_fake(lambda x: x[:1])
    lib._destroy()
    with pytest.raises(ViewTrackError, match="`lib` was destroyed"):
        library.view_op("vtgone::two(Tensor(a) x) -> Tensor(a)", lambda x: x[:1], lib=lib)


def test_a_library_is_not_kept_alive_by_its_ops():
    lib = torch.library.Library("vtmortal", "FRAGMENT")
    op = library.view_op("vtmortal::one(Tensor(a) x) -> Tensor(a)", lambda x: x[:1], lib=lib)
    assert op(torch.ones(3)).shape == (1,)
    seen = weakref.ref(lib)
    del lib
    gc.collect()
    assert seen() is None
    with pytest.raises(ViewTrackError, match=r"`vtmortal::one`.*is gone"):
        op(torch.ones(3))


@pytest.mark.parametrize(
    ("arguments", "body", "says"),
    [
        ("Tensor(a) x, int n", lambda x: x, r"takes \(x\).*too many positional.*\(x, n\)"),
        ("Tensor(a) x", lambda x, n: x, r"takes \(x, n\).*missing a required argument: 'n'"),
        ("Tensor(a) x, *, int n", lambda x: x, r"unexpected keyword.*'n'.*\(x, \*, n\)"),
        ("Tensor(a) x, *, int n", lambda x, m: x, r"missing a required argument: 'm'"),
        ("Tensor(a) x, int n", lambda x, *, n: x, r"too many positional"),
        ("Tensor(a) x, int n", lambda n, x: x, r"`n` comes where `x` is passed.*\(x, n\)"),
    ],
)
def test_a_body_that_takes_other_arguments_is_refused_at_registration(arguments, body, says):
    schema = fresh(f"({arguments}) -> Tensor(a)")
    name = schema.partition("(")[0]
    with pytest.raises(ViewTrackError, match=rf"`{name}` \(.*\.py:\d+\): its body .*{says}"):
        library.view_op(schema, body)
    assert not hasattr(torch.ops.vtlib, name.partition("::")[2])


def test_other_functions_of_an_op_must_take_its_arguments_too():
    op = library.view_op(fresh("(Tensor(a) x, int n) -> Tensor(a)"), lambda x, n: x[:n])
    with pytest.raises(ViewTrackError, match="its kernel takes"):
        op.register_kernel("cpu", lambda x: x)
    with pytest.raises(ViewTrackError, match="its fake implementation takes"):
        op.register_fake(lambda x: x)
    with pytest.raises(ViewTrackError, match="its batching rule takes"):
        op.register_vmap(lambda info, x, n: x)
    op.register_vmap(lambda info, in_dims, x, n: x)


@pytest.mark.parametrize(
    "body",
    [lambda x, k: x[:k], lambda *args: args[0][: args[1]], lambda x, n, more=0: x[:n]],
    ids=["other names", "all", "one with a default"],
)
def test_a_body_may_take_its_arguments_as_it_likes(body):
    op = library.view_op(fresh("(Tensor(a) x, int n) -> Tensor(a)"), body)
    assert op(torch.ones(3), 2).shape == (2,)


def test_overloads():
    one = library.view_op("vtlib::cut.one(Tensor(a) x) -> Tensor(a)", lambda x: x[:1])
    two = library.view_op("vtlib::cut.two(Tensor(a) x, int n) -> Tensor(a)", lambda x, n: x[:n])
    x = torch.ones(4)
    assert torch.ops.vtlib.cut(x)._base is x
    assert torch.ops.vtlib.cut(x, 3).shape == (3,)
    assert (one.op, two.op) == (torch.ops.vtlib.cut.one, torch.ops.vtlib.cut.two)


def test_a_kernel_for_a_device():
    op = library.view_op(fresh("(Tensor(a) x) -> Tensor(a)"), lambda x: x[:1])
    ran = []

    @op.register_kernel("cpu")
    def kernel(x):
        ran.append(x)
        return x[:1]

    leaf = torch.ones(3, requires_grad=True)
    x = leaf * 1
    view = op(x)
    view.mul_(2)
    x.sum().backward()
    assert len(ran) == 1
    assert view._base is x
    assert leaf.grad.tolist() == [2, 1, 1]
    assert op(torch.ones(3, device="meta")).shape == (1,)
    assert len(ran) == 1


def test_a_bad_kernel_for_a_device_is_refused():
    op = library.view_op(fresh("(Tensor(a) x) -> Tensor(a)"), lambda x: x[:1])
    op.register_kernel("cpu", lambda x: x[:1] + 1)
    with pytest.raises(AliasingError, match="a view of `x`"):
        op(torch.ones(3))


@pytest.mark.parametrize("kind", ["view_op", "inplace_op", "out_op", "op"])
@pytest.mark.parametrize("schema", [3, lambda x: x], ids=["number", "bare decorator"])
def test_a_schema_that_is_no_text(kind, schema):
    with pytest.raises(TypeError, match=rf"library\.{kind} takes the schema first.*`@{kind}\("):
        getattr(library, kind)(schema)


@pytest.mark.parametrize(
    ("returns", "value"),
    [
        ("Tensor?[]", [None, 2]),
        ("int[]", [1, 2]),
        ("SymInt[]", [3]),
        ("float[]", [0.5]),
        ("bool[]", [True]),
        ("str[]", ["a"]),
        ("Scalar", 2),
        ("int[]?", None),
        ("Dict(str, int)", {"a": 1}),
        ("(int, int[])", (1, [2])),
    ],
)
def test_outputs_that_are_no_tensors(returns, value):
    def body(x):
        return [None, x * 2] if returns == "Tensor?[]" else value

    op = library.op(fresh(f"(Tensor x) -> {returns}"), body)
    out = op(torch.ones(1))
    if returns == "Tensor?[]":
        out = [None if t is None else t.item() for t in out]
    assert out == value
    qualified = f"{op.op.name()}__opaque"
    companion = getattr(torch.ops.vtlib, qualified.partition("::")[2]).default
    expected = [str(r.real_type) for r in op.op._schema.returns]
    assert [str(r.real_type) for r in companion._schema.returns] == expected


def test_a_schema_that_cannot_be_read_again_is_refused_before_anything_is_defined():
    with pytest.raises(ViewTrackError, match=r"`vtbad::future` has a type"):
        library.op("vtbad::future(Tensor x) -> Future(Tensor)", lambda x: None)
    assert not hasattr(torch.ops.vtbad, "future")
