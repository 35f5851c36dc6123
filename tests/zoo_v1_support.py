"""A v1 taskset for the tests that can go wrong everywhere. Loaded by the id tests.zoo_v1_support."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterator
from typing import Any

import verifiers.v1 as vf

from tests.zoo_errors_support import ERRORS

__all__ = ["Zoo"]


class ZooData(vf.TaskData):  # type: ignore[misc]
    answer: str = ""
    place: str = ""
    error: str = "ValueError"


class ZooTask(vf.Task[ZooData]):  # type: ignore[misc]
    def _at(self, place: str) -> None:
        if place == self.data.place:
            raise ERRORS[self.data.error]()

    async def setup(self, trace: Any, runtime: Any) -> None:
        self._at("setup")

    async def finalize(self, trace: Any, runtime: Any) -> None:
        self._at("finalize")
        if self.data.place == "stubborn":
            try:
                await asyncio.sleep(60)
            except asyncio.CancelledError:
                trace.info["swallowed"] = True

    @vf.stop  # type: ignore[untyped-decorator]
    async def enough(self, trace: vf.Trace) -> bool:
        self._at("step")
        return False

    @vf.reward(weight=2.0)  # type: ignore[untyped-decorator]
    async def number(self, trace: Any) -> float:
        self._at("reward")
        return float("nan") if self.data.place == "nan" else float(trace.last_reply or 0)

    @vf.metric  # type: ignore[untyped-decorator]
    async def length(self, trace: Any) -> float:
        return float(len(trace.last_reply))


class ZooConfig(vf.TasksetConfig):  # type: ignore[misc]
    size: int = 3
    place: str = ""
    error: str = "ValueError"


class Zoo(vf.Taskset[ZooTask, ZooConfig]):  # type: ignore[misc]
    def load(self) -> Iterator[ZooTask]:
        for i in itertools.count() if self.config.size == 0 else range(self.config.size):
            data = ZooData(idx=i, prompt=f"q{i}", answer=str(i), place=self.config.place, error=self.config.error)
            yield ZooTask(data, self.config.task)

    @property
    def INFINITE(self) -> bool:
        return bool(self.config.size == 0)
