"""A v1 environment with two trained seats and a judge that is not trained. Loaded by the id tests.zoo_v1_seats_support."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import verifiers.v1 as vf

__all__ = ["Debate", "DebateEnv"]


class DebateData(vf.TaskData):  # type: ignore[misc]
    rounds: int = 1
    fail: str = ""


class DebateTask(vf.Task[DebateData]):  # type: ignore[misc]
    @vf.reward  # type: ignore[untyped-decorator]
    async def said(self, trace: Any) -> float:
        return float(trace.last_reply or 0)


class DebateConfig(vf.TasksetConfig):  # type: ignore[misc]
    rounds: int = 1
    fail: str = ""


class Debate(vf.Taskset[DebateTask, DebateConfig]):  # type: ignore[misc]
    def load(self) -> Iterator[DebateTask]:
        data = DebateData(idx=0, prompt="speak", rounds=self.config.rounds, fail=self.config.fail)
        yield DebateTask(data, self.config.task)


class DebateEnvConfig(vf.EnvConfig):  # type: ignore[misc]
    left: vf.AgentConfig = vf.AgentConfig()
    right: vf.AgentConfig = vf.AgentConfig()
    judge: vf.AgentConfig = vf.AgentConfig()


class DebateEnv(vf.Env[DebateEnvConfig]):  # type: ignore[misc]
    async def setup(self, agents: Any) -> None:
        agents.judge.trainable = False

    async def run(self, task: DebateTask, agents: Any) -> None:
        for _ in range(task.data.rounds):
            await agents.left.run(task)
            await agents.right.run(task)
        if task.data.fail == "run":
            raise ValueError("boom")
        await agents.judge.run(task)

    async def finalize(self, task: DebateTask, episode: Any) -> None:
        if task.data.fail == "finalize":
            raise ValueError("boom")
        verdict = float(episode.traces[-1].last_reply)
        for trace in episode.traces:
            trace.record_reward("verdict", verdict)
