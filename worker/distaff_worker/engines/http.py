"""The one HTTP layer under every engine: one connection pool, deadlines, retries, failover.

Invariant: a call ends within max(request_timeout_s, retry_budget_s), whatever the server does, and cancelling it
closes its connection, which is how an engine learns to stop. Retries happen here and nowhere else. Never logs or
raises a key.
"""

from __future__ import annotations

import asyncio
import io
import os
import random
import socket
from collections.abc import AsyncGenerator, Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, TypeVar

import aiohttp
import pydantic_core

from distaff.clients import redact_url
from distaff.config import EngineSection
from distaff.errors import ConfigurationError, EngineAnswerError, EngineError, EngineUnavailable
from distaff.types import JSON
from distaff_worker.engines.endpoints import Endpoint, Endpoints
from distaff_worker.engines.failures import PassingFailure, error_text, is_passing, refusal, retry_after_s
from distaff_worker.engines.gentle import LARGE_BYTES
from distaff_worker.turns import Turnstile

T = TypeVar("T")
Reader = Callable[[aiohttp.ClientResponse], Awaitable[T]]

SESSION_HEADER = "X-Session-ID"
MAX_ANSWER_BYTES = 64 << 20
MAX_ERROR_BYTES = 64 << 10
FREE_CONTAINERS, BYTES_PER_CONTAINER = 100_000, 16
"""Beyond the first an answer may open one list or object in so many bytes; vLLM's log-probabilities need twenty-nine."""
FIRST_BACKOFF_S = 0.5
LONGEST_BACKOFF_S = 30.0
IDLE_CONNECTION_S = 4.0
"""Below the five seconds after which uvicorn and llama.cpp close an idle connection, lest a request meets the closing."""
MOST_STALE = 3
"""Connections found closed that one attempt may meet before it counts as failed."""
_KEEPALIVE = (("TCP_KEEPIDLE", 30), ("TCP_KEEPINTVL", 10), ("TCP_KEEPCNT", 3))


