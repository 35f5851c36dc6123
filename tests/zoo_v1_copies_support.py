"""A v1 environment whose two seats get copies of its task. Loaded by the id tests.zoo_v1_copies_support."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import verifiers.v1 as vf

__all__ = ["Copies", "CopiesEnv"]


class CopiesData(vf.TaskData):  # type: ignore[misc]
    leave: bool = False


class CopiesTask(vf.Task[CopiesData]):  # type: ignore[misc]
    async def setup(self, trace: Any, runtime: Any) -> None:
        if self.data.leave and self.data.system_prompt == "be brief":
            raise SystemExit("boom")
        trace.info["seen"] = len(self.data.system_prompt or "")

    @vf.metric  # type: ignore[untyped-decorator]
    async def seen(self, trace: Any) -> float:
        return float(trace.info["seen"])

    @vf.reward  # type: ignore[untyped-decorator]
    async def said(self, trace: Any) -> float:
        return float(trace.last_reply)


class Copies(vf.Taskset[CopiesTask, vf.TasksetConfig]):  # type: ignore[misc]
    def load(self) -> Iterator[CopiesTask]:
        yield CopiesTask(CopiesData(idx=0, prompt="speak"), self.config.task)


class CopiesEnvConfig(vf.EnvConfig):  # type: ignore[misc]
    kind: vf.AgentConfig = vf.AgentConfig()
    brief: vf.AgentConfig = vf.AgentConfig()


class CopiesEnv(vf.Env[CopiesEnvConfig]):  # type: ignore[misc]
    async def run(self, task: CopiesTask, agents: Any) -> None:
        for seat in ("kind", "brief"):
            await getattr(agents, seat).run(task.with_system_prompt(f"be {seat}"))
