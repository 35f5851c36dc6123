"""Any OpenAI-compatible chat API, through the `openai` package over our HTTP layer.

Invariant: a reply is a well-formed assistant message or an EngineError; the servers' differences end here. Retries,
deadlines and failover are the HTTP layer's; the package's own are off.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import httpx
import openai
import structlog
from openai import AsyncOpenAI

from distaff.errors import ContextOverflow, EngineAnswerError, EngineError, EngineRefused
from distaff.types import JSON, Message, Tool
from distaff_worker.engines import answers
from distaff_worker.engines.discovery import discover
from distaff_worker.engines.http import SESSION_HEADER, HttpPool, parse_json, read_body
from distaff_worker.engines.protocol import ChatReply, EngineInfo

log = structlog.get_logger(__name__)

_PLACEHOLDER_URL = "http://engine/v1"
"""Host and key are the HTTP layer's business: it takes the path and the body of a request, nothing else."""


class PoolTransport(httpx.AsyncBaseTransport):
    """Sends what httpx would send through an HttpPool. Raises the pool's EngineErrors."""

    def __init__(self, pool: HttpPool) -> None:
        self._pool = pool

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        body = await request.aread()
        session = request.headers.get(SESSION_HEADER, "")
        answer = await self._pool.post(request.url.path, body, session=session, read=read_body)
        await self._pool.turnstile.turn()
        return httpx.Response(200, headers={"Content-Type": "application/json"}, content=answer)


class OpenAIEngine:
    """A ChatEngine; see `protocol.ChatEngine` for the contract."""

    def __init__(self, pool: HttpPool) -> None:
        self._pool = pool
        self._model = pool.section.model
        self._served: list[str] = []
        self._limit_name = "max_tokens"
        self._max_context_tokens: int | None = None
        self._client = AsyncOpenAI(
            base_url=_PLACEHOLDER_URL,
            api_key="sent by the HTTP layer",
            max_retries=0,
            timeout=None,
            http_client=httpx.AsyncClient(transport=PoolTransport(pool), timeout=None),  # noqa: S113 - the pool's deadlines
        )

    async def check(self) -> EngineInfo:
        """See `protocol.Engine`. A hosted API without /v1/models passes when the configuration names the model."""
        found = await discover(self._pool, must_list=False)
        self._model, self._served, self._max_context_tokens = found.model, found.served, found.max_context_tokens
        return EngineInfo(
            kind=self._pool.section.kind,
            model=found.model,
            version="",
            max_context_tokens=found.max_context_tokens,
        )

    async def close(self) -> None:
        await self._client.close()
        await self._pool.close()

    async def chat(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Tool],
        max_tokens: int,
        sampling: Mapping[str, JSON],
        session: str,
    ) -> ChatReply:
        """See `protocol.ChatEngine`."""
        body = {name: value for name, value in sampling.items() if name not in ("n", "stream")}
        if tools:
            body["tools"] = list(tools)
        try:
            content = await self._send(messages, {**body, self._limit_name: max_tokens}, session=session)
        except EngineRefused as error:
            if not self._switch_limit_name(error):
                raise
            content = await self._send(messages, {**body, self._limit_name: max_tokens}, session=session)
        return self._reply(content)

    async def _send(self, messages: Sequence[Message], body: dict[str, JSON], *, session: str) -> bytes:
        await self._pool.turnstile.turn()
        payload = {"model": self._model, "messages": list(messages), **body}
        try:
            # Not chat.completions.create: walking every message through its request types costs a millisecond and more.
            response = await self._client.post(
                "/chat/completions",
                cast_to=httpx.Response,
                body=payload,
                options={"headers": {SESSION_HEADER: session}},
            )
        except openai.APIConnectionError as error:
            if isinstance(error.__cause__, EngineError):
                raise error.__cause__ from None
            raise
        except UnicodeEncodeError as error:
            raise EngineRefused(
                f"the conversation cannot be sent: it contains half of a surrogate pair ({error.reason}). The environment "
                "put text into a message that is not Unicode; repair it there"
            ) from None
        return response.content

    def _switch_limit_name(self, error: EngineRefused) -> bool:
        """Newer models of OpenAI take only max_completion_tokens, most servers only max_tokens; the refusal says so."""
        other = {"max_tokens": "max_completion_tokens", "max_completion_tokens": "max_tokens"}[self._limit_name]
        if isinstance(error, ContextOverflow) or self._limit_name not in str(error):
            return False
        self._limit_name = other
        return True

    def _reply(self, content: bytes) -> ChatReply:
        where = f"engine {self._model!r}, chat completion"
        document = parse_json(content, where=where)
        choice = answers.only_choice(document, where=where)
        strict = self._pool.section.kind != "openai"
        answers.check_model(document.get("model"), self._model, where=where, others=None if strict else self._served)
        usage = document.get("usage")
        usage = usage if isinstance(usage, dict) else {}
        message = assistant_message(choice.get("message"), where=where)
        reason = answers.finish_reason(choice.get("finish_reason"))
        if message["content"] is None and not message.get("tool_calls") and reason not in ("length", "abort"):
            raise EngineAnswerError(f"{where}: the answer has neither content nor tool calls")
        return ChatReply(
            message=message,
            finish_reason="tool_calls" if message.get("tool_calls") and reason in ("stop", "none") else reason,
            prompt_tokens=_count(usage.get("prompt_tokens")),
            completion_tokens=_count(usage.get("completion_tokens")),
        )


def assistant_message(value: JSON, *, where: str) -> Message:
    """The message of a choice with role, content (string or None) and, where there are any, reasoning_content and tool_calls."""
    if not isinstance(value, dict):
        raise EngineAnswerError(f"{where}: the answer has no message")
    content, thought = _text(value.get("content"), where=where)
    message: Message = {"role": "assistant", "content": content}
    reasoning = value.get("reasoning_content") or value.get("reasoning") or thought
    if isinstance(reasoning, str) and reasoning:
        message["reasoning_content"] = reasoning
    calls = value.get("tool_calls")
    if calls:
        if not isinstance(calls, list):
            raise EngineAnswerError(f"{where}: tool_calls is not a list")
        message["tool_calls"] = [_tool_call(call, n, where=where) for n, call in enumerate(calls)]
    return message


def _text(content: JSON, *, where: str) -> tuple[str | None, str]:
    """(text, reasoning) of a content that is a string, null, or a list of parts."""
    if content is None or isinstance(content, str):
        return content, ""
    if not isinstance(content, list) or not all(isinstance(part, dict) for part in content):
        raise EngineAnswerError(f"{where}: content is neither text nor a list of parts")
    text = [part["text"] for part in content if isinstance(part.get("text"), str)]
    thought = [part["thinking"] for part in content if isinstance(part.get("thinking"), str)]
    return "".join(text), "".join(thought)


def _tool_call(call: JSON, index: int, *, where: str) -> dict[str, JSON]:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise EngineAnswerError(f"{where}: a tool call without a function name")
    arguments = function.get("arguments")
    if arguments is not None and not isinstance(arguments, str):
        raise EngineAnswerError(f"{where}: the arguments of a tool call are not a string")
    return {
        "id": str(call.get("id") or f"call_{index}"),
        "type": "function",
        "function": {"name": function["name"], "arguments": arguments or "{}"},
    }


def _count(value: JSON) -> int:
    return value if isinstance(value, int) and value >= 0 else 0
