"""The policy as a classic verifiers environment sees it: a verifiers Client that asks one rollout's ChatModel.

Invariant: one PolicyClient per rollout. It answers while its rollout runs and refuses afterwards, so that neither a reward
function nor a task the environment forgot adds turns to a finished rollout.
"""

from __future__ import annotations

import asyncio
from typing import Any

from verifiers.legacy.clients import Client
from verifiers.legacy.errors import ModelError, OverlongPromptError
from verifiers.legacy.types import Response, ResponseMessage, ToolCall, Usage

from distaff.environments.failures import cancelled
from distaff.environments.messages import Recall, flat_calls, flat_sampling, openai_message, openai_tool
from distaff.environments.protocol import ChatModel, ChatTurn
from distaff.errors import ContextOverflow, DistaffError, TurnLimit
from distaff.types import Tool

MODEL_NAME = "policy"
_FINISH = {"stop": "stop", "length": "length", "tool_calls": "tool_calls"}


class PolicyClient(Client):  # type: ignore[misc]
    """Answers from `model`; keeps what the adapter wants to know of the rollout afterwards."""

    def __init__(self, model: ChatModel, *, environment: Any) -> None:
        super().__init__(model)
        self.environment = environment
        """The environment that plays the rollout (the member of a group)."""
        self.recall = Recall()
        self.turns = 0
        self.tools: list[Tool] = []
        self.truncated = False
        self.turn_limit = False
        self.state: Any = None
        """The rollout's State as soon as it is known, for rollouts that end with an exception."""
        self._open = True

    def finish(self) -> None:
        """Refuse whatever is still asked."""
        self._open = False

    async def get_response(
        self, prompt: Any, model: str, sampling_args: Any, tools: Any = None, **context: Any
    ) -> Response:
        """One model turn. Raises vf.OverlongPromptError at a clean end, vf.ModelError from anything else."""
        if context.get("state") is not None:
            self.state = context["state"]
        if cancelled():  # the environment swallowed it
            raise asyncio.CancelledError
        if not self._open:
            raise ModelError(
                "the policy is not available once its rollout has ended; give the rubric a judge client of its own"
            )
        messages = self.recall.openai([{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt)
        self.tools = [openai_tool(tool) for tool in tools or []]
        try:
            turn = await self.client.complete(messages, self.tools, flat_sampling(sampling_args or {}))
        except (ContextOverflow, TurnLimit) as end:
            self.truncated = True
            self.turn_limit = isinstance(end, TurnLimit)
            raise OverlongPromptError(str(end)) from end
        except DistaffError as error:
            raise ModelError(str(error)) from error
        return self._response(turn)

    def _response(self, turn: ChatTurn) -> Response:
        self.turns += 1
        self.truncated = self.truncated or turn.finish_reason == "length"
        self.recall.remember(turn.message)
        message = openai_message(turn.message)
        return Response(
            id=f"turn-{self.turns}",
            created=0,
            model=MODEL_NAME,
            usage=Usage(
                prompt_tokens=turn.prompt_tokens,
                completion_tokens=turn.completion_tokens,
                reasoning_tokens=0,
                total_tokens=turn.prompt_tokens + turn.completion_tokens,
            ),
            message=ResponseMessage(
                content=message.get("content"),
                reasoning_content=message.get("reasoning_content"),
                tool_calls=[ToolCall(**call) for call in flat_calls(turn.message)] or None,
                finish_reason=_FINISH.get(turn.finish_reason),
                is_truncated=turn.finish_reason == "length",
            ),
        )

    async def close(self) -> None:
        self.finish()

    def setup_client(self, config: Any) -> Any:
        raise NotImplementedError("a PolicyClient is given its model")

    async def to_native_tool(self, tool: Any) -> Any:
        return openai_tool(tool)

    async def to_native_prompt(self, messages: Any) -> Any:
        return self.recall.openai(messages), {}

    async def get_native_response(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError("ask get_response")

    async def raise_from_native_response(self, response: Any) -> None:
        return None

    async def from_native_response(self, response: Any) -> Any:
        return response
