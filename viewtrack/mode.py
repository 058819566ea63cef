"""`track`: version counters and views that are right below autograd too.

`tracking.py` has the mode that does it; here is who switches it on, and when.
"""

from __future__ import annotations

import functools
import logging
import sys
import threading
from collections.abc import Callable
from contextlib import ExitStack
from types import TracebackType
from typing import Literal, ParamSpec, TypeVar

from . import _torch, full_modes, handlers_above, mode_frames, rules
from .anchors import drop_anchor, weigh_anchor
from .decorate import tracked_calls
from .errors import ViewTrackError
from .notes import add_notes
from .register_hook import mend as register_hook_mend
from .site import Site
from .tracking import TrackingMode

log = logging.getLogger(__name__)

P = ParamSpec("P")
R = TypeVar("R")
Record = Literal["none", "site", "stack"]
Views = Literal["version", "full"]
_LEVELS: dict[str, int] = {"none": 0, "site": 1, "stack": 2}


class Tracker:
    """What `track` returns: a context manager, a decorator, and afterwards what was found.

    Attributes:
        record: how much is recorded of each write, ``"none"``, ``"site"`` or ``"stack"``.
        views: what becomes of views made below autograd, ``"version"`` or ``"full"``.
        undeclared_aliases: for each op that was found to return memory of its argument without
            its schema saying so, by name, the line that first called it.
    """

    #: A mode of its own, for a tracker that wants to be told of every op (`observing.py`).
    own_mode: TrackingMode | None = None

    #: Whether results of `_unsafe_view` share their base's counter. Torch's selective checkpointing
    #: notices: a tracker that only looks on must not make it refuse what it lets pass.
    joins_unsafe_views = True

    def __init__(self, record: Record = "site", views: Views = "version") -> None:
        self.record = record
        self.views = views
        self.undeclared_aliases: dict[str, Site] = {}

    def __enter__(self) -> Tracker:
        active.enter(self)
        drop_anchor(sys._getframe(1))
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None = None,
        error: BaseException | None = None,
        traceback: TracebackType | None = None,
    ) -> None:
        weigh_anchor(sys._getframe(1))
        active.leave(self)
        add_notes(error, traceback)

    def __call__(self, fn: Callable[P, R]) -> Callable[P, R]:
        """Run each call of `fn` tracked; of a generator or coroutine function, each step.

        Raises:
            TypeError: `fn` is a class or an async generator function.
        """
        return tracked_calls(self, fn)


def track(views: Views = "version", record: Record = "site") -> Tracker:
    """Track views and writes below autograd, in everything that runs inside.

    Use it as ``with viewtrack.track() as tracker:`` or as a decorator, ``@viewtrack.track()``.
    Enter it before (outside) the dispatch modes whose handlers are to be tracked: ops that the
    handlers of already active modes issue do not reach it, and it logs that once.

    Inside, code that user code can see behaves as on stock torch without any mode. In addition, in
    any ``__torch_dispatch__`` handler, every view shares its base's version counter, and every
    write moves the counters that it would move above autograd. An error of torch's that some tensor
    was modified in place gets a note, when it leaves the tracker, of the lines that wrote; one that
    refuses to write a view, of the line that made the view, and of the mend.

    Semantics: NOTE [ Autograd View Variables ] in torch/csrc/autograd/variable.h; pytorch#96319.

    Args:
        views: ``"version"``: views made below autograd share the version counter of their base.
            ``"full"``: those that a handler keeps also become differentiable views, as if made
            above autograd, once the op that the handler was called for has returned. Like any view
            they then hold their base, and require grad if it does. It slows handlers down.
        record: what the ledger keeps of each write: nothing (``"none"``, which costs nothing), op
            and line (``"site"``), or also the whole Python stack (``"stack"``).

    Returns:
        A `Tracker`. Trackers may be nested and entered more than once; the outermost one acts.

    Raises:
        ValueError: an argument has none of the values above.
        TypeError: it was used as a decorator without parentheses.
    """
    if callable(views):
        raise TypeError("track: use it with parentheses, `@viewtrack.track()`")
    if views not in ("version", "full"):
        raise ValueError(f"track: `views` must be 'version' or 'full', got {views!r}")
    if record not in _LEVELS:
        raise ValueError(f"track: `record` must be 'none', 'site' or 'stack', got {record!r}")
    return Tracker(record, views)


class Onlooker(Tracker):
    """A tracker for who looks at writes by their storage, and needs no counter for it."""

    joins_unsafe_views = False


class _Active(threading.local):
    """The trackers that are active in a thread. One mode acts for all of them."""

    def __init__(self) -> None:
        self._on_leaving = ExitStack()
        self.trackers: list[Tracker] = []
        self._full = False
        self._plain_mode = self.mode = TrackingMode(self.found_alias)

    def enter(self, tracker: Tracker) -> None:
        if not self.trackers:
            if _torch.mode_stack_len():
                _say_entered_above()
            if _torch.below_autograd():
                self._on_leaving.enter_context(_torch.marked_as_handler())
            register_hook_mend.acquire()
            self.mode = tracker.own_mode or self._plain_mode
            self.mode.__enter__()
            mode_frames.start()
            rules.exchange.acquire()
            handlers_above.start(self.mode)
        self.trackers.append(tracker)
        self.mode.known_aliases.clear()  # each tracker is told
        self._update()

    def leave(self, tracker: Tracker) -> None:
        # By identity and from the end: a generator may leave its tracker after an outer one.
        for index in reversed(range(len(self.trackers))):
            if self.trackers[index] is tracker:
                del self.trackers[index]
                break
        else:
            raise ViewTrackError(
                "track: this tracker is not active in this thread; leave it where it was entered"
            )
        try:
            self._update()
        finally:
            if not self.trackers:
                handlers_above.stop(self.mode)
                rules.exchange.release()
                mode_frames.stop()
                self.mode.__exit__(None, None, None)
                self._on_leaving.close()
                register_hook_mend.release()

    def found_alias(self, op: str, site: Site) -> None:
        """Tell the trackers of an op that returned memory of its argument undeclared."""
        log.info("%s returned memory of its argument undeclared, at %s", op, site)
        for tracker in self.trackers:
            tracker.undeclared_aliases.setdefault(op, site)

    def _update(self) -> None:
        full = any(t.views == "full" for t in self.trackers)
        if full is not self._full:
            (full_modes.start if full else full_modes.stop)(self.mode)
            self._full = full
        # Guarded regions use the mode without a tracker, where they join.
        joins = [t.joins_unsafe_views for t in self.trackers]
        self.mode.joins_unsafe_views = any(joins) or not joins
        self.mode.level = max((_LEVELS[t.record] for t in self.trackers), default=0)


active = _Active()


@functools.cache
def _say_entered_above() -> None:
    log.warning(
        "track() was entered above another dispatch mode: ops that the handlers of modes entered "
        "before it issue are not tracked; enter track() first (outermost) to track them"
    )
