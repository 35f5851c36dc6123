"""Counting the words of a line, with a second and third try (verifiers v1: taskset and environment).

Invariant: the task's data holds everything; the same (configuration, seed) gives the same tasks.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from typing import Any, Literal

import verifiers.v1 as vf

__all__ = ["WordCount", "WordCountEnv"]

_NUMBER = re.compile(r"\d+")
_WORDS = [
    "river",
    "stone",
    "cloud",
    "lamp",
    "paper",
    "green",
    "quick",
    "seven",
    "north",
    "window",
    "bread",
    "silver",
    "garden",
    "slow",
    "orange",
    "music",
]
_MOST = 12


class WordCountData(vf.TaskData):  # type: ignore[misc]
    """One line of words and how many there are."""

    answer: int
    tries: int = 3


class WordCountTask(vf.Task[WordCountData]):  # type: ignore[misc]
    """Scored by the last number the model gave."""

    @vf.reward(weight=0.8)  # type: ignore[untyped-decorator]
    async def closeness(self, trace: Any) -> float:
        """1 for the right number, falling to 0 with the distance."""
        number = number_in(trace.last_reply)
        return 0.0 if number is None else max(0.0, 1.0 - abs(number - self.data.answer) / _MOST)

    @vf.reward(weight=0.2)  # type: ignore[untyped-decorator]
    async def first_try(self, trace: Any) -> float:
        """1 when the first number was right."""
        return float(number_in(trace.assistant_messages[0].content) == self.data.answer) if trace.num_turns else 0.0

    @vf.metric  # type: ignore[untyped-decorator]
    async def tries_used(self, trace: Any) -> float:
        """Model turns."""
        return float(trace.num_turns)


class WordCountConfig(vf.TasksetConfig):  # type: ignore[misc]
    """[environment.args]"""

    split: Literal["train", "eval"] = "train"
    train_size: int = 512
    eval_size: int = 64
    tries: int = 3
    seed: int = 0


class WordCount(vf.Taskset[WordCountTask, WordCountConfig]):  # type: ignore[misc]
    """Lines of 2 to 12 words."""

    def load(self) -> Iterator[WordCountTask]:
        config = self.config
        rng = random.Random(config.seed + (1_000_003 if config.split == "eval" else 0))  # noqa: S311 - exercises
        for idx in range(config.eval_size if config.split == "eval" else config.train_size):
            words = rng.choices(_WORDS, k=rng.randint(2, _MOST))
            prompt = f"How many words are in this line? Reply with one number only.\n\n{' '.join(words)}"
            data = WordCountData(idx=idx, prompt=prompt, answer=len(words), tries=config.tries)
            yield WordCountTask(data, config.task)


class WordCountEnvConfig(vf.EnvConfig):  # type: ignore[misc]
    """The one seat."""

    agent: vf.AgentConfig = vf.AgentConfig()


class WordCountEnv(vf.Env[WordCountEnvConfig]):  # type: ignore[misc]
    """Tells the model when it is wrong and lets it try again."""

    async def run(self, task: WordCountTask, agents: Any) -> None:
        async with agents.agent.interaction(task) as chat:
            segment = await chat.turn()
            for _ in range(task.data.tries - 1):
                if segment.terminated or number_in(segment.last_reply) == task.data.answer:
                    return
                segment = await chat.turn("That is not right. Count again and reply with one number only.")


def number_in(text: str | None) -> int | None:
    """The first whole number in `text`."""
    found = _NUMBER.search(text or "")
    return int(found[0]) if found else None
