"""Random programs of views and writes, run by torch and by an oracle that knows bytes alone.

The oracle keeps numpy arrays, which share memory as the tensors should. It knows nothing of version
counters but these two rules: two tensors share a counter exactly when they share a storage (but
`.data` and `set_` start a counter of their own, on stock torch too), and a counter moves exactly
when a write reached the storage through one of them, once for each written argument.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from handlers import NoOp
from view_makers import below_autograd

import viewtrack as vt
from viewtrack import _torch

LIB = torch.library.Library("vt_programs", "DEF")
LIB.define("inc_(Tensor(a!) x) -> ()")
LIB.impl("inc_", lambda x: (x.add_(1), None)[1], "CompositeExplicitAutograd")
LIB.define("inc_all_(Tensor(a!)[] xs, Tensor(b!)? y) -> ()")
LIB.define("head(Tensor(a) x) -> Tensor(a)")
LIB.impl("head", lambda x: x[:1], "CompositeExplicitAutograd")
LIB.define("secret(Tensor x) -> Tensor")
LIB.impl("secret", lambda x: x.view(x.shape), "CompositeExplicitAutograd")


def _inc_all(xs, y):
    for t in (*xs, y):
        if t is not None:
            t.add_(1)


LIB.impl("inc_all_", _inc_all, "CompositeExplicitAutograd")
ours = torch.ops.vt_programs
aten = torch.ops.aten


@dataclass
class Pair:
    """A tensor, and the array that it is to equal.

    Attributes:
        tensor: what torch made.
        array: what the oracle made; shares memory with others as it should.
        storage: a number that all arrays in one memory have.
        counter: a number that all tensors with one counter are to have.
    """

    tensor: torch.Tensor
    array: Any
    storage: int
    counter: int


class Mismatch(AssertionError):
    """Torch and the oracle differ."""


# Each is (torch's function, numpy's function), of one argument, and gives a view.
VIEWS: dict[str, tuple[Callable[[Any], Any], Callable[[Any], Any]]] = {
    "head": (lambda t: t[: max(1, t.shape[0] - 1)], lambda a: a[: max(1, a.shape[0] - 1)]),
    "tail": (lambda t: t[t.shape[0] - 1 :], lambda a: a[a.shape[0] - 1 :]),
    "every other": (lambda t: t[..., ::2], lambda a: a[..., ::2]),
    "transpose": (lambda t: t.transpose(0, -1), lambda a: np.swapaxes(a, 0, -1)),
    "unsqueeze": (lambda t: t.unsqueeze(0), lambda a: a[None]),
    "view": (lambda t: t.view(t.shape), lambda a: a[...]),
    "detach": (lambda t: t.detach(), lambda a: a[...]),
    "alias": (lambda t: aten.alias(t), lambda a: a[...]),
    "last of split": (lambda t: t.split(1)[-1], lambda a: a[-1:]),
    "unflatten": (lambda t: t.unflatten(0, (1, -1)), lambda a: a[None]),
    "_unsafe_view": (lambda t: aten._unsafe_view(t, t.shape), lambda a: a[...]),
    "library": (lambda t: ours.head(t), lambda a: a[:1]),
    "library, undeclared": (lambda t: ours.secret(t), lambda a: a[...]),
}

# Each is (torch's function, numpy's function), of one argument that it writes.
WRITES: dict[str, tuple[Callable[[Any], Any], Callable[[Any], Any]]] = {
    "add_": (lambda t: t.add_(1), lambda a: np.add(a, 1, out=a)),
    "mul_": (lambda t: t.mul_(2), lambda a: np.multiply(a, 2, out=a)),
    "zero_": (lambda t: t.zero_(), lambda a: a.fill(0)),
    "relu_": (lambda t: torch.relu_(t), lambda a: np.maximum(a, 0, out=a)),
    "setitem": (lambda t: t.__setitem__(0, 5), lambda a: a.__setitem__(0, 5)),
    "neg out=": (lambda t: torch.neg(t, out=t), lambda a: np.negative(a, out=a)),
    "composite": (lambda t: aten.clip_(t, -3, 3), lambda a: np.clip(a, -3, 3, out=a)),
    "foreach": (lambda t: torch._foreach_add_([t], 1), lambda a: np.add(a, 1, out=a)),
    "library": (lambda t: ours.inc_(t), lambda a: np.add(a, 1, out=a)),
    "library, list": (lambda t: ours.inc_all_([t], None), lambda a: np.add(a, 1, out=a)),
    "library, optional": (lambda t: ours.inc_all_([], t), lambda a: np.add(a, 1, out=a)),
}

# Each is (torch's function, numpy's function), of two arguments that it writes.
PAIR_WRITES: dict[str, tuple[Callable[[Any, Any], Any], Callable[[Any, Any], Any]]] = {
    "foreach": (
        lambda t, u: torch._foreach_add_([t, u], 1),
        lambda a, b: (np.add(a, 1, out=a), np.add(b, 1, out=b)),
    ),
    "library": (
        lambda t, u: ours.inc_all_([t], u),
        lambda a, b: (np.add(a, 1, out=a), np.add(b, 1, out=b)),
    ),
}

# Each is (torch's function, numpy's function), and gives new memory.
FRESH: dict[str, tuple[Callable[[Any], Any], Callable[[Any], Any]]] = {
    "mul": (lambda t: t.mul(2), lambda a: a * np.int32(2)),
    "clone": (lambda t: t.clone(), lambda a: a.copy()),
    "neg": (lambda t: -t, lambda a: -a),
}

STEPS = [
    *(("view", name) for name in VIEWS),
    *(("write", name) for name in WRITES),
    *(("pair", name) for name in PAIR_WRITES),
    *(("fresh", name) for name in FRESH),
    ("copy", ""),
    ("add_out", ""),
    ("apart", ".data"),
    ("apart", "set_"),
]


def in_a_mode(body):
    with NoOp():
        return body()


PLACES: dict[str, Callable[[Callable[[], Any]], Any]] = {
    "above": lambda body: body(),
    "in a mode": in_a_mode,
    "in a handler": below_autograd,
    "in a handler, in a mode": lambda body: below_autograd(lambda: in_a_mode(body)),
    "in a handler, below a mode": lambda body: in_a_mode(lambda: below_autograd(body)),
    "in a handler of a handler": lambda body: below_autograd(lambda: below_autograd(body)),
}

POOL = 8


class Program:
    """Runs steps with torch and with the oracle, and compares after each."""

    def __init__(self, under: Callable[[], Any] = vt.track) -> None:
        self.under = under
        self.numbers = itertools.count()
        self.writes: dict[int, int] = {}
        self.pool: list[Pair] = []
        for start in (1, -2):
            array = (np.arange(6, dtype=np.int32) + np.int32(start)).reshape(2, 3)
            self.add(torch.from_numpy(array.copy()).clone(), array)

    def add(self, tensor, array, storage=None, counter=None):
        storage = next(self.numbers) if storage is None else storage
        counter = next(self.numbers) if counter is None else counter
        self.writes.setdefault(storage, 0)
        self.pool.append(Pair(tensor, array, storage, counter))
        del self.pool[:-POOL]

    def run(self, steps) -> None:
        with self.under():
            for step in steps:
                self.step(*step)
        self.compare_counters()

    def step(self, step, first, second, place) -> None:
        (kind, name), issue = step, PLACES[place]
        x = self.pool[first % len(self.pool)]
        y = self.pool[second % len(self.pool)]
        before = [pair.tensor._version for pair in self.pool]
        pool = list(self.pool)
        written = getattr(self, f"_{kind}")(issue, name, x, y)
        for pair, was in zip(pool, before, strict=True):
            expected = sum(w.counter == pair.counter for w in written)
            if pair.tensor._version - was != expected:
                moved = pair.tensor._version - was
                raise Mismatch(f"{kind} {name} {place}: {moved} moves, not {expected}")
        for pair in self.pool:
            if pair.tensor.detach().numpy().tobytes() != pair.array.tobytes():
                raise Mismatch(f"{kind} {name} {place}: {pair.tensor} is not {pair.array}")

    def _view(self, issue, name, x, y):
        in_torch, in_numpy = VIEWS[name]
        if x.array.ndim > 4:  # every unsqueeze adds one
            return []
        self.add(issue(lambda: in_torch(x.tensor)), in_numpy(x.array), x.storage, x.counter)
        return []

    def _write(self, issue, name, x, y):
        in_torch, in_numpy = WRITES[name]
        issue(lambda: in_torch(x.tensor))
        in_numpy(x.array)
        self.writes[x.storage] += 1
        return [x]

    def _pair(self, issue, name, x, y):
        in_torch, in_numpy = PAIR_WRITES[name]
        issue(lambda: in_torch(x.tensor, y.tensor))
        in_numpy(x.array, y.array)
        for pair in (x, y):
            self.writes[pair.storage] += 1
        return [x, y]

    def _fresh(self, issue, name, x, y):
        in_torch, in_numpy = FRESH[name]
        self.add(issue(lambda: in_torch(x.tensor)), in_numpy(x.array))
        return []

    def _copy(self, issue, name, x, y):
        source = y if y.array.shape == x.array.shape and y.storage != x.storage else None
        if source is None:
            issue(lambda: x.tensor.copy_(torch.tensor(7)))
            x.array[...] = 7
        else:
            issue(lambda: x.tensor.copy_(source.tensor))
            x.array[...] = source.array
        self.writes[x.storage] += 1
        return [x]

    def _add_out(self, issue, name, x, y):
        if y.array.shape != x.array.shape or y.storage == x.storage:
            y = x
        issue(lambda: torch.add(y.tensor, 1, out=x.tensor))
        np.add(y.array, 1, out=x.array)
        self.writes[x.storage] += 1
        return [x]

    def _apart(self, issue, name, x, y):
        alias = x.tensor.data if name == ".data" else torch.zeros_like(x.tensor).set_(x.tensor)
        self.add(alias, x.array[...], x.storage)
        return []

    def compare_counters(self) -> None:
        for pair in self.pool:
            for other in self.pool:
                storages = [p.tensor.untyped_storage()._cdata for p in (pair, other)]
                if (storages[0] == storages[1]) != (pair.storage == other.storage):
                    raise Mismatch("storages")
        for number, pair in enumerate(self.pool):
            _torch.set_version(pair.tensor, number)
        groups: dict[int, set[int]] = {}
        for pair in self.pool:
            groups.setdefault(pair.counter, set()).add(pair.tensor._version)
        versions = [v for group in groups.values() for v in group]
        if any(len(group) != 1 for group in groups.values()) or len(set(versions)) != len(groups):
            raise Mismatch(f"counters: {groups}")

    def compare_ledger(self) -> None:
        for pair in self.pool:
            if vt.storage_version(pair.tensor) != self.writes[pair.storage]:
                raise Mismatch("the ledger has another number of writes")
