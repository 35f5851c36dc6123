"""Any OpenAI-compatible chat API, through the `openai` package over our HTTP layer.

Invariant: a reply is a well-formed assistant message or an EngineError; the APIs' differences end here, in `quirks` (what they take) and
`chat_answers` (what they say). Retries, deadlines and failover are the HTTP layer's; the package's own are off.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import httpx
import openai
import structlog
from openai import AsyncOpenAI

from distaff.errors import EngineAnswerError, EngineError, EngineRefused
from distaff.types import JSON, Message, Tool
from distaff_worker.engines import answers, chat_answers
from distaff_worker.engines.discovery import discover
from distaff_worker.engines.http import SESSION_HEADER, HttpPool, parse_json
from distaff_worker.engines.protocol import ChatReply, EngineInfo
from distaff_worker.engines.quirks import Quirks, is_about_the_account

log = structlog.get_logger(__name__)

MOST_LESSONS = 8
"""Times one request is made anew because the API refuses something in it."""
USAGE_SAID_AT = (1, 10, 100, 1_000, 10_000, 100_000)
_PLACEHOLDER_URL = "http://engine/v1"
"""Host and key are the HTTP layer's business: it takes the path and the body of a request, nothing else."""


class PoolTransport(httpx.AsyncBaseTransport):
    """Sends what httpx would send through an HttpPool. Raises the pool's EngineErrors."""

    def __init__(self, pool: HttpPool) -> None:
        self._pool = pool
        self._read = chat_answers.reader(pool)

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        body = await request.aread()
        session = request.headers.get(SESSION_HEADER, "")
        answer = await self._pool.post(request.url.path, body, session=session, read=self._read)
        await self._pool.turnstile.turn()
        return httpx.Response(200, headers={"Content-Type": "application/json"}, content=answer)


class OpenAIEngine:
    """A ChatEngine; see `protocol.ChatEngine` for the contract."""

    def __init__(self, pool: HttpPool) -> None:
        self._pool = pool
        self._model = pool.section.model
        self._served: list[str] = []
        self._out_of_credit: EngineRefused | None = None
        self.quirks = Quirks(model=self._model)
        """What the API has been found not to take."""
        self.replies_without_usage = 0
        self._client = AsyncOpenAI(
            base_url=_PLACEHOLDER_URL,
            api_key="sent by the HTTP layer",
            max_retries=0,
            timeout=None,
            http_client=httpx.AsyncClient(transport=PoolTransport(pool), timeout=None),  # noqa: S113 - the pool's deadlines
        )

    async def check(self) -> EngineInfo:
        """See `protocol.Engine`. A hosted API without /v1/models passes when the configuration names the model.

        An API that lists its models but has just refused a request for want of credit is said to refuse.
        """
        found = await discover(self._pool, must_list=False)
        self._model, self._served, self.quirks.model = found.model, found.served, found.model
        refused, self._out_of_credit = self._out_of_credit, None
        if refused is not None:
            raise refused
        return EngineInfo(
            kind=self._pool.section.kind,
            model=found.model,
            version="",
            max_context_tokens=found.max_context_tokens,
        )

    async def close(self) -> None:
        await self._client.close()
        await self._pool.close()

    def temperature(self, asked: float) -> float:
        """See `protocol.ChatEngine`."""
        return self.quirks.temperature(asked)

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
        content = await self._taken(messages, tools, max_tokens, sampling, session)
        calls_before = sum(len(message.get("tool_calls") or []) for message in messages)
        return self._reply(content, calls_before=calls_before)

    async def _taken(
        self,
        messages: Sequence[Message],
        tools: Sequence[Tool],
        max_tokens: int,
        sampling: Mapping[str, JSON],
        session: str,
    ) -> bytes:
        """The answer to the request, which is made anew while the API's refusals teach how it has to be made."""
        parameters = {name: value for name, value in sampling.items() if name not in ("n", "stream")}
        lessons = 0
        while True:
            body = self.quirks.body(parameters, max_tokens=max_tokens, has_tools=bool(tools))
            conversation = self.quirks.messages(messages)
            offered: dict[str, JSON] = {"tools": list(tools)} if tools else {}
            try:
                content = await self._send(conversation, {**body, **offered}, session=session)
            except EngineRefused as error:
                lessons += 1
                if is_about_the_account(error):
                    self._out_of_credit = error
                if lessons > MOST_LESSONS or not self.quirks.learn(error, body, conversation):
                    raise
            else:
                self._out_of_credit = None
                return content

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

    def _reply(self, content: bytes, *, calls_before: int) -> ChatReply:
        where = f"engine {self._model!r}, chat completion"
        document = parse_json(content, where=where)
        choice = answers.only_choice(document, where=where)
        strict = self._pool.section.kind != "openai"
        answers.check_model(document.get("model"), self._model, where=where, others=None if strict else self._served)
        message = chat_answers.assistant_message(choice.get("message"), where=where, calls_before=calls_before)
        reason = chat_answers.finish_reason(choice.get("finish_reason"))
        if message["content"] is None and not message.get("tool_calls") and reason not in ("length", "abort"):
            if not message.get("reasoning_content"):
                raise EngineAnswerError(f"{where}: the answer has neither content nor tool calls")
            message["content"] = ""
        self.quirks.reasoning = chat_answers.reasoning_field(choice.get("message")) or self.quirks.reasoning
        usage = chat_answers.usage(document)
        self._count_usage(given=usage.given)
        return ChatReply(
            message=message,
            finish_reason="tool_calls" if message.get("tool_calls") and reason in ("stop", "none") else reason,
            prompt_tokens=usage.prompt_tokens,
            completion_tokens=usage.completion_tokens,
        )

    def _count_usage(self, *, given: bool) -> None:
        if given:
            return
        self.replies_without_usage += 1
        if self.replies_without_usage in USAGE_SAID_AT:
            log.warning("usage.missing", model=self._model, replies=self.replies_without_usage)
