"""A fingerprint of a tensor's bytes, to tell later whether they are still the same.

The bytes are read as 32-bit integers in rows of 256 and multiplied with weights in float64. Sums of
that size are exact in any order, so the result is the same on every run and with any number of
threads; weights that all differ make an exchange of two elements show. It costs one pass over the
memory, and a 128th of it is kept. XOR, as ``torch.hash_tensor`` has it, would be no faster, and
takes a constant tensor of even size for any other such.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from . import _torch
from ._torch import guard as _torch_guard
from ._torch.nested import is_strided_nested, places

_ROW = 256
# 32 bits of data, 13 of weight and 8 of row length make 53, which is what a float64 holds.
_WEIGHT = 8192
# Few rows are held against a second set of weights as well; there it costs next to nothing.
_FEW = 16384


def fingerprint(t: torch.Tensor) -> Any:
    """The fingerprint of t's bytes.

    Args:
        t: any tensor.

    Returns:
        What `same_bytes` compares; None for a tensor without bytes (meta, fake, sparse), which is
        the same as any other.
    """
    with _torch.no_torch_function(), _torch_guard.no_torch_dispatch(), torch.no_grad():
        if not _has_bytes(t):
            return None
        if is_strided_nested(t):
            t = _in_one(t)
        else:
            _torch_guard.wait_for(t)
        words = _words(t.detach())
        first, second = _weights(words.device)
        sums = _sums(words, first)
        return sums if words.numel() > _FEW else torch.cat([sums, _sums(words, second)])


def _in_one(t: torch.Tensor) -> torch.Tensor:
    """A copy of the parts of a strided nested tensor, which has no sizes and strides of its own."""
    memory = torch.empty(0, dtype=t.dtype, device=t.device).set_(t.untyped_storage())
    if not t.numel():
        return memory[:0]
    return torch.cat([memory.as_strided(*place).reshape(-1) for place in places(t)])


def _sums(words: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    whole = words.numel() // _ROW * _ROW
    rows = words[:whole].view(-1, _ROW).to(torch.float64) @ weights
    if whole == words.numel():
        return rows
    rest = words[whole:].to(torch.float64) @ weights[: words.numel() - whole]
    return torch.cat([rows, rest.view(1)])


def same_bytes(a: Any, b: Any) -> bool:
    """Whether two fingerprints are those of the same bytes."""
    if a is None or b is None:
        return True
    with _torch.no_torch_function(), _torch_guard.no_torch_dispatch():
        return a.shape == b.shape and torch.equal(a, b)


def _has_bytes(t: torch.Tensor) -> bool:
    if t.layout is not torch.strided or t.device.type == "meta" or t.is_quantized:
        return False
    try:
        return t.numel() == 0 or t.data_ptr() != 0
    except RuntimeError:  # fake and functional tensors
        return False


def _words(t: torch.Tensor) -> torch.Tensor:
    flat = t.resolve_conj().resolve_neg().contiguous().view(-1)
    if t.device.type == "mps":  # which has no float64
        flat = flat.cpu()
    if flat.element_size() == 4 and not flat.is_complex():
        return flat.view(torch.int32)
    raw = flat.view(torch.uint8)
    if raw.numel() % 4 == 0 and raw.storage_offset() % 4 == 0:
        return raw.view(torch.int32)
    return raw


@functools.cache
def _weights(device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    order = torch.randperm(_WEIGHT - 1, generator=generator, device="cpu")
    first, second = (order[:_ROW] + 1).double(), (order[_ROW : 2 * _ROW] + 1).double()
    return first.to(device), second.to(device)
