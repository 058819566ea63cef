"""check_inputs and the attributes of modules: which changes matter to the recompute."""

import contextlib
import gc
import weakref

import pytest
import torch
from test_checkpoint_inputs import both, run
from torch.func import functional_call
from torch.utils import checkpoint as torch_checkpoint

from viewtrack import MutatedTensorError


def linear(size=3):
    torch.manual_seed(1)
    return torch.nn.Linear(size, size)


class Outer(torch.nn.Module):
    """A module whose forward is given."""

    def __init__(self, forward, **attributes):
        super().__init__()
        self._run = forward
        for name, value in attributes.items():
            setattr(self, name, value)

    def forward(self, x):
        return self._run(self, x)


def outer(forward, **attributes):
    return lambda: Outer(forward, **attributes)


def called_with_captured():
    module, put_in = linear(), dict(linear().named_parameters())
    return lambda x: functional_call(module, put_in, x @ x).sin().sum()


def called_with_made():
    module, weight = linear(), torch.ones(3, 3)
    return lambda x: functional_call(module, {"weight": weight * x}, x @ x).sin().sum()


def called_with_views():
    module, flat = linear(), torch.ones(12)

    def region(x):
        put_in = {"weight": flat[:9].view(3, 3), "bias": flat[9:]}
        return functional_call(module, put_in, x @ x).sin().sum()

    return region


def called_twice():
    module, first, second = linear(), torch.ones(3, 3), torch.ones(3)

    def region(x):
        x = functional_call(module, {"weight": first}, x @ x)
        x = functional_call(module, {"bias": second}, x @ x)
        return (module(x.sin()) @ x).sum()

    return region


def called_with_tied_weights():
    module = torch.nn.Sequential(linear(), linear())
    module[1].weight = module[0].weight

    def region(x):
        put_in = {"0.weight": torch.ones(3, 3)}
        return functional_call(module, put_in, x @ x, tie_weights=True).sin().sum()

    return region


def called_last():
    """Early stop ends the recompute before this is entered again."""
    put_in = {"weight": torch.ones(3, 3), "bias": torch.ones(3)}
    module = torch.nn.Sequential(linear(), torch.nn.Identity())
    return lambda x: functional_call(module[0], put_in, (x @ x).sin()).sum()


def rnn():
    torch.manual_seed(1)
    module = torch.nn.LSTM(3, 3, batch_first=True)
    put_in = {name: p.detach() * 2 for name, p in module.named_parameters()}

    def region(x):
        out = functional_call(module, put_in, x @ x)[0]
        return module(out)[0].sin().sum()

    return region


def switched():
    module = torch.nn.Sequential(linear(), torch.nn.Dropout(0.5))

    def region(x):
        module.eval()
        out = module(x @ x)
        module.train()
        return out.sin().sum()

    return region


def parametrized():
    class Symmetric(torch.nn.Module):
        def forward(self, w):
            return w.triu() + w.triu(1).transpose(-1, -2)

    module = linear()
    torch.nn.utils.parametrize.register_parametrization(module, "weight", Symmetric())

    def region(x):
        with torch.nn.utils.parametrize.cached():
            return (module(x @ x) + module(x)).sin().sum()

    return region


def weight_norm():
    module = torch.nn.utils.parametrizations.weight_norm(linear())
    return lambda x: module(x @ x).sin().sum()


def old_weight_norm():
    module = torch.nn.utils.weight_norm(linear())
    return lambda x: module(x @ x).sin().sum()


def spectral_norm():
    module = torch.nn.utils.parametrizations.spectral_norm(linear()).eval()
    return lambda x: module(x @ x).sin().sum()


def keeps_a_result(self, x):
    self.cache = x @ x
    self.loss = self.cache.sin().sum()
    return self.loss + self.cache.cos().sum()


def keeps_its_input(self, x):
    self.cache = x
    return (x @ x).sin().sum()


def deletes_and_sets(self, x):
    self.cache = x @ x
    out = self.cache.sin().sum()
    del self.cache
    self.cache = out
    return out


def takes_another_way_to_the_same(self, x):
    """Backward is that of the forward's ops, and what they saved is the same."""
    out = (x @ x).sin() if self.cache is None else (x @ x).cos()
    self.cache = x
    return out.sum()


def sets_a_child(self, x):
    self.child.cache = x @ x
    return self.child(x).sin().sum()


HARMLESS = {
    "captured": called_with_captured,
    "made": called_with_made,
    "views": called_with_views,
    "twice": called_twice,
    "tied": called_with_tied_weights,
    "last": called_last,
    "rnn": rnn,
    "switched": switched,
    "parametrized": parametrized,
    "weight_norm": weight_norm,
    "old_weight_norm": old_weight_norm,
    "spectral_norm": spectral_norm,
    "result": outer(keeps_a_result),
    "result_again": outer(keeps_a_result, cache=torch.ones(1), loss=None),
    "input": outer(keeps_its_input, cache=None),
    "deleted": outer(deletes_and_sets, cache=torch.ones(1)),
    "same": outer(takes_another_way_to_the_same, cache=None),
    "child": outer(sets_a_child, child=linear()),
}


