import contextlib
import functools

import pytest
import torch
from torch._dynamo.utils import counters
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

import viewtrack as vt
from viewtrack._torch.dynamo import skip_dynamo


def inner(x):
    return x.cos()


@skip_dynamo
def skipped(x):
    return inner(x).sin()


def plain(x):
    return inner(x).sin()


def compiled_ops(function):
    """The ops that dynamo finds in a function which it comes upon as it comes upon handlers."""
    ops = []

    def backend(graph, inputs):
        ops.extend(node.target for node in graph.graph.nodes if node.op == "call_method")
        return graph

    torch._dynamo.reset()
    got = torch.compile(function, backend=backend)(torch.ones(2))
    assert torch.equal(got, torch.ones(2).cos().sin())
    return ops


def test_a_function_and_what_it_calls_are_passed_over():
    assert compiled_ops(plain) == ["cos", "sin"]
    on_2_6 = torch.__version__.startswith("2.6.")  # what it calls is looked at there
    assert compiled_ops(skipped) == (["cos"] if on_2_6 else [])


def broken(x, w):
    """A region whose graph breaks: dynamo looks at what runs in between, our handlers too."""
    h = x @ w
    number = h.sum().item()
    torch._dynamo.graph_break()
    h = (h * number).tanh() @ w
    return (h * len(h.tolist())).sin().sum()


SAVED = [torch.ops.aten.mm.default]
own = functools.partial(vt.checkpoint.create_selective_checkpoint_contexts, SAVED)
torchs_own = functools.partial(create_selective_checkpoint_contexts, SAVED)
CONTEXTS = {
    "torch": torchs_own,
    "own": own,
    "content": functools.partial(own, check="content"),
    "foreign": vt.checkpoint.guard(torchs_own),
    "foreign_content": vt.checkpoint.guard(torchs_own, check="content"),
}
AROUND = {"nothing": contextlib.nullcontext, "track": vt.track, "saved": vt.guard_saved_tensors}


def run(contexts, around):
    torch.compiler.reset()
    counters.clear()
    torch.manual_seed(0)
    x, w = (torch.randn(3, 3, requires_grad=True) for _ in range(2))
    region = torch.compile(broken, backend="eager")
    with around():
        checkpoint(region, x, w, use_reentrant=False, context_fn=contexts).backward()
    return [x.grad, w.grad], dict(counters["frames"])


@pytest.mark.parametrize("around", AROUND)
@pytest.mark.parametrize("contexts", CONTEXTS)
def test_no_frame_of_ours_is_compiled_between_the_graphs_of_a_region(contexts, around):
    right, frames = run(torchs_own, contextlib.nullcontext)
    grads, with_ours = run(CONTEXTS[contexts], AROUND[around])
    assert all(map(torch.equal, grads, right))
    assert with_ours == frames
