"""A transparent HTTP proxy that keeps every request and the raw body that answered it: what the engine really said."""

from __future__ import annotations

import contextlib
import json
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import aiohttp
from aiohttp import web


@dataclass(slots=True)
class Exchange:
    """One request and its whole answer."""

    path: str
    request: dict[str, Any]
    answer: bytes = b""

    def events(self) -> list[dict[str, Any]]:
        """The JSON objects of a `data:` stream, or the one of a plain body."""
        lines = [line[6:] for line in self.answer.split(b"\n") if line.startswith(b"data: ")]
        return [json.loads(line) for line in lines or [self.answer] if line.strip() and line.strip() != b"[DONE]"]


class RecordingProxy:
    """`async with RecordingProxy(target) as proxy`: send requests to `proxy.url`, read `proxy.exchanges`."""

    def __init__(self, target: str) -> None:
        self._target = target
        self.exchanges: list[Exchange] = []
        self.url = ""

    async def __aenter__(self) -> RecordingProxy:
        self._session = aiohttp.ClientSession(auto_decompress=False)
        self._runner = web.ServerRunner(web.Server(self._forward))
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}"
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._runner.cleanup()
        await self._session.close()

    async def _forward(self, request: web.BaseRequest) -> web.StreamResponse:
        body = await request.read()
        exchange = Exchange(request.path, json.loads(body) if body else {})
        self.exchanges.append(exchange)
        headers = {"Content-Type": request.headers.get("Content-Type", "application/json")}
        async with self._session.request(
            request.method, f"{self._target}{request.path_qs}", data=body or None, headers=headers
        ) as upstream:
            answer = web.StreamResponse(
                status=upstream.status, headers={"Content-Type": upstream.headers["Content-Type"]}
            )
            await answer.prepare(request)
            async for chunk in upstream.content.iter_any():
                exchange.answer += chunk
                with contextlib.suppress(ConnectionResetError):
                    await answer.write(chunk)
            with contextlib.suppress(ConnectionResetError):
                await answer.write_eof()
            return answer