class HttpPool:
    """Requests to the servers of one engine section. Made without a running loop; used on one loop; `close` it."""

    def __init__(self, section: EngineSection, *, rng: random.Random | None = None) -> None:
        """Raises ConfigurationError when the environment variable that the section names is not set."""
        self.section = section
        self._key = api_key(section.api_key_var)
        self._rng = rng or random.Random()  # noqa: S311 - jitter
        self._endpoints = Endpoints(section.base_urls, clock=lambda: asyncio.get_running_loop().time(), rng=self._rng)
        self._http: aiohttp.ClientSession | None = None
        self.turnstile = Turnstile()
        """To be passed before work that takes a good part of a millisecond: building a request, checking an answer."""
        self.bulk = Turnstile()
        """To be passed by the readers of large answers."""
        self._parsing = ThreadPoolExecutor(1, "distaff-parse")
        """One thread, so that large answers that arrive together are in memory one at a time once parsed."""

    @property
    def urls(self) -> list[str]:
        return [endpoint.url for endpoint in self._endpoints.all]

    @property
    def secrets(self) -> list[str]:
        return [self._key] if self._key else []

    async def post(self, path: str, body: bytes, *, session: str, read: Reader[T]) -> T:
        """POST a JSON body, with retries, and return what `read` makes of the 200 answer.

        Raises EngineUnavailable (retries or deadline used up), EngineRefused, ContextOverflow, and what `read` raises.
        """
        loop = asyncio.get_running_loop()
        begun = loop.time()
        end = begun + max(self.section.request_timeout_s, self.section.retry_budget_s)
        tried: Endpoint | None = None
        for attempt in range(self.section.max_retries + 1):
            endpoint = self._endpoints.choose(session, avoid=tried)
            deadline = min(end, loop.time() + self.section.request_timeout_s)
            try:
                return await self._attempt(endpoint, path, body, session=session, read=read, deadline=deadline)
            except PassingFailure as failure:
                last = failure
                tried = endpoint if failure.sick else None
            wait = self._backoff(attempt, last)
            if attempt == self.section.max_retries or loop.time() + wait > begun + self.section.retry_budget_s:
                break
            await asyncio.sleep(wait)
        raise EngineUnavailable(
            f"engine at {redact_url(endpoint.url)}: {last.reason}; gave up after {attempt + 1} attempts in "
            f"{loop.time() - begun:.1f} s (engine.max_retries {self.section.max_retries}, engine.retry_budget_s "
            f"{self.section.retry_budget_s:g})"
        )

    async def get(self, url: str, path: str, *, timeout_s: float) -> JSON:
        """GET a JSON document of one server, once. Errors as in `post`."""
        endpoint = next(endpoint for endpoint in self._endpoints.all if endpoint.url == url)
        deadline = asyncio.get_running_loop().time() + timeout_s
        try:
            return await self._attempt(endpoint, path, None, session="", read=read_json, deadline=deadline)
        except PassingFailure as failure:
            raise EngineUnavailable(f"engine at {redact_url(url)}: {failure.reason}") from None

    async def post_to(self, url: str, path: str, body: bytes, *, read: Reader[T], timeout_s: float) -> T:
        """POST to one server, once. Errors as in `post`."""
        endpoint = next(endpoint for endpoint in self._endpoints.all if endpoint.url == url)
        deadline = asyncio.get_running_loop().time() + timeout_s
        try:
            return await self._attempt(endpoint, path, body, session="", read=read, deadline=deadline)
        except PassingFailure as failure:
            raise EngineUnavailable(f"engine at {redact_url(url)}: {failure.reason}") from None

    async def off_loop(self, work: Callable[[], T]) -> T:
        """What `work`, which takes more than ten milliseconds, returns; done on a thread."""
        return await asyncio.get_running_loop().run_in_executor(self._parsing, work)

    async def close(self) -> None:
        """Close every connection."""
        self._parsing.shutdown(wait=False, cancel_futures=True)
        if self._http is not None:
            await self._http.close()
            self._http = None

    async def _attempt(
        self, endpoint: Endpoint, path: str, body: bytes | None, *, session: str, read: Reader[T], deadline: float
    ) -> T:
        """One exchange, counted for or against the server."""
        begun = asyncio.get_running_loop().time()
        try:
            async with asyncio.timeout_at(deadline):
                result = await self._exchange(endpoint, path, body, session=session, read=read)
        except TimeoutError:
            self._endpoints.failed(endpoint, connection=True)
            raise EngineUnavailable(
                f"engine at {redact_url(endpoint.url)}: no complete answer on {path} within {deadline - begun:.1f} s "
                "(engine.request_timeout_s); it hangs, is overloaded, or the answer needs longer"
            ) from None
        except PassingFailure as failure:
            if failure.sick:
                self._endpoints.failed(endpoint, connection=failure.connection)
            raise
        except EngineError:
            self._endpoints.succeeded(endpoint)
            raise
        self._endpoints.succeeded(endpoint)
        return result

    async def _exchange(self, endpoint: Endpoint, path: str, body: bytes | None, *, session: str, read: Reader[T]) -> T:
        """One answer. A kept connection that turns out to be closed says nothing of the server: the request goes out again at once.

        llama.cpp closes after each streamed answer without announcing it.
        """
        for _ in range(MOST_STALE):
            sent = _Sent()
            try:
                return await self._send(endpoint, path, body, session=session, read=read, sent=sent)
            except PassingFailure as failure:
                if not (sent.reused and failure.unanswered):
                    raise
        return await self._send(endpoint, path, body, session=session, read=read, sent=_Sent())

    async def _send(
        self, endpoint: Endpoint, path: str, body: bytes | None, *, session: str, read: Reader[T], sent: _Sent
    ) -> T:
        try:
            async with self._client().request(
                "GET" if body is None else "POST",
                endpoint.url + path,
                data=_payload(body),
                headers={SESSION_HEADER: session} if session else None,
                proxy=endpoint.proxy,
                allow_redirects=False,
                trace_request_ctx=sent,
            ) as response:
                if response.status == 200:
                    return await read(response)
                text = await _read_error(response)
        except (aiohttp.ClientError, OSError) as error:
            unanswered = isinstance(error, _CLOSED)
            raise PassingFailure(_describe(error), connection=True, unanswered=unanswered) from None
        raise self._failure(response, text, where=f"engine at {redact_url(endpoint.url)}, {path},")

    def _failure(self, response: aiohttp.ClientResponse, text: bytes, *, where: str) -> Exception:
        if is_passing(response.status, text):
            reason = f"it answers {response.status}: {error_text(text, secrets=self.secrets)}"
            return PassingFailure(reason, retry_after_s=retry_after_s(response.headers), sick=response.status >= 500)
        return refusal(response.status, text, where=where, key_var=self.section.api_key_var, secrets=self.secrets)

    def _backoff(self, attempt: int, failure: PassingFailure) -> float:
        """Full jitter; after Retry-After a tenth of it more, so that the waiting do not come back as one."""
        jitter = self._rng.uniform(0, min(LONGEST_BACKOFF_S, FIRST_BACKOFF_S * 2.0**attempt))
        if failure.retry_after_s is None:
            return jitter
        return failure.retry_after_s + min(jitter, 0.1 * failure.retry_after_s)

    def _client(self) -> aiohttp.ClientSession:
        if self._http is None:
            headers = {"Content-Type": "application/json", "User-Agent": "distaff", "Accept-Encoding": "identity"}
            if self._key:
                headers["Authorization"] = f"Bearer {self._key}"
            self._http = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(
                    limit=0, keepalive_timeout=IDLE_CONNECTION_S, ttl_dns_cache=30, socket_factory=_keepalive_socket
                ),
                timeout=aiohttp.ClientTimeout(total=None, connect=self.section.connect_timeout_s),
                cookie_jar=aiohttp.DummyCookieJar(),
                headers=headers,
                trace_configs=[_tracing()],
            )
        return self._http


