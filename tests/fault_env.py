"""A classic environment whose rows misbehave on request: they block, crash, allocate and leak, in a reward or in a step.

Arguments: rows; faults, {row number: name of the fault}; where, "reward", "step", "setup" or "load".
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import verifiers.legacy as vf
from datasets import Dataset

LEFT_OPEN: list[Any] = []


def spin() -> None:
    while True:
        pass


def expression() -> None:
    re.match(r"(a+)+$", "a" * 60 + "b")


def power_tower() -> None:
    import sympy  # type: ignore[import-untyped]

    sympy.sympify("9**9**9**9")


def allocate() -> None:
    hoard = []
    while True:
        hoard.append(bytearray(32 << 20))


def leak() -> None:
    """Two tasks that never end, two open files, a mebibyte."""
    LEFT_OPEN.extend(open(os.devnull) for _ in range(2))  # noqa: SIM115 - that is the leak
    LEFT_OPEN.append(bytearray(b"x") * (1 << 20))
    for _ in range(2):
        LEFT_OPEN.append(asyncio.get_running_loop().create_task(asyncio.sleep(3600)))


def leave_a_process() -> None:
    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)", os.environ.get("FAULT_MARK", "")])


FAULTS: dict[str, Callable[[], Any]] = {
    "sleep": lambda: time.sleep(20),
    "nap": lambda: time.sleep(1),
    "spin": spin,
    "expression": expression,
    "power_tower": power_tower,
    "segmentation_fault": lambda: ctypes.string_at(0),
    "abort": os.abort,
    "exit": lambda: os._exit(7),
    "allocate": allocate,
    "leak": leak,
    "leave_a_process": leave_a_process,
}


def load_environment(
    rows: int = 8, turns: int = 1, faults: dict[str, str] | None = None, where: str = "reward", every: str = ""
) -> vf.Environment:
    """`faults` by row; `every`: the fault of all other rows."""

    def misbehave(place: str, row: str) -> None:
        name = (faults or {}).get(row, every)
        if place == where and name:
            FAULTS[name]()

    misbehave("load", "0")

    def last_number(completion: list[Any], answer: str) -> float:
        misbehave("reward", answer)
        return float(re.findall(r"\d+", str(completion[-1].content))[-1])

    class Talk(vf.MultiTurnEnv):  # type: ignore[misc]
        async def setup_state(self, state: vf.State) -> vf.State:
            misbehave("setup", state["answer"])
            return await super().setup_state(state)

        async def env_response(self, messages: vf.Messages, state: vf.State, **kwargs: Any) -> vf.Messages:
            misbehave("step", state["answer"])
            await asyncio.sleep(0)
            return [vf.UserMessage(content="and then?")]

    data = [{"question": f"row {n}, say a number", "answer": str(n)} for n in range(rows)]
    return Talk(dataset=Dataset.from_list(data), rubric=vf.Rubric(funcs=[last_number]), max_turns=turns)
