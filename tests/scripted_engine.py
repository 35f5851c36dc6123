"""A scripted inference engine: vLLM's, SGLang's, llama.cpp's and OpenAI's routes over real sockets, answers by a Python callable.

Invariant: every request is recorded with the raw bytes that answered it, so a test can compare what came out of the
farm with what the engine said. Never runs a model.

    async with ScriptedEngine(script=lambda ask: Answer(token_ids=[5, 2])) as engine: ...   # on the running loop
    with ScriptedEngine(latency_s=0.5) as engine: ...                                        # on a thread of its own
    python -m tests.scripted_engine --port 8000 --latency-s 2 --tokens 64                    # in a process of its own
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import inspect
import itertools
import json
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from aiohttp import web

from tests.scripted_answers import (
    DEFAULT_ANSWER,
    GENERATION_ROUTES,
    JSON,
    Answer,
    Ask,
    Fault,
    Reply,
    Script,
    render,
    render_stream,
    status,
)

__all__ = ["Answer", "Ask", "Fault", "Record", "Reply", "Script", "ScriptedEngine", "status"]


@dataclass(slots=True, kw_only=True)
class Record:
    """One generation request with what became of it."""

    ask: Ask
    started: float
    """time.monotonic()."""
    reply: Reply | None = None
    status: int = 0
    raw: bytes = b""
    """The body that was sent, whole, also when it was a stream."""
    ended: float = 0.0
    aborted: bool = False
    """The client went away before the answer was complete."""


class ScriptedEngine:
    """See the module docstring. `url` is the base URL (without /v1) once started."""

    def __init__(
        self,
        *,
        script: Script | None = None,
        latency_s: float = 0.0,
        barrier: int = 0,
        model: str = "scripted",
        served: list[str] | None = None,
        max_model_len: int | None = 4096,
        api_key: str = "",
        keep_records: bool = True,
        port: int = 0,
        host: str = "127.0.0.1",
        ready_after_s: float = 0.0,
        refused: Mapping[str, int] | None = None,
    ) -> None:
        """barrier: hold every request until so many wait, then answer them all. api_key: 401 without it. ready_after_s:
        /health and /v1/models say 503 for so long. refused: path -> status of a route that the server does not have."""
        self.script: Script = script or (lambda ask: DEFAULT_ANSWER)
        self.latency_s = latency_s
        self.barrier = barrier
        self.model = model
        self.served = served or [model]
        self.max_model_len = max_model_len
        self.api_key = api_key
        self.keep_records = keep_records
        self.ready_after_s = ready_after_s
        self.refused = dict(refused or {})
        self.documents: dict[str, JSON] = {}
        """Path -> the document to answer instead of our own; not for the generation routes."""
        self.records: list[Record] = []
        self.paths: list[str] = []
        """Every request's path, the checks included."""
        self.in_flight = 0
        self.max_in_flight = 0
        self.count = 0
        """Generation requests so far."""
        self._host, self._port = host, port
        self._numbers = itertools.count()
        self._waiting: list[asyncio.Future[None]] = []
        self._open = asyncio.Event()
        self._runner: web.ServerRunner | None = None
        self._server: web.Server | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._started = 0.0

    @property
    def url(self) -> str:
        return f"http://{self._host}:{self._port}"

    @property
    def connections(self) -> int:
        """Sockets open to this engine now."""
        return 0 if self._server is None else len(self._server.connections)

    @property
    def prompts(self) -> list[list[int]]:
        """Prompt ids of every recorded request."""
        return [record.ask.prompt_ids for record in self.records]

    def pause(self) -> None:
        """Hold every answer from now on until `resume`. Callable from any thread."""
        self._call(self._open.clear)

    def resume(self) -> None:
        self._call(self._open.set)

    def _call(self, action: Callable[[], None]) -> None:
        if self._loop is None:
            action()
        else:
            self._loop.call_soon_threadsafe(action)

    # -- life

    async def start(self) -> None:
        """Listen, on the running loop."""
        self._loop = asyncio.get_running_loop()
        self._open.set()
        self._server = web.Server(self._handle, access_log=None, handler_cancellation=True)
        self._runner = web.ServerRunner(self._server, shutdown_timeout=0.05)
        await self._runner.setup()
        site = web.TCPSite(self._runner, self._host, self._port, backlog=8192)
        await site.start()
        self._port = int(self._runner.addresses[0][1])
        self._started = time.monotonic()

    async def stop(self) -> None:
        """Close every connection."""
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    async def __aenter__(self) -> ScriptedEngine:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    def __enter__(self) -> ScriptedEngine:
        started = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(started,), name="scripted-engine", daemon=True)
        self._thread.start()
        if not started.wait(10):
            raise TimeoutError("the scripted engine did not start")
        return self

    def __exit__(self, *_: object) -> None:
        if self._loop is not None and self._thread is not None:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(10)

    def _run(self, started: threading.Event) -> None:
        with asyncio.Runner() as runner:
            runner.run(self.start())
            started.set()
            runner.get_loop().run_forever()
            runner.run(self.stop())

    # -- requests

    async def _handle(self, request: web.BaseRequest) -> web.StreamResponse:
        path = request.path
        if self.keep_records:
            self.paths.append(path)
        if path == "/version":
            return _json(self.documents.get(path, {"version": "0.0-scripted"}))
        if time.monotonic() < self._started + self.ready_after_s:
            return _json({"error": {"code": 503, "message": "Loading model", "type": "unavailable_error"}}, 503)
        if path == "/health":
            return _json({"status": "ok"})
        if self.api_key and request.headers.get("Authorization") != f"Bearer {self.api_key}":
            return _json({"error": {"message": "Incorrect API key provided", "type": "auth", "code": 401}}, 401)
        if path in self.refused:
            return _json({"error": {"message": "Not Found", "code": self.refused[path]}}, self.refused[path])
        if path in self.documents:
            return _json(self.documents[path])
        if path == "/v1/models":
            card = {"object": "model", "max_model_len": self.max_model_len}
            return _json({"object": "list", "data": [{"id": name, **card} for name in self.served]})
        if path == "/props":
            return _json({"default_generation_settings": {"n_ctx": self.max_model_len}, "build_info": "scripted"})
        if path == "/model_info":
            return _json({"model_path": self.model, "is_generation": True, "weight_version": "default"})
        if path == "/server_info":
            return _json({"version": "0.0-scripted", "context_length": self.max_model_len})
        if path not in GENERATION_ROUTES:
            return _json({"error": {"message": f"no route {path}", "code": 404}}, 404)
        return await self._generate(request)

    async def _generate(self, request: web.BaseRequest) -> web.StreamResponse:
        body = json.loads(await request.read())
        headers = {name.lower(): value for name, value in request.headers.items()}
        ask = Ask(number=next(self._numbers), path=request.path, headers=headers, body=body)
        record = Record(ask=ask, started=time.monotonic())
        if self.keep_records:
            self.records.append(record)
        self.count += 1
        self.in_flight += 1
        self.max_in_flight = max(self.max_in_flight, self.in_flight)
        try:
            await self._hold()
            reply = self.script(ask)
            record.reply = await reply if inspect.isawaitable(reply) else reply
            response = await self._send(request, record)
        except (asyncio.CancelledError, ConnectionError):
            record.aborted = True
            raise
        finally:
            self.in_flight -= 1
            record.ended = time.monotonic()
        return response

    async def _hold(self) -> None:
        if self.latency_s:
            await asyncio.sleep(self.latency_s)
        if not self._open.is_set():
            await self._open.wait()
        if self.barrier:
            mine: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiting.append(mine)
            if len(self._waiting) >= self.barrier:
                waiting, self._waiting = self._waiting, []
                for other in waiting:
                    if not other.done():
                        other.set_result(None)
            await mine

    async def _send(self, request: web.BaseRequest, record: Record) -> web.StreamResponse:
        reply = record.reply
        if isinstance(reply, Fault):
            return await _send_fault(request, record, reply)
        if not isinstance(reply, Answer):
            raise TypeError(f"the script gave {reply!r}")
        record.status = 200
        if record.ask.path == "/completion" and record.ask.body.get("stream"):
            events = render_stream(reply, self.model)
            record.raw = b"".join(events)
            return await _send_events(request, events)
        record.raw = render(reply, record.ask.path, self.model, *_prompt_for(record.ask))
        return web.Response(body=record.raw, content_type="application/json")


