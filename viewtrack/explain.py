"""`explain`: everything that is known of one tensor, for people.

What an in-place op would do follows ``check_inplace`` and ``handle_view_on_rebase``
(VariableTypeUtils.h, variable.cpp).
"""

from __future__ import annotations

import gc
from collections.abc import Iterator

import torch

from ._torch import CreationMeta
from ._torch.nested import is_strided_nested
from .aliasing import brief
from .info import ViewInfo, version, view_info
from .ledger import Write, key_of, ledger
from .notes import REFUSED, made_at

_ALIASES_SHOWN = 5
_WRITES_SHOWN = 10


def explain(t: torch.Tensor) -> str:
    """Tell what `t` is a view of, who shares its memory, who wrote to it, what a write would do.

    For reading at a breakpoint. It looks at every object that Python knows to find the aliases, so
    it takes a while in a large program.

    Args:
        t: any tensor.

    Returns:
        Lines of text: the tensor, its base, its storage, the aliases that Python can see, the last
        writes in the ledger (of what ran under `track`), and what an in-place op on it would do in
        the current grad mode, with the reason.
    """
    info = view_info(t)
    lines = [f"{_brief(t)} on {t.device}, version {_version(t)}, requires_grad={t.requires_grad}"]
    lines += _lines("view", [_view(info)] if info else ["no differentiable view"])
    lines += _lines("storage", [_storage(t)])
    lines += _lines("aliases", _aliases(t))
    lines += _lines("writes", [_write(w) for w in ledger.writes(t)[-_WRITES_SHOWN:]])
    lines += _lines("in-place", [_inplace(t, info)])
    return "\n".join(lines)


def _lines(title: str, texts: list[str]) -> list[str]:
    return [
        f"  {title if index == 0 else '':<9} {text}" for index, text in enumerate(texts or ["none"])
    ]


def _brief(t: torch.Tensor) -> str:
    return brief(t).removeprefix("torch.")


def _version(t: torch.Tensor) -> str:
    number = version(t)
    return "none (an inference tensor)" if number is None else str(number)


def _view(info: ViewInfo) -> str:
    base = f"of {_brief(info.base)}" if info.base is not None else "of a tensor that is gone"
    modes = [
        name
        for name, is_it in (
            ("gradients", info.is_bw_differentiable),
            ("tangents", info.is_fw_differentiable),
        )
        if is_it
    ]
    flow = f"{' and '.join(modes)} flow" if modes else "only the version counter is shared"
    replay = " by its view_fn" if info.view_fn is not None else ""
    return f"{base}; {flow}{replay}; creation_meta {info.creation_meta.name}"


def _storage(t: torch.Tensor) -> str:
    if key_of(t) == id(t):
        return "none of its own"
    used, total = t.numel() * t.element_size(), t.untyped_storage().nbytes()
    return f"{used} of {total} bytes used; {ledger.count(t)} writes known"


def _aliases(t: torch.Tensor) -> list[str]:
    found = list(_others(t))
    texts = [f"{_brief(other)}, version {_version(other)}" for other in found[:_ALIASES_SHOWN]]
    more = len(found) - len(texts)
    return texts + ([f"and {more} more"] if more else [])


def _others(t: torch.Tensor) -> Iterator[torch.Tensor]:
    key = key_of(t)
    for other in gc.get_objects():
        if issubclass(type(other), torch.Tensor) and other is not t and key_of(other) == key:
            yield other


def _write(write: Write) -> str:
    return (
        f"{write.op}({write.argument}) at {write.site}, "
        f"version {write.version_before} -> {write.version_after}, thread {write.thread}"
    )


def _inplace(t: torch.Tensor, info: ViewInfo | None) -> str:
    if t.is_inference() and not torch.is_inference_mode_enabled():
        return "refused: an inference tensor may only be written in inference_mode; clone it"
    if _is_expanded(t):
        return "refused: several of its elements are one place in memory (expand); clone it"
    if not torch.is_grad_enabled():
        return "allowed: grad mode is off, so the history stays as it is"
    meta = info.creation_meta if info is not None else CreationMeta.DEFAULT
    if info is not None and info.is_bw_differentiable and meta is not CreationMeta.DEFAULT:
        when = "refused" if t.requires_grad else "allowed, unless an operand requires grad"
        return f"{when}: {REFUSED[meta.name]}{_made(t, meta)}"
    base = info.base if info is not None and info.is_bw_differentiable else None
    if t.requires_grad and (t if base is None else base).is_leaf:
        leaf = "it is a leaf" if base is None else "its base is a leaf"
        return f"refused: {leaf} that requires grad; write it under torch.no_grad()"
    if base is not None and t.requires_grad and (is_strided_nested(t) or is_strided_nested(base)):
        return (
            "refused: CopySlices asks a nested tensor of layout strided for sizes, which it does "
            "not have; let it be a view of its buffer (`mark_as_view`), and write `.values()` of it"
        )
    if base is not None:
        return "allowed: the history of its base is rewritten (CopySlices), and its own with it"
    return "allowed: its grad_fn becomes that of the op"


def _made(t: torch.Tensor, meta: CreationMeta) -> str:
    made = made_at(t) if meta is CreationMeta.MULTI_OUTPUT_NODE else []
    return "".join(f"; {op} at {site}" for op, site in made[:1])


def _is_expanded(t: torch.Tensor) -> bool:
    try:
        return any(n > 1 and step == 0 for n, step in zip(t.size(), t.stride(), strict=False))
    except (RuntimeError, NotImplementedError):  # sparse, nested
        return False
