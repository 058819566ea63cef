"""The guard for a whole program: installed in torch's place, and under torch.compile."""

import functools
import subprocess
import sys

import pytest
import torch
from regions import MATMULS, mlp, run
from torch.utils import checkpoint as torch_checkpoint
from torch.utils.checkpoint import checkpoint

from viewtrack import MutatedTensorError
from viewtrack.checkpoint import (
    create_selective_checkpoint_contexts,
    guard,
    install,
    uninstall,
)
from viewtrack.checkpoint.contexts import CachingMode
from viewtrack.checkpoint.create import stock_contexts


@pytest.fixture
def installed():
    install()
    try:
        yield torch_checkpoint.create_selective_checkpoint_contexts
    finally:
        uninstall()


def writes(x, w):
    h = x @ w
    h.mul_(2)
    return h.sin().sum()


def test_what_binds_the_name_afterwards_is_guarded(installed):
    from torch.utils.checkpoint import create_selective_checkpoint_contexts as bound

    assert bound is installed
    assert bound.__name__ == stock_contexts.__name__
    with pytest.raises(MutatedTensorError, match=r"aten\.mul_\.Tensor"):
        run(writes, functools.partial(bound, MATMULS))
    run(mlp, functools.partial(bound, MATMULS))
    run(writes, functools.partial(bound, MATMULS, allow_cache_entry_mutation=True))


def test_uninstall_puts_torch_back(installed):
    uninstall()
    assert torch_checkpoint.create_selective_checkpoint_contexts is stock_contexts


def test_install_takes_the_options():
    try:
        install(allow=["aten.mul_"])
        install(check="content", on_mutation="warn")
        contexts = torch_checkpoint.create_selective_checkpoint_contexts
        with pytest.warns(UserWarning, match="has been mutated"):
            run(writes, functools.partial(contexts, MATMULS))
    finally:
        uninstall()
    with pytest.raises(ValueError, match="`check` must be"):
        install(check="bytes")
    assert torch_checkpoint.create_selective_checkpoint_contexts is stock_contexts


PROGRAM = """\
import functools, torch
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

def region(x, w):
    h = x @ w
    h.mul_(2)
    return h.sin().sum()

contexts = functools.partial(create_selective_checkpoint_contexts, [torch.ops.aten.mm.default])
x, w = torch.randn(2, 3, 3, requires_grad=True), torch.randn(3, 3)
checkpoint(region, x, w, use_reentrant=False, context_fn=contexts).backward()
"""


@pytest.mark.parametrize("flag", [True, False])
def test_the_command_line_installs_it(tmp_path, flag):
    script = tmp_path / "train.py"
    script.write_text(PROGRAM)
    flags = ["--guard-checkpoint"] if flag else []
    command = [sys.executable, "-m", "viewtrack", "run", *flags, str(script)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    told = f"{script}:6 in region:  h.mul_(2)"
    error = done.stderr.rpartition("Traceback")[2]
    assert ("has been mutated" in error and told in error) is flag
    if not flag:  # torch is as silent as without the command; the report tells
        assert done.returncode == 0
        assert "hazards" in done.stderr
        assert told in done.stderr


def a_partial(contexts):
    return functools.partial(contexts, MATMULS)


def a_lambda(contexts):
    return lambda: contexts(MATMULS)


def a_function(contexts):
    def context_fn():
        return contexts(MATMULS)

    return context_fn


def guarded(contexts):
    return guard(functools.partial(stock_contexts, MATMULS))


@pytest.mark.parametrize("kind", [a_partial, a_lambda, a_function, guarded])
def test_compiled_regions_are_handed_over_to_torch(kind):
    torch.compiler.reset()
    entered = []

    def noticing(ops):
        contexts = create_selective_checkpoint_contexts(ops)
        entered.append(type(contexts[0]))
        return contexts

    def region(x, w):
        return ((x @ w).sin() @ w).cos().sum()

    grads = []
    for contexts in (noticing, stock_contexts):
        fn = kind(contexts)

        @torch.compile(backend="aot_eager", fullgraph=True)
        def step(x, w, fn=fn):
            return checkpoint(region, x, w, use_reentrant=False, context_fn=fn)

        torch.manual_seed(0)
        x, w = torch.randn(3, 3, requires_grad=True), torch.randn(3, 3, requires_grad=True)
        step(x, w).backward()
        grads.append([x.grad, w.grad])
    assert all(map(torch.equal, *grads))
    assert not any(issubclass(cls, CachingMode) for cls in entered)
    assert entered or kind is guarded