def _prompt_for(ask: Ask) -> tuple[tuple[int, ...], ...]:
    """The prompt, for the routes that repeat it."""
    return (tuple(ask.prompt_ids),) if ask.path in ("/v1/completions", "/generate") else ()


def _json(value: JSON, code: int = 200) -> web.Response:
    return web.Response(body=json.dumps(value).encode(), status=code, content_type="application/json")


async def _send_events(request: web.BaseRequest, events: list[bytes]) -> web.StreamResponse:
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await response.prepare(request)
    for start in range(0, len(events), 256):
        await response.write(b"".join(events[start : start + 256]))
    await response.write_eof()
    return response


async def _send_fault(request: web.BaseRequest, record: Record, fault: Fault) -> web.StreamResponse:
    record.status = fault.status
    if fault.hang == "reset":
        if request.transport is not None:
            request.transport.abort()
        raise ConnectionResetError
    if fault.hang == "accept":
        await asyncio.Event().wait()
    if not fault.hang:
        record.raw = fault.body
        return web.Response(status=fault.status, headers=dict(fault.headers), body=fault.body)
    response = web.StreamResponse(status=fault.status, headers=dict(fault.headers))
    await response.prepare(request)
    if fault.hang in ("headers", "stall"):
        await response.write(fault.body)
        await asyncio.Event().wait()
    if fault.hang == "cut":
        await response.write(fault.body or b'{"choices": [')
        if request.transport is not None:
            request.transport.abort()
        raise ConnectionResetError
    for byte in itertools.chain(fault.body, itertools.repeat(32)):
        await response.write(bytes([byte]))
        await asyncio.sleep(fault.drip_s)
    return response


async def _main(arguments: argparse.Namespace) -> None:
    answer = Answer(
        token_ids=[5 + n % 1000 for n in range(arguments.tokens - 1)] + [arguments.eos], text="ok " * arguments.words
    )
    engine = ScriptedEngine(
        script=lambda ask: answer,
        latency_s=arguments.latency_s,
        model=arguments.model,
        max_model_len=arguments.context,
        keep_records=False,
        port=arguments.port,
    )
    stopped = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stopped.set)
    async with engine:
        print(json.dumps({"url": engine.url, "model": engine.model}), flush=True)
        await stopped.wait()
        print(json.dumps({"requests": engine.count, "max_in_flight": engine.max_in_flight}), file=sys.stderr)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.scripted_engine")
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--latency-s", type=float, default=0.0)
    parser.add_argument("--tokens", type=int, default=64, help="sampled tokens of each answer, the end token included")
    parser.add_argument("--words", type=int, default=16, help="words of each chat answer")
    parser.add_argument("--eos", type=int, default=2)
    parser.add_argument("--context", type=int, default=131072)
    parser.add_argument("--model", default="scripted")
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(_main(parser.parse_args()))


if __name__ == "__main__":
    main()
