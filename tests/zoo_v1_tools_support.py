"""A v1 taskset whose tasks share one MCP tool server. Loaded by the id tests.zoo_v1_tools_support."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import verifiers.v1 as vf

__all__ = ["Sums"]


class CalcConfig(vf.SharedToolsetConfig):  # type: ignore[misc]
    pass


class Calc(vf.Toolset[CalcConfig]):  # type: ignore[misc]
    @vf.tool  # type: ignore[untyped-decorator]
    async def add(self, a: int, b: int) -> int:
        """Add two numbers."""
        if a < 0:
            raise ValueError("no negative numbers")
        return a + b


class SumsTask(vf.Task[vf.TaskData]):  # type: ignore[misc]
    @vf.reward  # type: ignore[untyped-decorator]
    async def tool_calls(self, trace: Any) -> float:
        return float(len(trace.tool_messages))


class SumsConfig(vf.TasksetConfig):  # type: ignore[misc]
    calc: CalcConfig = CalcConfig()


class Sums(vf.Taskset[SumsTask, SumsConfig]):  # type: ignore[misc]
    def load(self) -> Iterator[SumsTask]:
        yield SumsTask(vf.TaskData(idx=0, prompt="1 + 2?", system_prompt="Use the tool."), self.config.task)

    @classmethod
    def toolsets(cls, config: SumsConfig) -> list[Any]:
        os.environ.setdefault("PYTHONPATH", str(Path(__file__).parent.parent))  # the server is a process of its own
        return [Calc(config.calc)]


if __name__ == "__main__":
    Calc.run()
