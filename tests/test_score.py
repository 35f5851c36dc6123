"""Scoring has a deadline that holds whatever a reward function does, and one bad scorer fails alone."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Sequence
from typing import cast

import pytest

from distaff.environments.protocol import Environment, Episode, Score
from distaff.errors import DeadlineExceeded
from distaff_worker.score import Scorer


class FakeRubric:
    """Only the `score` of an Environment: sleeps, blocks or answers, as the episode's handle says."""

    def __init__(self) -> None:
        self.release = threading.Event()

    async def score(self, episodes: Sequence[Episode]) -> list[list[Score]]:
        for episode in episodes:
            match episode.handle:
                case "block":
                    self.release.wait(30)
                case "sleep":
                    await asyncio.sleep(30)
                case float(seconds):
                    await asyncio.sleep(seconds)
        return [[Score(reward=1.0, metrics={"n": float(index)})] for index, _ in enumerate(episodes)]


def episodes(*handles: object) -> list[Episode]:
    return [Episode(plays=[], handle=handle) for handle in handles]


async def test_scores_come_back_in_the_order_of_the_episodes() -> None:
    """Two episodes, two scores, aligned."""
    scorer = Scorer()
    scores = await scorer.score(cast(Environment, FakeRubric()), episodes(0.0, 0.01), timeout_s=5)
    assert [score.metrics["n"] for [score] in scores] == [0.0, 1.0]
    scorer.close()


async def test_a_slow_scorer_ends_at_its_deadline_and_costs_no_thread() -> None:
    """A coroutine that only waits is cancelled; the shared thread lives on."""
    scorer = Scorer()
    rubric = cast(Environment, FakeRubric())
    started = time.monotonic()
    with pytest.raises(DeadlineExceeded, match=r"longer than 0\.3 s"):
        await scorer.score(rubric, episodes("sleep"), timeout_s=0.3)
    assert time.monotonic() - started < 2
    assert scorer.abandoned == 0
    assert await scorer.score(rubric, episodes(0.0), timeout_s=5)
    scorer.close()


async def test_a_blocking_scorer_fails_alone() -> None:
    """P15: `time.sleep` in a reward neither stalls the worker's loop nor fails the group that waited behind it."""
    scorer, rubric = Scorer(), FakeRubric()
    environment = cast(Environment, rubric)
    bad = asyncio.create_task(scorer.score(environment, episodes("block"), timeout_s=0.5))
    await asyncio.sleep(0.05)
    good = asyncio.create_task(scorer.score(environment, episodes(0.0), timeout_s=0.5))
    worst = 0.0
    while not (bad.done() and good.done()):
        before = time.monotonic()
        await asyncio.sleep(0.01)
        worst = max(worst, time.monotonic() - before)
    assert good.result()[0][0].reward == 1.0
    with pytest.raises(DeadlineExceeded, match="blocked"):
        bad.result()
    assert worst < 0.25
    assert scorer.abandoned == 2
    rubric.release.set()
    scorer.close()
