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


def _numpy(a: torch.Tensor) -> None:
    a.detach().numpy()[...] = -3.0


def _pointer(a: torch.Tensor) -> None:
    ctypes.memset(a.data_ptr(), 0, a.numel() * a.element_size())


def _collective(a: torch.Tensor) -> None:
    dist.scatter(a, [torch.full_like(a, -3.0)], 0)


OPS = [
    Op("mul_", lambda a: a.mul_(2)),
    Op("iadd", _add_in_place),
    Op("setitem", _set_item),
    Op("copy_", lambda a: a.copy_(torch.full_like(a, -3.0))),
    Op("out", lambda a: torch.add(torch.ones_like(a), 1.5, out=a)),
    Op("foreach", lambda a: torch._foreach_mul_([a], 2.0)),
    Op("fused_sgd", _fused_sgd, counted=False),
    Op("resize_and_refill", _resize_and_refill),
    Op("set_and_write", _set_and_write, counted=False),
    Op("declared_custom_op", lambda a: torch.ops.write_ways.declared(a), counted=False),
    Op("undeclared_custom_op", lambda a: torch.ops.write_ways.undeclared(a), False, False),
    Op("numpy", _numpy, False, False),
    Op("pointer", _pointer, False, False),
    Op("collective", _collective, counted=False),
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


def here(write: Callable[[], Any]) -> None:
    """By the line that asks for it."""
    with torch.no_grad():
        write()


def in_handler(write: Callable[[], Any]) -> None:
    """In the handler of another mode."""
    with HandlerWrites(write):
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
