"""A classic environment for the soak: small talk, and rows that misbehave in every way user code does.

What a row does is a function of its number (`misdeed`), so that a run can be replayed and its dead letters explained.
"""

from __future__ import annotations

import asyncio
import os
import re
import time
from typing import Any, Literal

import verifiers.legacy as vf
from datasets import Dataset

Place = Literal["step", "reward"]
PERIOD = 300
"""Every row whose number leaves one of these remainders misbehaves."""
MISDEEDS: dict[int, tuple[str, Place]] = {
    7: ("raise", "step"),
    19: ("raise", "reward"),
    57: ("exit", "step"),
    83: ("block", "reward"),
    107: ("raise", "step"),
    119: ("leak", "step"),
    131: ("swallow", "step"),
    163: ("block", "step"),
    181: ("allocate", "reward"),
    201: ("abort", "reward"),
    219: ("leak", "reward"),
    243: ("spin", "reward"),
    277: ("abort", "step"),
}
BLOCK_S = 6.0


def misdeed(number: int) -> tuple[str, Place] | None:
    """What row `number` does, and where."""
    return MISDEEDS.get(number % PERIOD)


def load_environment(rows: int = 100, turns: int = 2) -> vf.Environment:
    """`rows` rows of `turns` turns; the reward is the number in the last answer."""
    kept: list[Any] = []

    def misbehave(place: Place, number: int) -> None:
        deed = misdeed(number)
        if deed is None or deed[1] != place:
            return
        match deed[0]:
            case "raise":
                raise ValueError(f"row {number} is cursed")
            case "exit":
                raise SystemExit(f"row {number} leaves")
            case "block":
                time.sleep(BLOCK_S)
            case "spin":
                end = time.monotonic() + BLOCK_S
                while time.monotonic() < end:
                    pass
            case "abort":
                os.abort()
            case "allocate":
                bytearray(128 << 20)
            case "leak":
                kept.append((os.open(os.devnull, os.O_RDONLY), bytearray(256 << 10)))

    def last_number(completion: list[Any], answer: str) -> float:
        misbehave("reward", int(answer))
        text = completion[-1]["content"] if isinstance(completion[-1], dict) else completion[-1].content
        return float(re.findall(r"\d+", str(text))[-1])

    class Talk(vf.MultiTurnEnv):  # type: ignore[misc]
        async def env_response(self, messages: vf.Messages, state: vf.State, **kwargs: Any) -> vf.Messages:
            number = int(state["answer"])
            misbehave("step", number)
            if misdeed(number) == ("leak", "step"):
                kept.append(asyncio.ensure_future(asyncio.Event().wait()))
            if misdeed(number) == ("swallow", "step"):
                await _ignore_cancellation()
            await asyncio.sleep(0)
            return [vf.UserMessage(content="and then?")]

    data = [{"question": f"row {n}, say a number", "answer": str(n), "extra": {"kept": n}} for n in range(rows)]
    return Talk(dataset=Dataset.from_list(data), rubric=vf.Rubric(funcs=[last_number]), max_turns=turns)


async def _ignore_cancellation() -> None:
    end = time.monotonic() + BLOCK_S
    while time.monotonic() < end:
        try:
            await asyncio.sleep(end - time.monotonic())
        except asyncio.CancelledError:
            continue
