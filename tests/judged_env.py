"""A classic environment whose tool and whose judge are other services: a GET in each step, a GET in the reward."""

from __future__ import annotations

import re
from typing import Any

import httpx
import verifiers.legacy as vf
from datasets import Dataset

PATIENCE_S = 2.0
"""Of the environment's own client."""


def load_environment(url: str, rows: int = 8) -> vf.Environment:
    """`url`: of the service, which answers /tool with {"text"} and /judge with {"factor"}."""

    async def ask(path: str) -> dict[str, Any]:
        async with httpx.AsyncClient(timeout=PATIENCE_S) as client:
            answer = await client.get(f"{url}{path}")
            found: dict[str, Any] = answer.json()
            return found

    async def judged(completion: list[Any], answer: str) -> float:
        text = completion[-1]["content"] if isinstance(completion[-1], dict) else completion[-1].content
        return float((await ask("/judge"))["factor"]) * float(re.findall(r"\d+", str(text))[-1])

    class Talk(vf.MultiTurnEnv):  # type: ignore[misc]
        async def env_response(self, messages: vf.Messages, state: vf.State, **kwargs: Any) -> vf.Messages:
            return [vf.UserMessage(content=(await ask("/tool"))["text"])]

    data = [{"question": f"row {n}, say a number", "answer": str(n)} for n in range(rows)]
    return Talk(dataset=Dataset.from_list(data), rubric=vf.Rubric(funcs=[judged]), max_turns=2)
