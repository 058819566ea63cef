"""One call of an op, on copies of its arguments, looked at from all sides."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch

from .._torch import library as _torch_library
from ..errors import ViewTrackError
from ..info import version
from ..plan import Argument, Plan, plan_of
from ..site import Site, is_user_file
from .checked_outputs import check_outputs
from .copies import Copies, share_memory
from .findings import Finding
from .memory import Given, Memory

Under = Callable[[], AbstractContextManager[Any]]


@dataclass
class Checked:
    """What is known of an op from the calls so far.

    Attributes:
        op: the OpOverload.
        site: the line that asked for the check.
        definition: where the op is from.
        returned: every tensor that came out of a call or went into it, with how a message names
            it; they are held, so that no memory is handed out twice.
        unwritten: the arguments that are declared written and were not by some call, with the
            first input that showed it.
        written: the arguments that some call wrote.
    """

    op: Any
    site: Site
    definition: str | None
    returned: list[tuple[str, torch.Tensor]] = field(default_factory=list)
    unwritten: dict[str, int] = field(default_factory=dict)
    written: set[str] = field(default_factory=set)


class CheckedCall:
    """One call.

    Args:
        checked: the op, and what is known of it.
        index: which of the inputs it is made with.
        args: positional arguments; they are copied.
        kwargs: keyword arguments.
        fenced: whether to guard the memory around the copies.
    """

    def __init__(
        self, checked: Checked, index: int, args: Any, kwargs: Any, *, fenced: bool = True
    ) -> None:
        self.checked = checked
        self.op = checked.op
        self.plan: Plan = plan_of(self.op)
        self.index = index
        self.how = ""
        self._original = (args, kwargs)
        self._copies = Copies(self._original, fenced=fenced)
        self._look()

    def _look(self) -> None:
        self.args, self.kwargs = self._copies.arguments
        self.given = [
            Given(a, label, t) for a in self.plan.arguments for label, t in self._labelled(a)
        ]
        self.memory = Memory(self.given, self._copies)

    def _labelled(self, a: Argument) -> Iterator[tuple[str, torch.Tensor]]:
        value = a.of(self.args, self.kwargs)
        if isinstance(value, torch.Tensor):
            yield a.name, value
        elif isinstance(value, (list, tuple)):
            for position, t in enumerate(value):
                if isinstance(t, torch.Tensor):
                    yield f"{a.name}[{position}]", t

    def again(self) -> CheckedCall:
        """The same call with the same tensors once more: it may answer from a cache."""
        self._look()
        self.how = " when it was called again with the same arguments"
        return self

    def run(self, under: Under, how: str = "") -> Iterator[Finding]:
        """Make the call.

        Args:
            under: makes the context manager to make it in.
            how: what is said of that.

        Raises:
            Fenced: it raised, maybe for the fences: those storages cannot be resized, nor cloned
                lazily.
        """
        self.how = how or self.how
        try:
            with torch.no_grad(), under():
                out = self.op(*self.args, **self.kwargs)
        except Exception as error:
            yield from self._raised(error)
            return
        yield from self._written(counted=True)
        yield from check_outputs(self, out)

    def _raised(self, error: Exception) -> Iterator[Finding]:
        text = str(error)
        if self._copies.fences:
            raise Fenced from error
        if f"Declaration: {self.plan.qualified}(" in text:
            raise ViewTrackError(
                f"check_op: input {self.index} does not fit the schema of `{self.plan.qualified}`: "
                f"{text}"
            ) from None
        # torch.library.custom_op refuses an alias without a word of where it is.
        body = _torch_library.custom_op_body(self.plan.qualified)
        if body is not None and "alias" in text:
            self._copies = Copies(self._original, fenced=False)
            self._look()
            with torch.no_grad():
                out = body(*self.args, **self.kwargs)
            yield from self._written(counted=False)
            yield from check_outputs(self, out)
            return
        yield from self._written(counted=False)
        line = _line_of(error)
        place = error if isinstance(error, ViewTrackError) else ViewTrackError()
        yield self.finding(
            "wrong output" if is_misfit(error) else "error", place.argument, place.output,
            f"raised {type(error).__name__}{self.how}{line}: {text}",
        )  # fmt: skip

    def _written(self, counted: bool) -> Iterator[Finding]:
        for stray in self.memory.compare():
            near = stray.near
            yield self.finding(
                "stray write", near.argument.name, None,
                f"wrote memory beside argument `{near.label}`, {stray}{self.how}; go by its "
                f"strides, its storage_offset and its sizes, or write a contiguous clone and copy "
                f"that back",
            )  # fmt: skip
        for one in self.given:
            if one.argument.is_write:
                yield from self._declared_write(one, counted)
            else:
                yield from self._undeclared_write(one)
        for one in self.memory.unseen if counted else ():
            yield self.finding(
                "no memory", one.argument.name, None,
                f"got argument `{one.label}` without memory that can be read ({_kind_of(one.t)}): "
                f"whether it writes it was not looked at; give an input on a real device too",
            )  # fmt: skip

    def _declared_write(self, one: Given, counted: bool) -> Iterator[Finding]:
        name = one.argument.name
        if one.written or one.was_exchanged or one.was_reshaped:
            self.checked.written.add(name)
        elif one.t.numel() and counted and one not in self.memory.unseen:
            self.checked.unwritten.setdefault(name, self.index)
        if one.written and counted and one.version is not None and version(one.t) == one.version:
            yield self.finding(
                "missing bump", name, None,
                f"wrote argument `{one.label}`, and its version counter did not move{self.how}; "
                f"{self.kernel()}",
            )  # fmt: skip
        moved = one.was_exchanged or one.was_reshaped
        if moved and not (self.plan.changes_metadata or self.plan.exchanges_storage):
            what = "another storage" if one.was_exchanged else "other sizes or strides"
            yield self.finding(
                "resized", name, None,
                f"gave argument `{one.label}` {what}: views that others have of it keep the old "
                f"ones; compilers refuse such an op",
            )  # fmt: skip

    def _undeclared_write(self, one: Given) -> Iterator[Finding]:
        name = one.argument.name
        was_counted = one.version is not None and version(one.t) != one.version
        shares = any(
            share_memory(one.t, other.t) for other in self.given if other.argument.is_write
        )
        if one.was_exchanged or one.was_reshaped:
            did = "gave other sizes, strides or memory to"
        elif one.written or (was_counted and not shares):
            did = "changed"
        else:
            return
        yield self.finding(
            "undeclared write", name, None,
            f"{did} argument `{one.label}`{self.how}, and its schema says that it does not; "
            f"declare `Tensor(a!) {name}` (in torch.library.custom_op, mutates_args=({name!r},)), "
            f"or write a clone",
        )  # fmt: skip

    def kernel(self) -> str:
        """How to mend a counter."""
        if self.plan.is_aten:
            return "torch gives it no ADInplaceOrView kernel; run it under viewtrack.track()"
        return (
            f"give the op its ADInplaceOrView kernel by viewtrack.library.register"
            f"({self.plan.qualified!r})"
        )

    def finding(self, kind: str, argument: str | None, output: int | None, message: str) -> Finding:
        """A finding of this call."""
        checked = self.checked
        return Finding(
            self.plan.qualified, kind, argument, output, self.index, checked.site,
            checked.definition, message,
        )  # fmt: skip


def unwritten(checked: Checked) -> Iterator[Finding]:
    """Notes of the arguments that are declared written, and that no call wrote."""
    name = plan_of(checked.op).qualified
    for argument, index in checked.unwritten.items():
        if argument not in checked.written:
            yield Finding(
                name, "unwritten", argument, None, index, checked.site, checked.definition,
                f"wrote argument `{argument}` for no input, and its schema says that it does; "
                f"leave out the `!` if it never does, or give inputs for which it does",
            )  # fmt: skip


def is_misfit(error: Exception) -> bool:
    """Whether an error is the dispatcher's, about outputs of other kinds than the schema has."""
    text = str(error)
    return "Declaration: " not in text and ("Unable to cast" in text or "to return None" in text)


class Fenced(Exception):
    """A call on fenced copies raised."""


def _line_of(error: Exception) -> str:
    """The line of the op's own that an error is from."""
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if is_user_file(frame.filename):
            return f" at {frame.filename}:{frame.lineno}"
    return ""


def _kind_of(t: torch.Tensor) -> str:
    return "a meta tensor" if t.device.type == "meta" else f"a {type(t).__name__}"