@dataclass(slots=True, eq=False)
class _Sent:
    """How a request went out."""

    reused: bool = False
    """On a connection that an earlier request had used."""


def _tracing() -> aiohttp.TraceConfig:
    """Tells each request's `_Sent` whether its connection is a kept one."""

    async def reuse(
        _: aiohttp.ClientSession, context: SimpleNamespace, __: aiohttp.TraceConnectionReuseconnParams
    ) -> None:
        context.trace_request_ctx.reused = True

    tracing = aiohttp.TraceConfig()
    tracing.on_connection_reuseconn.append(reuse)
    return tracing


def api_key(variable: str) -> str:
    """The key in the environment variable `variable`, "" when none is named. Raises ConfigurationError when it is not set."""
    key = os.environ.get(variable, "").strip() if variable else ""
    if variable and not key:
        raise ConfigurationError(
            f"engine.api_key_var names the environment variable {variable}, which is not set. Set it where the worker "
            f"runs (export {variable}=...), or leave engine.api_key_var empty for an engine without keys"
        )
    return key


async def read_body(response: aiohttp.ClientResponse) -> bytes:
    """The whole body. Raises EngineAnswerError above MAX_ANSWER_BYTES."""
    parts = [part async for part in _bounded(response, MAX_ANSWER_BYTES)]
    return parts[0] if len(parts) == 1 else b"".join(parts)


async def read_parts(response: aiohttp.ClientResponse, bulk: Turnstile) -> list[bytes]:
    """The whole body, in the pieces it came in. Raises EngineAnswerError above MAX_ANSWER_BYTES.

    bulk: passed before each further piece of a large one. What nobody takes, the connection does not read, so that sixty answers of
    megabytes that arrive together are read some pieces a turn.
    """
    parts = []
    size = 0
    async for part in _bounded(response, MAX_ANSWER_BYTES):
        parts.append(part)
        size += len(part)
        if size > LARGE_BYTES:
            await bulk.turn()
    return parts


