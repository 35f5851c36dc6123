"""A v1 taskset that, if told to, leaves marks all over its process, and counts those it finds. Loaded by the id tests.zoo_v1_rude_support."""

from __future__ import annotations

import builtins
import os
import signal
import socket
import sys
import time
from collections.abc import Iterator
from typing import Any

import verifiers.v1 as vf

__all__ = ["Rude"]


class RudeData(vf.TaskData):  # type: ignore[misc]
    rude: bool = False


class RudeTask(vf.Task[RudeData]):  # type: ignore[misc]
    async def setup(self, trace: Any, runtime: Any) -> None:
        if self.data.rude:
            leave_marks()

    @vf.reward  # type: ignore[untyped-decorator]
    async def marks(self, trace: Any) -> float:
        return float(len(marks()))

    @vf.metric  # type: ignore[untyped-decorator]
    async def pid(self, trace: Any) -> float:
        return float(os.getpid())


class RudeConfig(vf.TasksetConfig):  # type: ignore[misc]
    rude: bool = False
    size: int = 4


class Rude(vf.Taskset[RudeTask, RudeConfig]):  # type: ignore[misc]
    def load(self) -> Iterator[RudeTask]:
        for i in range(self.config.size):
            yield RudeTask(RudeData(idx=i, prompt=f"q{i}", rude=self.config.rude), self.config.task)


def leave_marks() -> None:
    """What libraries do while they are imported or used, and worse."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    os.chdir("/")
    os.environ["DISTAFF_RUDE"] = "1"
    sys.modules["distaff_rude"] = sys.modules[__name__]
    sys.path.insert(0, "/rude")
    builtins.rude = True  # type: ignore[attr-defined]
    socket.setdefaulttimeout(30)
    time.sleep(0.2)


def marks() -> list[str]:
    """The marks in this process."""
    found = {
        "signal": signal.getsignal(signal.SIGTERM) is signal.SIG_IGN,
        "folder": os.getcwd() == "/",
        "variable": "DISTAFF_RUDE" in os.environ,
        "module": "distaff_rude" in sys.modules,
        "path": "/rude" in sys.path,
        "builtin": hasattr(builtins, "rude"),
        "timeout": socket.getdefaulttimeout() is not None,
    }
    return [name for name, there in found.items() if there]
