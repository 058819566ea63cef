"""What the guard relies on in torch: its own selective checkpointing, hooks, counters."""

import gc
import inspect
import weakref

import pytest
import torch
from torch.utils import checkpoint as torch_checkpoint
from torch.utils._python_dispatch import TorchDispatchMode
from view_makers import share_a_counter
from write_ways import one_process_group

from viewtrack._torch import guard as _torch_guard
from viewtrack._torch import hooks as _torch_hooks

HERE = f"torch {torch.__version__}"
RELEASE = tuple(int(part) for part in torch.__version__.split(".")[:2])


def test_torch_says_how_it_finds_entries_by_the_policy_context():
    assert _torch_guard.POLICY_IN_FORWARD_ONLY is (RELEASE >= (2, 13)), HERE
    source = inspect.getsource(torch_checkpoint._CachedTorchDispatchMode)
    assert ("policy_fn(" in source) is not _torch_guard.POLICY_IN_FORWARD_ONLY, HERE


@pytest.mark.parametrize("name", ["SAC_IGNORED_OPS", "SelectiveCheckpointContext"])
def test_names_that_the_contexts_read(name):
    assert hasattr(torch_checkpoint, name), HERE


def test_the_messages_of_torch_are_the_ones_that_are_given():
    source = inspect.getsource(torch_checkpoint)
    for text in ("Trying to backward an extra time", "encountered during backward"):
        assert text in source, HERE
    assert "has been mutated" in source, HERE


def test_the_modes_are_torchs_own_by_class():
    assert _torch_guard.is_stock_caching(_torch_guard.CachingMode()), HERE
    assert not _torch_guard.is_stock_caching(_torch_guard.CachedMode()), HERE
    with _torch_guard.CachedMode(), _torch_guard.CachingMode():
        pass


def test_a_backend_is_known_by_its_name_and_waiting_for_nothing_does_nothing(tmp_path):
    t = torch.ones(2)
    _torch_guard.wait_for(t)
    boxed = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            boxed.append(args[1])
            return func(*args, **(kwargs or {}))

    with one_process_group(tmp_path / "store"):
        with Watch():
            torch.distributed.all_reduce(t)
        assert _torch_guard.is_on_gloo(boxed[0], t), HERE
        _torch_guard.wait_for(t)
    assert (t.tolist(), t._version) == ([1, 1], 0), HERE


@pytest.mark.parametrize("below", [False, True])
def test_a_counter_shares_the_counter_and_keeps_no_memory(below):
    counters, seen = [], []

    class Smuggle(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.append(func)
            out = func(*args, **(kwargs or {}))
            counters.append(_torch_guard.counter_of(out))
            return out

    x = torch.ones(4, requires_grad=True)
    if below:
        with Smuggle():
            t = x + 1
    else:
        t = x + 1
        counters.append(_torch_guard.counter_of(t))
    (counter,) = counters
    assert len(seen) == below, HERE
    assert counter.numel() == 0, HERE
    assert t._version == 0, HERE
    assert share_a_counter(counter, t), HERE
    storage = weakref.ref(t.untyped_storage())
    del t
    gc.collect()
    assert storage() is None, HERE


def test_no_mode_is_called_where_dispatch_is_off():
    class Raises(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            raise AssertionError(func)

    with Raises(), _torch_guard.no_torch_dispatch():
        torch.ones(2).add(1)


def test_a_trace_and_fake_tensors_are_told():
    from torch.fx.experimental.proxy_tensor import make_fx

    found = []

    def body(x):
        found.append(_torch_guard.is_compiling())
        return x + 1

    body(torch.ones(2))
    make_fx(body)(torch.ones(2))
    assert found == [False, True], HERE


def test_hooks_that_are_there():
    pair = (lambda t: t, lambda t: t)
    assert _torch_guard.top_saved_tensors_hooks() is None, HERE
    with torch.autograd.graph.saved_tensors_hooks(*pair):
        found = _torch_guard.top_saved_tensors_hooks()
    assert found == (pair if RELEASE >= (2, 7) else None), HERE


def test_the_key_of_an_op_is_the_op():
    op = torch.ops.aten.mm.default
    assert _torch_guard.cache_key(op, ()) is op, HERE
    hop = torch.ops.higher_order.cond
    assert _torch_guard.cache_key(hop, ()) is hop, HERE


def test_the_entries_of_torchs_own_pair_are_asked_for_their_value():
    aten = torch.ops.aten
    make = torch_checkpoint.create_selective_checkpoint_contexts
    told = []
    for allowed in (False, True):
        forward, recompute = make([aten.mul.Tensor], allowed)
        with forward:
            kept = torch.ones(2) * 3
        kept.add_(1)
        with recompute:
            _torch_guard.look_at_entries(0, told.append)
            assert (torch.ones(2) * 3).tolist() == [4, 4], HERE
    assert [handed.value.tolist() for handed in told] == [[4, 4], [4, 4]], HERE
    assert [handed.moved is None for handed in told] == [False, True], HERE


def test_the_hooks_on_top_are_told_taken_off_and_put_back():
    assert _torch_hooks.knows_the_top is (RELEASE >= (2, 7)), HERE
    assert _torch_hooks.hooks_on_top() is None, HERE
    packed = []
    pair = (lambda t: packed.append(t) or t), (lambda t: t)
    leaf = torch.ones(2, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(*pair):
        if _torch_hooks.knows_the_top:
            assert _torch_hooks.hooks_on_top() == pair, HERE
        _torch_hooks.pop_hooks()
        leaf.exp()
        assert not packed, HERE
        _torch_hooks.push_hooks(*pair)
        leaf.exp()
        assert len(packed) == 1, HERE


@pytest.mark.skipif(RELEASE < (2, 7), reason="hooks are forbidden only where there are none")
def test_hooks_are_put_back_where_new_ones_are_forbidden():
    message = torch._C._autograd._saved_tensors_hooks_get_disabled_error_message
    hooks = torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t)
    with hooks:
        torch._C._autograd._saved_tensors_hooks_disable("forbidden", False)
        try:
            _torch_hooks.pop_hooks()
            _torch_hooks.push_hooks(hooks.pack_hook, hooks.unpack_hook)
            assert message() == "forbidden", HERE
        finally:
            torch._C._autograd._saved_tensors_hooks_enable()
        assert _torch_hooks.hooks_on_top() == (hooks.pack_hook, hooks.unpack_hook), HERE


def test_who_forbids_hooks_does_it_by_the_generator_that_is_exchanged():
    assert _torch_hooks.disabling.__code__.co_freevars == (), HERE
    assert inspect.isgeneratorfunction(_torch_hooks.disabling), HERE
    with torch.autograd.graph.save_on_cpu(), pytest.raises(RuntimeError, match="why"):
        torch.autograd.graph.disable_saved_tensors_hooks("why").__enter__()
    source = inspect.getsource(torch._functorch.vmap.doesnt_support_saved_tensors_hooks)
    assert "torch.autograd.graph.disable_saved_tensors_hooks(" in source, HERE
