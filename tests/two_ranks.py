"""Two processes of a gloo group: what one process alone cannot show. See `test_collectives.py`.

python tests/two_ranks.py RANK STORE
"""

from __future__ import annotations

import functools
import sys

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

import viewtrack as vt

SAVED = [
    torch.ops._c10d_functional.all_gather_into_tensor.default,
    torch.ops._c10d_functional.all_reduce.default,
    torch.ops.aten.mm.default,
]


def sends_and_receives(rank: int) -> None:
    """Point to point, and what gloo does otherwise where there is somebody else."""
    for name, receive in {
        "recv": lambda t: dist.recv(t, 1 - rank),
        "recv_any": lambda t: dist.recv(t),
        "irecv": lambda t: dist.irecv(t, 1 - rank).wait(),
    }.items():
        t = torch.zeros(3)
        sent = dist.isend(torch.full((3,), 1.0 + rank), 1 - rank)
        with vt.track():
            receive(t)
        sent.wait()
        check(name, t, [2.0 - rank] * 3)
    t, pieces = torch.zeros(2), torch.zeros(2)
    with vt.track():
        dist.reduce_scatter_tensor(t, torch.ones(4))
        dist.all_gather(list(pieces.chunk(2)), torch.ones(1) * rank)
    check("reduce_scatter_tensor", t, [2.0, 2.0])
    check("pieces of one buffer", pieces, [0.0, 1.0])


def check(name: str, t: torch.Tensor, values: list[float]) -> None:
    if (t.tolist(), t._version) != (values, 1):
        raise AssertionError(f"{name}: {t.tolist()}, version {t._version}")


def region(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """Caches results that are not there yet when they are cached."""
    h = x @ w
    g = functional.all_reduce(h.detach(), "sum", dist.group.WORLD)
    k = functional.all_gather_tensor(h.detach().sin(), 0, dist.group.WORLD)
    return ((h * g) @ w + k[: len(h)]).exp().sum()


def results_in_flight() -> None:
    """A cache that has a result before its bytes are there: no alarm, and the right gradient."""
    stock = functools.partial(create_selective_checkpoint_contexts, SAVED)
    ours = functools.partial(vt.checkpoint.create_selective_checkpoint_contexts, SAVED)
    grads = []
    for contexts in (
        stock,
        ours,
        functools.partial(ours, check="content"),
        vt.checkpoint.guard(stock),
        vt.checkpoint.guard(stock, check="content"),
    ):
        torch.manual_seed(0)
        x = torch.randn(256, 64).div_(30).requires_grad_()
        w = torch.randn(64, 64).div_(8).requires_grad_()
        checkpoint(region, x, w, use_reentrant=False, context_fn=contexts).backward()
        grads.append([x.grad, w.grad])
    for check_level in ("storage", "content"):
        x.grad = w.grad = None
        with vt.guard_saved_tensors(check=check_level):
            region(x, w).backward()
        grads.append([x.grad, w.grad])
    for found in grads[1:]:
        torch.testing.assert_close(found, grads[0])


def main(rank: int, store: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    sends_and_receives(rank)
    results_in_flight()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
