"""A classic environment of some turns that takes any answer: rewarded with how many characters were said."""

from __future__ import annotations

import asyncio
from typing import Any

import verifiers.legacy as vf
from datasets import Dataset


def load_environment(rows: int = 4, turns: int = 3, between_s: float = 0.0) -> vf.Environment:
    class Talk(vf.MultiTurnEnv):  # type: ignore[misc]
        async def env_response(self, messages: vf.Messages, state: vf.State, **kwargs: Any) -> vf.Messages:
            await asyncio.sleep(between_s)
            return [vf.UserMessage(content=f"{len(messages)}+1=")]

    data = [{"question": f"{n}+{n}=", "answer": str(2 * n)} for n in range(rows)]
    return Talk(dataset=Dataset.from_list(data), rubric=vf.Rubric(funcs=[said]), max_turns=turns)


def said(completion: Any) -> float:
    return float(sum(len(message.content or "") for message in completion if message.role == "assistant"))
