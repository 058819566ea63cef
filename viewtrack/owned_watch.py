"""Watching a tensor itself, and not only the bytes that it lies on.

Who keeps a tensor minds also when it is given another storage, sizes or strides, which reaches no
byte and no other alias.
"""

from __future__ import annotations

import threading
import weakref
from typing import Any

import torch

from ._torch import neg_view, no_torch_function
from ._torch.guard import no_torch_dispatch
from .fingerprint import fingerprint
from .info import version
from .ledger import Write, key_of
from .overlap import region_of
from .watch import EXCHANGED, Watch, is_idempotent, unplaced, watched


class OwnedWatch(Watch):
    """Watches bytes, and also a tensor that lies on them, for changes of its sizes and storage.

    Args:
        owner: the tensor; None watches bytes alone. It must outlive the watch, since it is known
            by its id.
        t: an alias of the owner, or the owner where there is a `counter`.
        *args: as for `Watch`.
        **kwargs: as for `Watch`.

    Attributes:
        changed: the last op that gave the owner another storage or other sizes.
    """

    __slots__ = ("_owner", "changed")

    def __init__(
        self, owner: torch.Tensor | None, t: torch.Tensor, *args: Any, **kwargs: Any
    ) -> None:
        self._owner = None if owner is None else id(owner)
        self.changed: Write | None = None
        super().__init__(t, *args, **kwargs)

    def is_of(self, t: torch.Tensor) -> bool:
        """Whether t is the owner."""
        return self._owner == id(t)

    def note_change(self, write: Write) -> None:
        """Keep it, to tell later."""
        self.changed = write

    def is_exchanged(self, owner: torch.Tensor) -> bool:
        """Whether the owner was given another storage, or other sizes or strides."""
        if owner.layout is not torch.strided:
            return False
        return key_of(owner) != self.key or region_of(owner) != self.region

    def exchange(self) -> Write:
        """What gave the owner another storage or other sizes, once it is known that it has."""
        return self.changed or unplaced(EXCHANGED, None, None)


class _Unpacking(threading.local):
    """How many tensors are being unpacked in this thread, which recomputes a region, maybe.

    What a region writes in its recompute it wrote in its forward; if that was before a tensor was
    saved, the saved tensor is the result.
    """

    depth = 0

    def __enter__(self) -> None:
        self.depth += 1

    def __exit__(self, *exc: object) -> None:
        self.depth -= 1


unpacking = _Unpacking()


class _Saving(threading.local):
    """The tensor that is being saved in this thread, which several guards may watch."""

    depth = 0
    count = 0

    def __enter__(self) -> tuple[int, int]:
        self.count += not self.depth
        self.depth += 1
        return threading.get_ident(), self.count

    def __exit__(self, *exc: object) -> None:
        self.depth -= 1


saving = _Saving()


class SavedWatch(OwnedWatch):
    """Watches what autograd saved for one call.

    Args:
        owner: as for `OwnedWatch`.
        t: as for `OwnedWatch`.
        *args: as for `Watch`.
        saving: which thread saved it, and which of its tensors it was.
        copies: whether to keep a copy of the bytes before they are written.
        **kwargs: as for `Watch`.

    Attributes:
        copy: what was saved, if something has written to it since.
    """

    __slots__ = ("_bits", "copies", "copy", "saving")

    def __init__(
        self,
        owner: torch.Tensor | None,
        t: torch.Tensor,
        *args: Any,
        saving: tuple[int, int] = (0, 0),
        copies: bool = False,
        **kwargs: Any,
    ) -> None:
        self.saving = saving
        self.copy: torch.Tensor | None = None
        self.copies = copies
        self._bits = t.is_conj(), t.is_neg()
        super().__init__(owner, t, *args, **kwargs)

    def minds(self, write: Write) -> bool:
        """Whether it does not only do again what it has done."""
        return not (unpacking.depth > 0 and is_idempotent(write.op))

    def before_write(self, t: torch.Tensor, is_counted: bool) -> bool:
        """Keep a copy of what was saved, if it is still there."""
        if not self.copies:
            return False
        if self.copy is None:
            copy = self._copied(t)
            if is_counted:
                self._last = version(self.tensor)
            if self.writes(copy)[0]:
                return False  # written unseen
            self.copy = copy
            self.release()
        return True

    def _copied(self, t: torch.Tensor) -> torch.Tensor:
        region, dtype = self.region, self.saved.dtype
        is_conj, is_neg = self._bits
        with no_torch_dispatch(), no_torch_function(), torch.no_grad():
            memory = torch.empty(0, dtype=dtype, device=t.device)
            if region is not None:
                memory.set_(t.untyped_storage(), region.offset, region.size, region.stride)
            copy = memory.clone()
            copy = copy.conj() if is_conj else copy
            return neg_view(copy) if is_neg else copy

    def ignore(self) -> None:
        """Let the bytes become what they will: the backward of the call does not read them."""
        self.release()
        self._content, self._digest, self._reached = False, None, None
        self._last = None

    def lay_again(self, t: torch.Tensor) -> None:
        """Watch what was saved from here on: backward reads what it is by now.

        Args:
            t: what was saved.
        """
        if self._digest is not None:
            self._digest = fingerprint(t)
        self._last = version(self.tensor)
        watched[self._key] = (*watched.get(self._key, ()), weakref.ref(self))
