"""Every way to write to a tensor that the guard is held to, as tables to cross.

A way to write is an alias of the target, an op that writes to the alias, and a place in the program
where it happens. Each op writes all of the alias, and other values than were there.
"""

from __future__ import annotations

import contextlib
import ctypes
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives  # registers its ops
from torch.utils._python_dispatch import TorchDispatchMode

import viewtrack as vt

Alias = Callable[[torch.Tensor], torch.Tensor]


def _add_to_memory(x: torch.Tensor) -> None:
    x.detach().numpy().__iadd__(1)


def _add_and_sum(x: torch.Tensor) -> torch.Tensor:
    _add_to_memory(x)
    return torch.tensor(float(x.detach().numpy().sum()))


_library = torch.library.Library("write_ways", "DEF")
_library.define("declared(Tensor(a!) x) -> ()")
_library.define("undeclared(Tensor x) -> Tensor")
_library.impl("declared", _add_to_memory, "CPU")
_library.impl("undeclared", _add_and_sum, "CPU")

_add_in_custom_op = torch.library.custom_op(
    "write_ways::custom", _add_to_memory, mutates_args=("x",)
)


@dataclass(frozen=True)
class Op:
    """An op that writes to its argument.

    `seen` tells whether a mode sees the write, `counted` whether it moves the counter without any
    mode.
    """

    name: str
    write: Callable[[torch.Tensor], Any]
    seen: bool = True
    counted: bool = True


ALIASES: dict[str, Alias] = {
    "itself": lambda t: t,
    "view": lambda t: t.view(-1),
    "view_of_view": lambda t: t.view(-1).view(t.shape)[:],
    "unsafe_view": lambda t: torch.ops.aten._unsafe_view.default(t, (-1,)),
    "detach": lambda t: t.detach(),
    "data": lambda t: t.data,
    "no_grad_view": lambda t: t.view(-1),
}

# Made where no mode is, these have a counter of their own.
OWN_COUNTER = {"unsafe_view", "data"}


def _add_in_place(a: torch.Tensor) -> None:
    a += 1


def _set_item(a: torch.Tensor) -> None:
    a[...] = -3.0


def _resize_and_refill(a: torch.Tensor) -> None:
    size, a = a.shape, a.detach()
    a.resize_(a.numel())
    a.resize_(size)
    a.fill_(-3.0)


def _set_and_write(a: torch.Tensor) -> None:
    other = torch.empty(0)
    other.set_(a.detach())
    other.fill_(-3.0)


def _fused_sgd(a: torch.Tensor) -> None:
    torch._fused_sgd_(
        [a], [torch.ones_like(a)], [], weight_decay=0.0, momentum=0.0, lr=0.5, dampening=0.0,
        nesterov=False, maximize=False, is_first_step=True,
    )  # fmt: skip


def _adam(a: torch.Tensor) -> list[list[torch.Tensor]]:
    state = [torch.zeros_like(a)], [torch.zeros_like(a)], []
    return [[a], [torch.ones_like(a)], *state, [torch.tensor(1.0)]]


_ADAM = {
    "lr": 0.5,
    "beta1": 0.9,
    "beta2": 0.99,
    "weight_decay": 0.0,
    "eps": 1e-8,
    "amsgrad": False,
    "maximize": False,
}


def _fused_adagrad(a: torch.Tensor) -> None:
    torch._fused_adagrad_(
        [a], [torch.ones_like(a)], [torch.zeros_like(a)], [torch.tensor(1.0)],
        lr=0.5, lr_decay=0.0, weight_decay=0.0, eps=1e-8, maximize=False,
    )  # fmt: skip


def _numpy(a: torch.Tensor) -> None:
    a.detach().numpy()[...] = -3.0


def _pointer(a: torch.Tensor) -> None:
    ctypes.memset(a.data_ptr(), 0, a.numel() * a.element_size())


