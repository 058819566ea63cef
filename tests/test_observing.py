import pytest
import torch
from caches import Keep, aten, detached
from wrappers import make_wrapper

from viewtrack import track
from viewtrack.observing import ObservingTracker


def observed(run, *, outer=None):
    seen = []

    def observe(func, plan, args, kwargs, out):
        seen.append((plan.name, len(args), tuple(kwargs), out))

    tracker = ObservingTracker("site", observe)
    with outer or tracker, tracker:
        run()
    return seen


X = torch.ones(2, 3)


def test_it_is_told_of_every_op_with_its_outputs():
    seen = observed(lambda: X.sum(dim=0, keepdim=True).add_(1))
    assert [row[:3] for row in seen] == [
        ("aten.sum.dim_IntList", 3, ()),
        ("aten.add_.Tensor", 2, ()),
    ]
    assert seen[1][3].tolist() == [[3.0, 3.0, 3.0]]


def test_ops_of_handlers_too():
    def run():
        with Keep(detached, op=aten.neg.default):
            X.neg()

    assert [row[0] for row in observed(run)] == ["aten.neg.default", "aten.detach.default"]


def test_ops_inside_of_a_wrapper_and_the_wrappers_own():
    wrapper = make_wrapper()(X)
    names = [(row[0], type(row[3]).__name__) for row in observed(lambda: wrapper.neg())]
    assert names[0] == ("aten.neg.default", "Tensor")
    assert names[-1] == ("aten.neg.default", "Wrapper")


def test_inside_of_another_tracker_it_is_silent():
    assert observed(lambda: X.neg(), outer=track()) == []


def test_a_tracker_inside_of_it_changes_nothing():
    def run():
        with track(record="none"):
            X.neg()

    assert [row[0] for row in observed(run)] == ["aten.neg.default"]


def test_afterwards_plain_trackers_are_plain():
    seen = observed(lambda: None)
    with track():
        X.neg()
    assert seen == []


def test_an_op_that_raises_is_not_told():
    def run():
        with pytest.raises(RuntimeError, match="size"):
            X.view(4)

    assert observed(run) == []
