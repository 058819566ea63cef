import torch

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
