"""What was started beside the recorded thread, and so is not in the report.

PyTorch keeps the stack of dispatch modes per thread. A forked process inherits it, but what is
noted there stays there. Whether a thread runs ops cannot be told from outside; that it was started
can, and a report that finds nothing should not hide it.
"""

from __future__ import annotations

import functools
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any


class Unseen:
    """Notes what is started while it watches.

    Attributes:
        threads: the names of the threads that were started by `threading`, in order.
        processes: how many processes were forked.
    """

    def __init__(self) -> None:
        self.threads: list[str] = []
        self.processes = 0

    @contextmanager
    def watch(self) -> Iterator[None]:
        """Watch this process until the context is left."""
        forks = _forks()
        before = forks.count
        own = threading.getprofile()

        def note(frame: FrameType, event: Any, arg: Any) -> None:
            self.threads.append(threading.current_thread().name)
            sys.setprofile(own)  # the thread goes on as it would have without us
            if own is not None:
                own(frame, event, arg)

        threading.setprofile(note)
        try:
            yield
        finally:
            if threading.getprofile() is note:  # else the program has put its own there
                threading.setprofile(own)
            self.processes += forks.count - before


class _Forks:
    """How many processes this one has forked, since somebody asked first."""

    def __init__(self) -> None:
        self.count = 0
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_parent=self._add)

    def _add(self) -> None:
        self.count += 1


@functools.cache  # what is registered there cannot be taken back
def _forks() -> _Forks:
    return _Forks()
