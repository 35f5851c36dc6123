"""A scripted model for environment tests, and helpers around it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from distaff.config import EnvironmentSection
from distaff.environments.load import load
from distaff.environments.protocol import ChatTurn, Environment, Episode, Play
from distaff.types import JSON, FinishReason, Message, Tool

Answer = str | Message | BaseException | ChatTurn
Script = Sequence[Answer] | Callable[[int, Sequence[Message]], Answer]


def turn(content: str | Message | None, *, finish: FinishReason = "stop") -> ChatTurn:
    message = content if isinstance(content, dict) else {"role": "assistant", "content": content}
    return ChatTurn(message=message, finish_reason=finish, prompt_tokens=3, completion_tokens=2)


def call(name: str, arguments: str, *, id: str = "c1") -> Message:  # noqa: A002
    """An assistant message with one tool call."""
    function = {"name": name, "arguments": arguments}
    return {"role": "assistant", "content": None, "tool_calls": [{"id": id, "type": "function", "function": function}]}


class ScriptedModel:
    """Answers from a script: a sequence (its last entry again and again) or a function of (turn, messages)."""

    def __init__(self, script: Script, *, delay_s: float = 0.0) -> None:
        self._script = script
        self._delay_s = delay_s
        self.asked: list[list[Message]] = []
        self.tools: list[list[Tool]] = []
        self.sampling: list[dict[str, JSON]] = []
        self.started = asyncio.Event()

    async def complete(
        self, messages: Sequence[Message], tools: Sequence[Tool], sampling: Mapping[str, JSON]
    ) -> ChatTurn:
        self.asked.append(list(messages))
        self.tools.append(list(tools))
        self.sampling.append(dict(sampling))
        self.started.set()
        await asyncio.sleep(self._delay_s)
        n = len(self.asked) - 1
        answer = self._script(n, messages) if callable(self._script) else self._script[min(n, len(self._script) - 1)]
        if isinstance(answer, BaseException):
            raise answer
        return answer if isinstance(answer, ChatTurn) else turn(answer)


def load_env(environment_id: str, **args: Any) -> Environment:
    return load(EnvironmentSection(id=environment_id, args=args))


async def play(
    env: Environment, task: Mapping[str, JSON], script: Script, **options: Any
) -> tuple[Episode, ScriptedModel]:
    """One episode of a single-agent environment."""
    model = ScriptedModel(script, **options)
    return await env.play(task, lambda seat: model), model


def only(episode: Episode) -> Play:
    """The one play of a single-agent episode."""
    (single,) = episode.plays
    return single
