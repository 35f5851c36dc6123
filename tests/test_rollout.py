"""A rollout ends at its deadline, whatever its environment does with the cancellation."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Mapping
from typing import cast

import pytest

from distaff.environments.protocol import ChatModel, Environment, Episode, ModelFactory
from distaff.types import JSON
from distaff_worker import rollout
from distaff_worker.rollout import Roller


class FakeEnvironment:
    """Only the `play` of an Environment."""

    def __init__(self) -> None:
        self.cleaned = 0

    async def play(self, task: Mapping[str, JSON], model_for: ModelFactory) -> Episode:
        try:
            await asyncio.sleep(task["seconds"])
        except asyncio.CancelledError:
            self.cleaned += 1
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.sleep(task.get("stubborn_s", 0))
            raise
        return Episode(plays=[], handle="played")


def no_model(seat: str) -> ChatModel:
    raise NotImplementedError


async def play(roller: Roller, environment: FakeEnvironment, task: dict[str, JSON], timeout_s: float) -> Episode:
    return await roller.play(cast(Environment, environment), task, no_model, timeout_s=timeout_s)


async def test_an_episode_comes_back_as_played() -> None:
    """In time: what the environment made of it."""
    episode = await play(Roller(), FakeEnvironment(), {"seconds": 0.01}, 5)
    assert episode.handle == "played"


async def test_a_rollout_past_its_deadline_is_a_timeout_after_cleaning_up() -> None:
    """P10: The environment is cancelled, cleans up, and the episode says why it ended."""
    environment = FakeEnvironment()
    episode = await play(Roller(), environment, {"seconds": 30}, 0.1)
    failure = episode.plays[0].error
    assert failure is not None
    assert (failure.kind, failure.message) == ("timeout", "the rollout took longer than 0.1 s")
    assert environment.cleaned == 1


async def test_a_rollout_that_swallows_its_cancellation_is_left_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    """P14: the slot is free shortly after the deadline; the stray is counted until it ends."""
    monkeypatch.setattr(rollout, "UNWIND_S", 0.2)
    roller, started = Roller(), time.monotonic()
    episode = await play(roller, FakeEnvironment(), {"seconds": 30, "stubborn_s": 1.0}, 0.1)
    assert time.monotonic() - started < 0.8
    assert episode.plays[0].error is not None
    assert roller.strays == 1
    await asyncio.sleep(1.0)
    assert roller.strays == 0


async def test_cancelling_the_group_cancels_the_environment() -> None:
    """A lost lease ends the play at once, cleaned up."""
    environment = FakeEnvironment()
    task = asyncio.create_task(play(Roller(), environment, {"seconds": 30}, 30))
    await asyncio.sleep(0.05)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert environment.cleaned == 1
