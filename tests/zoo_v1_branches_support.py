"""A v1 taskset with a harness of its own that starts the conversation anew after the first answer, as one that compacts its context does.
Loaded by the id tests.zoo_v1_branches_support with args.env.agent.harness.id = "zoo_branching_harness"."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import aiohttp
import verifiers.v1 as vf
from verifiers.v1.runtimes import ProgramResult

__all__ = ["Branching", "BranchingHarness"]


class BranchingTask(vf.Task[vf.TaskData]):  # type: ignore[misc]
    @vf.reward  # type: ignore[untyped-decorator]
    async def branches(self, trace: Any) -> float:
        return float(len(trace.branches))


class Branching(vf.Taskset[BranchingTask, vf.TasksetConfig]):  # type: ignore[misc]
    def load(self) -> Iterator[BranchingTask]:
        for i in range(2):
            yield BranchingTask(vf.TaskData(idx=i, prompt=f"question {i}, at length"), self.config.task)


class BranchingHarness(vf.Harness[vf.HarnessConfig]):  # type: ignore[misc]
    """A question, and a second conversation that begins with the answer."""

    APPENDS_SYSTEM_PROMPT = True
    SUPPORTS_MCP = True
    SUPPORTS_RESUME = True
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(
        self, ctx: Any, trace: Any, runtime: Any, endpoint: str, secret: str, mcp_urls: Any, data: Any, **context: Any
    ) -> ProgramResult:
        async with aiohttp.ClientSession(headers={"Authorization": f"Bearer {secret}"}) as http:
            said = data.prompt
            for _ in range(2):
                body = {"model": "policy", "messages": [{"role": "user", "content": said}]}
                async with http.post(f"{endpoint}/chat/completions", json=body) as response:
                    if response.status != 200:
                        return ProgramResult(exit_code=1, stdout="", stderr=await response.text())
                    answer = (await response.json())["choices"][0]["message"]["content"]
                said = f"Until now: {answer}"
        return ProgramResult(exit_code=0, stdout="", stderr="")


sys.modules["zoo_branching_harness"] = sys.modules[__name__]  # verifiers finds harnesses by plain module names