def _collective(a: torch.Tensor) -> None:
    dist.scatter(a, [torch.full_like(a, -3.0)], 0)


def _all_gather(a: torch.Tensor) -> None:
    dist.all_gather([a], torch.full_like(a, -3.0))


def _reduce_scatter(a: torch.Tensor) -> None:
    dist.reduce_scatter_tensor(a, torch.full_like(a, -3.0), async_op=True).wait()


def _functional_collective(a: torch.Tensor) -> None:
    ops, group = torch.ops._c10d_functional, dist.group.WORLD.group_name
    given = torch.full_like(a, -3.0)
    ops.wait_tensor(ops.all_gather_into_tensor_out(given, 1, group, out=a))


OPS = [
    Op("mul_", lambda a: a.mul_(2)),
    Op("iadd", _add_in_place),
    Op("setitem", _set_item),
    Op("copy_", lambda a: a.copy_(torch.full_like(a, -3.0))),
    Op("out", lambda a: torch.add(torch.ones_like(a), 1.5, out=a)),
    Op("foreach", lambda a: torch._foreach_mul_([a], 2.0)),
    Op("fused_sgd", _fused_sgd, counted=False),
    Op("fused_adam", lambda a: torch._fused_adam_(*_adam(a), **_ADAM), counted=False),
    Op("fused_adamw", lambda a: torch._fused_adamw_(*_adam(a), **_ADAM), counted=False),
    Op("fused_adagrad", _fused_adagrad, counted=False),
    Op("resize_and_refill", _resize_and_refill),
    Op("set_and_write", _set_and_write, counted=False),
    Op("declared_custom_op", lambda a: torch.ops.write_ways.declared(a), counted=False),
    Op("torch_custom_op", lambda a: _add_in_custom_op(a.detach())),
    Op("undeclared_custom_op", lambda a: torch.ops.write_ways.undeclared(a), False, False),
    Op("numpy", _numpy, False, False),
    Op("pointer", _pointer, False, False),
    Op("collective", _collective, counted=False),
    Op("all_gather", _all_gather),
    Op("reduce_scatter", _reduce_scatter),
    Op("functional", _functional_collective),
]


@contextlib.contextmanager
def one_process_group(path: Any) -> Iterator[None]:
    """A gloo group of this process alone."""
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


class HandlerWrites(TorchDispatchMode):
    """A mode whose handler writes, once."""

    def __init__(self, write: Callable[[], Any]) -> None:
        super().__init__()
        self.write: Callable[[], Any] | None = write

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if self.write is not None:
            write, self.write = self.write, None
            write()
        return func(*args, **(kwargs or {}))


OUTER = HandlerWrites(lambda: None)
"""For `in_outer_handler`, to be entered before a region is."""


def here(write: Callable[[], Any]) -> None:
    """By the line that asks for it."""
    with torch.no_grad():
        write()


def in_handler(write: Callable[[], Any]) -> None:
    """In the handler of another mode."""
    with HandlerWrites(write):
        torch.zeros(()).sin()


def in_outer_handler(write: Callable[[], Any]) -> None:
    """In the handler of a mode that is entered around the region: see `outer_handler`."""
    OUTER.write = write
    torch.zeros(()).sin()


def in_tracked_thread(write: Callable[[], Any]) -> None:
    """In another thread, under a tracker."""

    def work() -> None:
        with vt.track(record="none"), torch.no_grad():
            write()

    thread = threading.Thread(target=work, name="tracked")
    thread.start()
    thread.join()


def in_bare_thread(write: Callable[[], Any]) -> None:
    """In another thread, where no mode is."""
    thread = threading.Thread(target=torch.no_grad()(write))
    thread.start()
    thread.join()


def line_of(write: Callable[..., Any]) -> set[tuple[str, int]]:
    """The lines that a function of this file may be said to write at."""
    code = write.__code__
    return {(code.co_filename, line) for _, _, line in code.co_lines() if line is not None}
