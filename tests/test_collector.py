"""Rollouts leave memory when they are done, without waiting for a full garbage collection, which the worker makes rare."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pytest

from distaff.config import EnvironmentSection
from distaff.environments.load import load
from distaff.environments.protocol import ChatTurn
from distaff.types import JSON, Message, Tool
from distaff_worker import collector


class Model:
    """Says one thing; stands for the object that keeps every token of a rollout."""

    async def complete(
        self, messages: Sequence[Message], tools: Sequence[Tool], sampling: Mapping[str, JSON]
    ) -> ChatTurn:
        message = {"role": "assistant", "content": "number 3"}
        return ChatTurn(message=message, finish_reason="stop", prompt_tokens=3, completion_tokens=2)


@pytest.fixture
def collecting() -> Iterator[None]:
    """The collector off, and afterwards as it was."""
    thresholds = gc.get_threshold()
    gc.disable()
    yield
    gc.enable()
    gc.set_threshold(*thresholds)
    gc.unfreeze()


async def test_a_scored_rollout_is_freed_without_the_collector(collecting: None) -> None:
    """Its model, and with it its tokens, hangs on no cycle."""
    environment: Any = load(EnvironmentSection(id="tests.marker_env", args={"turns": 1}))
    models = [Model()]
    gone = weakref.ref(models[0])
    episode = await environment.play(environment.row("train", 0), lambda seat: models.pop())
    [[score]] = await environment.score([episode])
    assert score.reward == 3.0
    del episode, score
    assert gone() is None


def test_what_is_loaded_is_out_of_the_collectors_sight(collecting: None) -> None:
    """And collections are set to be small."""
    collector.settle()
    assert gc.get_freeze_count() > 10_000
    assert gc.get_threshold() == collector.THRESHOLDS
