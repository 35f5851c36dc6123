"""The policy as a v1 environment sees it: per trace a verifiers Client that asks that seat's own ChatModel.

Invariant: a trace gets its ChatModel when verifiers registers it with the interception server, by the trace's id, and keeps it; two
traces never share one.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

from pydantic import PrivateAttr
from verifiers.v1.clients import Client, EvalClientConfig
from verifiers.v1.dialects import ChatDialect
from verifiers.v1.errors import ProviderError
from verifiers.v1.interception import Interception
from verifiers.v1.types import AssistantMessage, Response, ToolCall, Usage

from distaff.environments.messages import Recall, flat_calls, flat_sampling, openai_message
from distaff.environments.protocol import ChatModel, ChatTurn, ModelFactory
from distaff.errors import ContextOverflow, DistaffError, TurnLimit
from distaff.types import Tool

MODEL_NAME = "policy"
_FINISH = {"stop": "stop", "length": "length", "tool_calls": "tool_calls"}


class CleanEnd(Exception):
    """The rollout ends here. Not a RolloutError of verifiers, which would fail the trace although it has stopped."""


class SeatClient(Client):  # type: ignore[misc]
    """Answers one trace from `model`."""

    def __init__(self, seat: str, model: ChatModel, trace: Any) -> None:
        self.seat = seat
        self.recall = Recall()
        self.tools: list[Tool] = []
        self.turns = 0
        self.error: DistaffError | None = None
        """Of the last model call, None when it succeeded or ended the rollout cleanly."""
        self.truncated = False
        self._model = model
        self._trace = trace

    async def get_response(
        self,
        dialect: Any,
        body: Mapping[str, Any],
        sampling: Any,
        session_id: str | None = None,
        turn: Any = None,
        headers: Mapping[str, str] | None = None,
    ) -> Response:
        """One model turn. Raises CleanEnd at a clean end, ProviderError from everything else."""
        if not isinstance(dialect, ChatDialect):
            raise ProviderError(
                f"the policy speaks chat completions only, not {type(dialect).__name__}", status_code=400
            )
        self.error = None
        self.tools = list(body.get("tools") or [])
        try:
            answer = await self._model.complete(self.recall.openai(body["messages"]), self.tools, flat_sampling(body))
        except (ContextOverflow, TurnLimit) as end:
            self.truncated = True
            self._trace.stop("max_turns" if isinstance(end, TurnLimit) else "context_length")
            raise CleanEnd(str(end)) from end
        except DistaffError as error:
            self.error = error
            raise ProviderError(str(error), status_code=502 if error.retryable else 400) from error
        return self._response(answer)

    def _response(self, answer: ChatTurn) -> Response:
        self.turns += 1
        self.recall.remember(answer.message)
        message = openai_message(answer.message)
        calls = [ToolCall(**call) for call in flat_calls(answer.message)]
        usage = Usage(prompt_tokens=answer.prompt_tokens, completion_tokens=answer.completion_tokens)
        finish = _FINISH.get(answer.finish_reason)
        return Response(
            id=f"turn-{self.turns}",
            created=0,
            model=MODEL_NAME,
            message=AssistantMessage(
                content=message.get("content"),
                reasoning_content=message.get("reasoning_content"),
                tool_calls=calls or None,
            ),
            finish_reason=finish,
            usage=usage,
            raw={
                "id": f"turn-{self.turns}",
                "object": "chat.completion",
                "created": 0,
                "model": MODEL_NAME,
                "choices": [{"index": 0, "message": message, "finish_reason": finish or "stop"}],
                "usage": {
                    "prompt_tokens": usage.prompt_tokens,
                    "completion_tokens": usage.completion_tokens,
                    "total_tokens": usage.total_tokens,
                },
            },
        )


class Seats:
    """The seat clients of one episode, by trace id."""

    def __init__(self, model_for: ModelFactory, *, single: bool) -> None:
        self._model_for = model_for
        self._single = single
        self._clients: dict[str, SeatClient] = {}

    def of(self, trace: Any) -> SeatClient:
        """The trace's client; made at the first call. A seat that plays several traces has "#2", "#3", ... after its name."""
        if trace.id not in self._clients:
            seat = self._name("" if self._single else trace.agent.name)
            self._clients[trace.id] = SeatClient(seat, self._model_for(seat), trace)
        return self._clients[trace.id]

    def _name(self, name: str) -> str:
        played = sum(client.seat.split("#")[0] == name for client in self._clients.values())
        return f"{name}#{played + 1}" if played else name


class SeatConfig(EvalClientConfig):  # type: ignore[misc]
    """What verifiers takes for an endpoint and hands from agent to agent; it carries the episode's seats."""

    _seats: Seats | None = PrivateAttr(default=None)

    @classmethod
    def carrying(cls, seats: Seats) -> SeatConfig:
        config = cls(base_url="http://127.0.0.1:9", api_key_var="DISTAFF_NO_KEY")
        config._seats = seats
        return config

    @property
    def seats(self) -> Seats | None:
        return self._seats


class SeatedInterception(Interception):  # type: ignore[misc]
    """An interception whose rollouts are answered by their seats; agents with an endpoint of their own keep it."""

    def __init__(self, inner: Any) -> None:
        super().__init__()
        self._inner = inner

    async def start(self) -> None:
        return None

    @asynccontextmanager
    async def acquire(self, session: Any) -> AsyncIterator[Any]:
        async with self._inner.acquire(session) as slot:
            config = session.ctx.client
            if isinstance(config, SeatConfig) and config.seats is not None:
                session.client = config.seats.of(session.trace)
            yield slot
