"""Watching a tensor itself, and not only the bytes that it lies on.

Who keeps a tensor minds also when it is given another storage, sizes or strides, which reaches no
byte and no other alias.
"""

from __future__ import annotations

import torch

from .ledger import Write, key_of
from .overlap import region_of
from .site import UNKNOWN, Place
from .watch import EXCHANGED, Watch


class OwnedWatch(Watch):
    """Watches bytes, and also a tensor that lies on them, for changes of its sizes and storage.

    Args:
        owner: the tensor; None watches bytes alone. It must outlive the watch, since it is known
            by its id.
        t: as for `Watch`, an alias of the owner, or the owner where there is a `counter`.
        op: as for `Watch`.
        place: as for `Watch`.
        content: as for `Watch`.
        counter: as for `Watch`.

    Attributes:
        changed: the last op that gave the owner another storage or other sizes.
    """

    __slots__ = ("_owner", "changed")

    def __init__(
        self,
        owner: torch.Tensor | None,
        t: torch.Tensor,
        op: str,
        place: Place,
        *,
        content: bool = False,
        counter: torch.Tensor | None = None,
    ) -> None:
        self._owner = None if owner is None else id(owner)
        self.changed: Write | None = None
        super().__init__(t, op, place, content=content, counter=counter)

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
        return self.changed or Write(EXCHANGED, "", UNKNOWN, "", None, None, None, 0)


class SavedWatch(OwnedWatch):
    """Watches what autograd saved for one call."""

    __slots__ = ()

    def ignore(self) -> None:
        """Let the bytes become what they will: the backward of the call does not read them."""
        self.release()
        self._content, self._digest, self._reached = False, None, None
        self._last = None
