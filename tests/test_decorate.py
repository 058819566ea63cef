"""track() as a decorator: what runs inside the function is tracked, and nothing else."""

from __future__ import annotations

import asyncio

import pytest
import torch

import viewtrack as vt
from viewtrack.mode import active


def is_tracked() -> bool:
    return bool(active.trackers)


def test_a_function_is_tracked_at_every_call() -> None:
    @vt.track()
    def function(x: int, *, y: int) -> tuple[bool, int]:
        """Say so."""
        return is_tracked(), x + y

    assert function(1, y=2) == (True, 3)
    assert function(2, y=2) == (True, 4)
    assert function.__doc__ == "Say so."
    assert not is_tracked()


def test_a_generator_is_tracked_in_its_steps_and_not_between() -> None:
    @vt.track()
    def generator():
        got = yield is_tracked()
        try:
            yield got, is_tracked()
        except KeyError:
            yield "caught", is_tracked()
        return "end", is_tracked()

    steps = generator()
    assert next(steps) is True
    assert not is_tracked()
    assert steps.send("sent") == ("sent", True)
    assert steps.throw(KeyError()) == ("caught", True)
    with pytest.raises(StopIteration) as stop:
        next(steps)
    assert stop.value.value == ("end", True)
    assert not is_tracked()


def test_a_generator_that_is_closed_cleans_up_tracked() -> None:
    seen = []

    @vt.track()
    def generator():
        try:
            yield
        finally:
            seen.append(is_tracked())

    steps = generator()
    next(steps)
    steps.close()
    assert seen == [True]
    assert not is_tracked()


def test_a_coroutine_is_tracked_in_its_steps_and_not_between() -> None:
    between = []

    @vt.track()
    async def coroutine():
        before = is_tracked()
        await asyncio.sleep(0)
        t = torch.zeros(2)
        t.detach().add_(1)
        return before, is_tracked(), vt.storage_version(t)

    async def other():
        between.append(is_tracked())

    async def main():
        return (await asyncio.gather(coroutine(), other()))[0]

    assert asyncio.run(main()) == (True, True, 1)
    assert between == [False]
    assert not is_tracked()


@pytest.mark.parametrize("kind", ["class", "async generator"])
def test_what_cannot_be_decorated_is_refused_by_name(kind: str) -> None:
    class Model:
        pass

    async def agen():
        yield

    with pytest.raises(TypeError, match=f"{'Model' if kind == 'class' else 'agen'}` is an? {kind}"):
        vt.track()(Model if kind == "class" else agen)


def test_the_parentheses_are_asked_for() -> None:
    with pytest.raises(TypeError, match=r"`@viewtrack.track\(\)`"):
        vt.track(lambda: None)


def test_leaving_what_was_not_entered_is_refused() -> None:
    with pytest.raises(vt.ViewTrackError, match="not active in this thread"):
        vt.track().__exit__(None, None, None)
    with vt.track() as outer:
        with pytest.raises(vt.ViewTrackError):
            vt.track().__exit__(None, None, None)
        assert active.trackers == [outer]