@both
@pytest.mark.filterwarnings("ignore:.*weight_norm:FutureWarning")
@pytest.mark.parametrize("make", HARMLESS.values(), ids=HARMLESS)
@pytest.mark.parametrize("check", ["storage", "content"])
def test_no_alarm(contexts, make, check):
    right = run(make(), torch_checkpoint.noop_context_fn)
    region = make()
    for _ in range(1 if make is HARMLESS["same"] else 2):
        assert torch.equal(run(region, contexts(check=check)), right)


def adds_to_it(self, x):
    self.load = (x @ x).detach() + self.load
    return (x @ x + self.load).sin().sum()


def makes_it_once(self, x):
    if self.load is None:
        self.load = torch.arange(3.0)
    return (x @ x + self.load).sin().sum()


def makes_it_another_way(self, x):
    out = (x @ x).sin() if self.load is None else (x @ x).cos()
    self.load = x
    return out.exp().sum()


def swaps(self, x):
    out = ((x @ x) * self.load).sin().sum()
    self.load, self.other = self.other, self.load
    return out


def deletes(self, x):
    out = ((x @ x) * getattr(self, "load", 1)).sin().sum()
    with contextlib.suppress(AttributeError):
        del self.load
    return out


def not_entered_again(self, x):
    x = x @ x
    if self.child.load is None:
        x = self.child(x)
    return x.sin().sum()


def counts(self, x):
    self.load = 1
    return (x @ x).sin().sum()


def leaves_out_the_last(self, x):
    out = (x @ x).sum()
    if self.load is None:
        out.cos()
    self.load = torch.ones(1)
    return out


def read_by_the_outer(self, x):
    return self.child((x @ x) * self.child.load)


def number_read_by_the_outer(self, x):
    """The child is entered after the end of the recompute."""
    return switch((x @ x * (1 if switch.load is None else 2)).exp()).sum()


child = Outer(lambda self, x: (setattr(self, "load", x.detach() * 2), x.sin().sum())[1])
switch = Outer(lambda self, x: (setattr(self, "load", 1), x * 2)[1], load=None)

FOUND = {
    "added": (outer(adds_to_it, load=torch.ones(3)), "Outer.load` was f32[3] when"),
    "once": (outer(makes_it_once, load=None), "Outer.load` was None when"),
    "way": (outer(makes_it_another_way, load=None), "Outer.load` was None when"),
    "swapped": (
        outer(swaps, load=torch.ones(3), other=torch.zeros(3)),
        "Outer.load` was f32[3] when the forward began and is f32[3] now",
    ),
    "deleted": (
        outer(deletes, load=torch.full((3,), 2.0)),
        "Outer.load` was f32[3] when the forward began and is absent now",
    ),
    "not_entered": (outer(not_entered_again, child=switch), "Outer.load` was None when"),
    "number": (outer(counts, load=0), "Outer.load` was 0 when the forward began and is 1 now"),
    "outer_number": (outer(number_read_by_the_outer), "Outer.load` was None when"),
    "outer": (outer(read_by_the_outer, child=child), "Outer.load` was "),
}


@both
@pytest.mark.parametrize(("make", "text"), FOUND.values(), ids=FOUND)
def test_what_the_recompute_would_do_otherwise_is_named(contexts, make, text):
    child.load, switch.load = torch.ones(3), None
    with pytest.raises(MutatedTensorError) as caught:
        run(make(), contexts())
    assert text in str(caught.value)


@both
def test_what_the_recompute_leaves_out_is_named_without_early_stop(contexts):
    with (
        torch_checkpoint.set_checkpoint_early_stop(False),
        pytest.raises(MutatedTensorError, match=r"Outer\.load` was None when"),
    ):
        run(Outer(leaves_out_the_last, load=None), contexts())


@both
def test_a_buffer_that_is_put_in_and_written_is_named(contexts):
    module = torch.nn.BatchNorm1d(3)
    put_in = {"running_mean": torch.zeros(3)}
    names = ("running_var", "num_batches_tracked")
    allow = {f"BatchNorm1d.{name}": "not read in training" for name in names}
    region = lambda x: (functional_call(module, put_in, x @ x) @ x).sin().sum()  # noqa: E731
    with pytest.raises(MutatedTensorError, match=r"BatchNorm1d\.running_mean -> f32\[3\]"):
        run(region, contexts(allow=allow))


@both
def test_a_change_is_told_once(contexts):
    told = []
    run(Outer(adds_to_it, load=torch.ones(3)), contexts(on_mutation=told.append))
    assert len(told) == 1


@both
def test_the_hook_on_modules_is_taken_off_when_the_recompute_ends(contexts):
    hooks = torch.nn.modules.module._global_forward_pre_hooks
    before = dict(hooks)
    run(called_with_captured(), contexts())
    for make in (FOUND["once"][0], FOUND["number"][0]):
        with pytest.raises(MutatedTensorError):
            run(make(), contexts())
    assert hooks == before


@both
def test_no_tensor_is_kept(contexts):
    module = Outer(keeps_a_result)
    run(module, contexts())
    kept = weakref.ref(module.cache)
    module.cache = module.loss = None
    gc.collect()
    assert kept() is None