async def read_json(response: aiohttp.ClientResponse) -> JSON:
    """The body as strict JSON. Raises EngineAnswerError."""
    return parse_json(await read_body(response), where=describe(response))


async def read_events(response: aiohttp.ClientResponse) -> AsyncGenerator[JSON]:
    """The JSON objects of a server-sent event stream. Raises EngineAnswerError."""
    where = describe(response)
    begun: list[bytes] = []
    """Pieces of a line that has not ended: joined once, or a long line would cost the square of its length."""
    async for part in _bounded(response, MAX_ANSWER_BYTES):
        first, *others = part.split(b"\n")
        begun.append(first)
        for other in others:
            line = b"".join(begun)
            begun = [other]
            if line.startswith((b"data:", b"error:")):
                field, _, text = line.partition(b":")
                if text.strip() != b"[DONE]":
                    event = parse_json(text, where=where)
                    yield {"error": event} if field == b"error" else event


def check_density(body: bytes, *, where: str) -> None:
    """Raise EngineAnswerError for a body of little but brackets, which would grow thirtyfold in memory."""
    if len(body) < FREE_CONTAINERS:
        return
    containers = body.count(b"[") + body.count(b"{")
    if containers > FREE_CONTAINERS and containers > len(body) // BYTES_PER_CONTAINER:
        raise EngineAnswerError(f"{where}: the answer opens {containers} lists and objects in {len(body)} bytes")


def parse_json(body: bytes, *, where: str) -> JSON:
    """Strict JSON (no NaN, no infinities) or EngineAnswerError."""
    check_density(body, where=where)
    try:
        return pydantic_core.from_json(body, allow_inf_nan=False)
    except ValueError as error:
        raise not_json(error, where=where) from None


def not_json(error: ValueError, *, where: str) -> EngineAnswerError:
    return EngineAnswerError(f"{where}: the answer is not JSON ({error})")


def describe(response: aiohttp.ClientResponse) -> str:
    """Server and route of an answer, for error texts."""
    url = response.url.with_user(None)
    return f"engine at {url.origin()}, {url.path}"


async def _bounded(response: aiohttp.ClientResponse, limit_bytes: int) -> AsyncGenerator[bytes]:
    size = 0
    async for part in response.content.iter_any():
        size += len(part)
        if size > limit_bytes:
            raise EngineAnswerError(f"{describe(response)}: the answer is larger than {limit_bytes >> 20} MiB")
        yield part


async def _read_error(response: aiohttp.ClientResponse) -> bytes:
    body = b""
    async for part in response.content.iter_any():
        body += part
        if len(body) > MAX_ERROR_BYTES:
            break
    return body[:MAX_ERROR_BYTES]


def _payload(body: bytes | None) -> bytes | io.BytesIO | None:
    """aiohttp writes a file in pieces and bytes at once; a megabyte at once would hold the loop."""
    return io.BytesIO(body) if body is not None and len(body) >= 1 << 20 else body


_CLOSED = (aiohttp.ServerDisconnectedError, ConnectionResetError, aiohttp.ClientOSError)


def _describe(error: aiohttp.ClientError | OSError) -> str:
    if isinstance(error, aiohttp.ConnectionTimeoutError):
        return "no connection within engine.connect_timeout_s"
    if isinstance(error, aiohttp.ClientConnectorError):
        return f"no connection ({error.os_error.strerror or type(error.os_error).__name__})"
    if isinstance(error, _CLOSED):
        return "it closed the connection without an answer"
    if isinstance(error, aiohttp.ClientPayloadError):
        return "it closed the connection in the middle of an answer"
    return f"the exchange failed ({type(error).__name__})"


def _keepalive_socket(info: tuple[int, int, int, str, tuple[Any, ...]]) -> socket.socket:
    """A socket that notices a silently dead peer after a minute, where the platform has the options."""
    made = socket.socket(family=info[0], type=info[1], proto=info[2])
    made.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _KEEPALIVE:
        if hasattr(socket, name):
            made.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    return made
