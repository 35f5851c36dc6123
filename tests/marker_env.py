"""A classic environment for tests: some turns of small talk, rewarded with the number in the last answer.

Arguments choose how it misbehaves, so that one module serves the fault tests as well.
"""

from __future__ import annotations

import asyncio
import os
import re
import time
from typing import Any

import verifiers.legacy as vf
from datasets import Dataset


def load_environment(
    rows: int = 8, turns: int = 2, fault: str = "", where: str = "reward", every: int = 3
) -> vf.Environment:
    """`fault` happens in `where` ("reward" or "step") on rows whose number is 0 modulo `every`."""

    def misbehave(place: str, number: int) -> None:
        if place != where or number % every:
            return
        match fault:
            case "raise":
                raise ValueError(f"row {number} is cursed")
            case "block":
                time.sleep(3)
            case "abort":
                os.abort()

    def last_number(completion: list[Any], answer: str) -> float:
        misbehave("reward", int(answer))
        text = completion[-1]["content"] if isinstance(completion[-1], dict) else completion[-1].content
        return float(re.findall(r"\d+", str(text))[-1])

    class Talk(vf.MultiTurnEnv):  # type: ignore[misc]
        async def env_response(self, messages: vf.Messages, state: vf.State, **kwargs: Any) -> vf.Messages:
            misbehave("step", int(state["answer"]))
            await asyncio.sleep(0)
            return [vf.UserMessage(content="and then?")]

    data = [{"question": f"row {n}, say a number", "answer": str(n), "extra": {"kept": n}} for n in range(rows)]
    return Talk(dataset=Dataset.from_list(data), rubric=vf.Rubric(funcs=[last_number]), max_turns=turns)
