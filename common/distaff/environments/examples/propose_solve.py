"""Two seats: a proposer writes an addition with a wanted sum, a solver works it out (verifiers v1, multi-agent).

Invariant: the task's data holds everything; the same (configuration, seed) gives the same tasks. The solver plays in every episode
whose proposer has answered, so that both seats have a rollout in each group.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from typing import Any, Literal

import verifiers.v1 as vf

__all__ = ["ProposeSolve", "ProposeSolveEnv"]

_ADDITION = re.compile(r"(\d{1,9})\s*\+\s*(\d{1,9})")
_NUMBER = re.compile(r"-?\d+")


class ProposeData(vf.TaskData):  # type: ignore[misc]
    """The sum that is wanted, and the addition the solver gets when the proposer writes none."""

    target: int
    spare: tuple[int, int]


class ProposeTask(vf.Task[ProposeData]):  # type: ignore[misc]
    """The proposer's: scored by how near its sum comes."""

    @vf.reward(weight=0.8)  # type: ignore[untyped-decorator]
    async def on_target(self, trace: Any) -> float:
        """1 for the wanted sum, falling to 0 with the distance; 0 without an addition."""
        numbers = addition_in(trace.last_reply)
        return 0.0 if numbers is None else closeness(sum(numbers), self.data.target)


class SolveData(vf.TaskData):  # type: ignore[misc]
    """The addition to work out."""

    answer: int


class SolveTask(vf.Task[SolveData]):  # type: ignore[misc]
    """The solver's: scored by how near its number comes."""

    @vf.reward  # type: ignore[untyped-decorator]
    async def correct(self, trace: Any) -> float:
        """1 for the sum, falling to 0 with the distance; 0 without a number."""
        number = number_in(trace.last_reply)
        return 0.0 if number is None else closeness(number, self.data.answer)


class ProposeSolveConfig(vf.TasksetConfig):  # type: ignore[misc]
    """[environment.args]"""

    split: Literal["train", "eval"] = "train"
    train_size: int = 512
    eval_size: int = 64
    high: int = 50
    seed: int = 0


class ProposeSolve(vf.Taskset[ProposeTask, ProposeSolveConfig]):  # type: ignore[misc]
    """Sums from 2 to `high`."""

    def load(self) -> Iterator[ProposeTask]:
        config = self.config
        rng = random.Random(config.seed + (1_000_003 if config.split == "eval" else 0))  # noqa: S311 - exercises
        for idx in range(config.eval_size if config.split == "eval" else config.train_size):
            target, first = rng.randint(2, config.high), rng.randint(1, config.high)
            prompt = f"Write an addition of two whole numbers whose sum is {target}, like 3 + 4. Reply with the addition only."
            data = ProposeData(idx=idx, prompt=prompt, target=target, spare=(first, rng.randint(1, config.high)))
            yield ProposeTask(data, config.task)


class ProposeSolveEnvConfig(vf.EnvConfig):  # type: ignore[misc]
    """The two seats; both are trained."""

    proposer: vf.AgentConfig = vf.AgentConfig()
    solver: vf.AgentConfig = vf.AgentConfig()


class ProposeSolveEnv(vf.Env[ProposeSolveEnvConfig]):  # type: ignore[misc]
    """The proposer, then the solver, who sees nothing but the addition."""

    async def run(self, task: ProposeTask, agents: Any) -> None:
        proposed = await agents.proposer.run(task)
        if proposed.ok:
            first, second = addition_in(proposed.last_reply) or task.data.spare
            prompt = f"What is {first} + {second}? Reply with the number only."
            await agents.solver.run(
                SolveTask(SolveData(idx=task.data.idx, prompt=prompt, answer=first + second), task.config)
            )

    async def finalize(self, task: ProposeTask, episode: Any) -> None:
        """The proposer also gains from a solver who got it right: an addition nobody can work out is a bad one."""
        played = {trace.agent.name: trace for trace in episode.traces}
        if "solver" in played:
            solved = number_in(played["solver"].last_reply) == played["solver"].task.data.answer
            played["proposer"].record_reward("solved", float(solved), 0.2)


def addition_in(text: str | None) -> tuple[int, int] | None:
    """The two numbers of the first addition in `text`."""
    found = _ADDITION.search(text or "")
    return (int(found[1]), int(found[2])) if found else None


def number_in(text: str | None) -> int | None:
    """The first whole number in `text`."""
    found = _NUMBER.search(text or "")
    return int(found[0]) if found else None


def closeness(number: int, wanted: int) -> float:
    """1 for the wanted number, falling to 0 at twice it or at 0."""
    return max(0.0, 1.0 - abs(number - wanted) / max(wanted, 1))
