"""`SubclassConformance` on classes that conform, and on classes with a fault planted in them."""

import pytest
import torch
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils._python_dispatch import return_and_correct_aliasing
from torch.utils._pytree import tree_map_only
from wrappers import make_wrapper

import viewtrack as vt
from viewtrack.testing import SubclassConformance
from viewtrack.testing.subclass_checks import check_gradients, check_operation
from viewtrack.testing.subclass_table import OPERATIONS

aten = torch.ops.aten


class TestTrackedTensor(SubclassConformance):
    def make(self, inner):
        return vt.TrackedTensor(inner)


class TestNestedTrackedTensor(SubclassConformance):
    def make(self, inner):
        return vt.TrackedTensor(vt.TrackedTensor(inner))

    def read(self, t):
        return t.unwrap().unwrap()


class TestCorrectedWrapper(SubclassConformance):
    wrapper = make_wrapper(flattens=True)

    def make(self, inner):
        return self.wrapper(inner)


class TestCorrectedWrapperThatDeclaresNothing(SubclassConformance):
    wrapper = make_wrapper(quiet=False)

    def make(self, inner):
        return self.wrapper(inner)

    def read(self, t):
        return t.e


class TestTwoTensor(SubclassConformance):
    """Torch's own example of a wrapper, as it is."""

    keeps_inner_counters = False
    # return_and_correct_aliasing resizes no out= argument, and moves no counter for foreach ops.
    unsupported = frozenset(
        {
            "resized_out",
            "resize_larger",
            *(o.name for o in OPERATIONS if o.kind == "foreach" and o.name.endswith("_")),
        }
    )

    def make(self, inner):
        return TwoTensor(inner, inner.clone())


# Planted faults.


def alone(func, args, kwargs, out):
    return out


def unwraps(cls, func, args, inner):
    return inner if func is aten.mul.Tensor else tree_map_only(torch.Tensor, cls, inner)


def puts_nothing(cls, func, args, inner):
    if func is aten.index_put_.default:
        args[0].e.copy_(torch.arange(6.0).view(2, 3))
    return tree_map_only(torch.Tensor, cls, inner)


def copies(cls, func, args, inner):
    return tree_map_only(torch.Tensor, lambda t: cls(t.clone() if func.is_view else t), inner)


def adds_twice(cls, func, args, inner):
    if func is aten.add_.Tensor:
        args[0].e.add_(1)
    return tree_map_only(torch.Tensor, cls, inner)


def requires_grad(cls, func, args, inner):
    return tree_map_only(torch.Tensor, lambda t: cls(t, True), inner)


def corrected_but(op, wrong):
    """Correct the results of all ops but one."""

    def correct(func, args, kwargs, out):
        if func is op:
            return wrong(args, kwargs, out)
        return vt.correct_aliasing(func, args, kwargs, out)

    return correct


FAULTS = {
    "copies on view": (
        {"wrap": copies, "correct": return_and_correct_aliasing},
        "view",
        "what is written to a view does not reach its base: the handler copied",
    ),
    "forgets to return self": (
        {"correct": corrected_but(aten.add_.Tensor, lambda args, kwargs, out: out)},
        "add_",
        "`aten.add_.Tensor` returned a new tensor and not its argument `self`",
    ),
    "does not alias storage": (
        {"correct": corrected_but(aten.view.default, lambda args, kwargs, out: out)},
        "view",
        "`aten.view.default` returned a tensor whose storage is not that of `self`",
    ),
    "does not alias the storage of a piece": (
        {"correct": corrected_but(aten.split.Tensor, lambda args, kwargs, out: out)},
        "split",
        "`aten.split.Tensor` returned a tensor whose storage is not that of `self`",
    ),
    "forgets to return out": (
        {"correct": corrected_but(aten.add.out, lambda args, kwargs, out: out)},
        "add_out",
        "`aten.add.out` returned a new tensor and not its argument `out`",
    ),
    "keeps its old sizes": (
        {"correct": corrected_but(aten.t_.default, lambda args, kwargs, out: args[0])},
        "t_",
        "the argument has shape (2, 3), a plain one (3, 2)",
    ),
    "counts no foreach op": (
        {"correct": corrected_but(aten._foreach_zero_.default, lambda args, kwargs, out: out)},
        "_foreach_zero_",
        "the argument has _version 0, a plain one 1",
    ),
    "computes something else": (
        {"wrap": adds_twice},
        "add_",
        "the argument has values [[2.0, 3.0, 4.0], [5.0, 6.0, 7.0]], a plain one "
        "[[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]]",
    ),
    "hands out autograd metadata": (
        {"wrap": requires_grad, "correct": alone},
        "add",
        "output 0 requires grad, a plain one does not",
    ),
    "gives plain results": (
        {"wrap": unwraps},
        "mul_scalar",
        "output 0 is a `Tensor` and no `Wrapper`; if that is meant, set `results_are_plain = True`",
    ),
    "puts nothing": (
        {"wrap": puts_nothing},
        "index_put_",
        "the argument has values [[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]], a plain one "
        "[[1.0, 1.0, 1.0], [1.0, 1.0, 1.0]]",
    ),
    "leaves inner counters alone": (
        {"flattens": True, "correct": corrected_but(aten.mul_.Tensor, lambda a, k, out: a[0])},
        "mul_",
        "the argument is at version 1, its inner tensor `e` at 0",
    ),
}


def subject_of(cls):
    class Conformance(SubclassConformance):
        def make(self, inner):
            return cls(inner)

        def read(self, t):
            return t.e

    return Conformance()


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_found(fault):
    how, name, line = FAULTS[fault]
    subject = subject_of(make_wrapper(**how))._subject()
    operation = next(o for o in OPERATIONS if o.name == name)
    assert line in check_operation(operation, subject)


def test_the_report_names_the_operation_the_class_and_its_handler():
    conformance = subject_of(make_wrapper(wrap=copies))
    operation = next(o for o in OPERATIONS if o.name == "view")
    with pytest.raises(AssertionError, match=r"`view` on Wrapper \(.*wrappers\.py:\d+\):\n  "):
        conformance.test_operation(operation)


def test_wrong_gradients_are_found():
    def wrap(cls, func, args, inner):
        inner = inner * 2 if func is aten.mul.Tensor else inner
        return tree_map_only(torch.Tensor, cls, inner)

    problems = check_gradients(subject_of(make_wrapper(wrap=wrap))._subject())
    assert problems[0].startswith("the gradient is ")


def test_an_op_that_raises_is_found():
    def wrap(cls, func, args, inner):
        if func is aten.sin.default:
            raise NotImplementedError("no sin here")
        return tree_map_only(torch.Tensor, cls, inner)

    operation = next(o for o in OPERATIONS if o.name == "sin")
    problems = check_operation(operation, subject_of(make_wrapper(wrap=wrap))._subject())
    assert problems == [
        "raised NotImplementedError('no sin here'), and plain tensors do not",
    ]


def test_the_table_covers_every_kind_and_names_nothing_twice():
    names = [o.name for o in OPERATIONS]
    assert len(set(names)) == len(names)
    kinds = {o.kind for o in OPERATIONS}
    assert kinds == {"view", "functional", "in-place", "out", "foreach", "metadata"}


def test_what_must_be_overridden_says_so():
    with pytest.raises(NotImplementedError, match=r"must define `make\(self, inner\)`"):
        SubclassConformance().make(torch.ones(2))
    with pytest.raises(NotImplementedError, match=r"must define `read\(self, t\)`"):
        SubclassConformance().read(make_wrapper()(torch.ones(2)))
