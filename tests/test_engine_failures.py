"""Retries, refusals, hangs and failover of the engines, against scripted servers; requests are counted."""

from __future__ import annotations

import asyncio
import random
import time

import pytest

from distaff.errors import (
    ContextOverflow,
    EngineAnswerError,
    EngineError,
    EngineRefused,
    EngineUnavailable,
)
from distaff_worker.engines import http, open_token_engine
from distaff_worker.engines.endpoints import Endpoints
from distaff_worker.engines.failures import PassingFailure
from tests.engines_support import (
    DEADLINE_S,
    KINDS,
    NOISE_S,
    Open,
    ask_tokens,
    replies,
    section,
    until,
)
from tests.engines_support import opened as opened
from tests.engines_support import short_backoff as short_backoff
from tests.scripted_answers import render
from tests.scripted_engine import Answer, Fault, ScriptedEngine, status

pytestmark = pytest.mark.usefixtures("short_backoff")


# -- failures that pass, and those that do not (P11)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "fault",
    [status(500), status(503), status(429), status(408), Fault(hang="reset"), Fault(hang="cut")],
    ids=["500", "503", "429", "408", "reset", "cut"],
)
async def test_a_passing_failure_is_retried(kind: str, fault: Fault, opened: Open) -> None:
    """P11: two failures and an answer are three requests."""
    async with ScriptedEngine(script=replies(fault, fault, Answer())) as server:
        await opened(section(server, kind=kind, model="scripted"))()
    assert server.count == 3


@pytest.mark.parametrize("kind", KINDS)
async def test_retries_end_with_their_number(kind: str, opened: Open) -> None:
    """max_retries 2 is three requests, and the error names server, reason and settings."""
    async with ScriptedEngine(script=lambda ask: status(503, "overloaded")) as server:
        with pytest.raises(EngineUnavailable, match=r"503: overloaded.*after 3 attempts.*max_retries 2") as error:
            await opened(section(server, kind=kind, model="scripted", max_retries=2))()
    assert server.count == 3
    assert server.url in str(error.value)


async def test_retries_end_with_the_budget(opened: Open) -> None:
    """P11: No retry begins after retry_budget_s."""
    async with ScriptedEngine(script=lambda ask: status(503)) as server:
        begun = time.monotonic()
        with pytest.raises(EngineUnavailable):
            await opened(section(server, max_retries=1000, retry_budget_s=1.0))()
        assert time.monotonic() - begun < 10.0
    assert 2 <= server.count < 100


@pytest.mark.parametrize("kind", KINDS)
async def test_retry_after_is_honoured(kind: str, opened: Open) -> None:
    """P11: the second request comes no sooner than the server asked for."""
    async with ScriptedEngine(script=replies(status(429, Retry_After="0.7"), Answer())) as server:
        await opened(section(server, kind=kind, model="scripted"))()
    first, second = server.records
    assert second.started - first.ended >= 0.69


def test_waits_between_retries_are_spread() -> None:
    """P11: full jitter below a bound that doubles; after Retry-After between that and a tenth more, so that the waiting do not come back as one."""
    pool = http.HttpPool(section("http://127.0.0.1:9"), rng=random.Random(1))
    for attempt in range(3):
        bound = http.FIRST_BACKOFF_S * 2.0**attempt
        waits = sorted(pool._backoff(attempt, PassingFailure("503")) for _ in range(300))
        assert 0 <= waits[0] < 0.1 * bound
        assert 0.9 * bound < waits[-1] <= bound
        assert len(set(waits)) > 290
    waits = sorted(pool._backoff(3, PassingFailure("429", retry_after_s=1.0)) for _ in range(300))
    assert 1.0 <= waits[0] < 1.01
    assert 1.09 < waits[-1] <= 1.1


async def test_a_retry_after_beyond_the_budget_gives_up_at_once(opened: Open) -> None:
    """Waiting would be in vain."""
    async with ScriptedEngine(script=lambda ask: status(429, Retry_After="3600")) as server:
        with pytest.raises(EngineUnavailable, match="429"):
            await opened(section(server))()
    assert server.count == 1


REFUSALS = {
    "key": (status(401, "bad key"), EngineRefused),
    "forbidden": (status(403, "no"), EngineRefused),
    "model": (status(404, "The model `x` does not exist"), EngineRefused),
    "parameter": (status(400, "top_k must be an integer"), EngineRefused),
    "quota": (status(429, "insufficient_quota"), EngineRefused),
    "redirect": (Fault(status=302, headers={"Location": "http://elsewhere.invalid/"}), EngineRefused),
    "vllm overflow": (status(400, "This model's maximum context length is 4096 tokens."), ContextOverflow),
    "llamacpp overflow": (
        Fault(status=400, body=b'{"error":{"code":400,"message":"too big","type":"exceed_context_size_error"}}'),
        ContextOverflow,
    ),
    "sglang overflow": (
        Fault(
            status=400,
            body=b'{"error":{"message":"The input (9 tokens) is longer than the model\'s context length (8 tokens)."}}',
        ),
        ContextOverflow,
    ),
    "sglang scheduler overflow": (
        status(400, "Input length (9 tokens) exceeds the maximum allowed length (8 tokens). Use a shorter input"),
        ContextOverflow,
    ),
    "openai overflow": (
        Fault(status=400, body=b'{"error":{"message":"no","code":"context_length_exceeded"}}'),
        ContextOverflow,
    ),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("fault", "error"), REFUSALS.values(), ids=REFUSALS.keys())
async def test_a_refusal_is_not_repeated(kind: str, fault: Fault, error: type[EngineError], opened: Open) -> None:
    """One request, one error that says it was the request."""
    async with ScriptedEngine(script=lambda ask: fault) as server:
        with pytest.raises(error) as caught:
            await opened(section(server, kind=kind, model="scripted"))()
    assert type(caught.value) is error
    assert server.count == 1


# -- hangs (P10)

HANGS = {
    "accept and hold": Fault(hang="accept"),
    "after the headers": Fault(hang="headers"),
    "one byte at a time": Fault(hang="drip", body=b'{"choices": []}'),
    "in a stream": Fault(
        hang="drip", body=b'data: {"stop": false, "tokens": [5], "tokens_predicted": 1}\n\n', drip_s=0.001
    ),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("hang", HANGS.values(), ids=HANGS.keys())
async def test_a_hanging_server_costs_one_deadline(kind: str, hang: Fault, opened: Open) -> None:
    """P10: 20 requests are settled at the deadline, are not repeated, and leave no socket open."""
    async with ScriptedEngine(script=lambda ask: hang) as server:
        call = opened(
            section(server, kind=kind, model="scripted", request_timeout_s=DEADLINE_S, retry_budget_s=DEADLINE_S)
        )
        begun = time.monotonic()
        outcomes = await asyncio.gather(*(call() for _ in range(20)), return_exceptions=True)
        assert time.monotonic() - begun < DEADLINE_S + NOISE_S
        assert {type(outcome) for outcome in outcomes} <= {EngineUnavailable, EngineAnswerError}
        assert server.max_in_flight == server.count == 20
        await until(lambda: server.connections == 0)


@pytest.mark.parametrize("kind", KINDS)
async def test_cancelling_a_call_aborts_the_request(kind: str, opened: Open) -> None:
    """The server sees the connection close at once."""
    async with ScriptedEngine(script=lambda ask: Fault(hang="accept")) as server:
        task = asyncio.ensure_future(opened(section(server, kind=kind, model="scripted"))())
        await until(lambda: server.in_flight == 1)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await until(lambda: server.records[0].aborted)
        await until(lambda: server.connections == 0)


async def test_connections_are_reused(opened: Open) -> None:
    """A hundred requests one after the other need one socket."""
    async with ScriptedEngine() as server:
        call = opened(section(server))
        for _ in range(100):
            await call()
        assert server.connections == 1


class OneAnswerEach:
    """A server that promises to keep a connection and closes it, without a word, when the next request comes on it."""

    def __init__(self) -> None:
        self.connections = 0
        self.unanswered = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        await self._request(reader)
        body = render(Answer(), "/inference/v1/generate", "scripted")
        writer.write(b"HTTP/1.1 200 OK\r\nKeep-Alive: timeout=5\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
        await writer.drain()
        if await self._request(reader):
            self.unanswered += 1
        writer.close()

    async def _request(self, reader: asyncio.StreamReader) -> bool:
        try:
            head = await reader.readuntil(b"\r\n\r\n")
        except asyncio.IncompleteReadError:
            return False
        length = next(line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:"))
        return bool(await reader.readexactly(int(length.partition(b":")[2])))


async def test_a_kept_connection_that_is_closed_is_no_failure_of_the_server(opened: Open) -> None:
    """llama.cpp closes after each streamed answer: the request goes out again at once, is no retry, and nobody is sick."""
    peer = OneAnswerEach()
    async with await asyncio.start_server(peer.serve, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        call = opened(section(f"http://127.0.0.1:{port}", max_retries=0, retry_budget_s=0.001))
        for _ in range(10):
            await call()
    assert peer.connections == 10
    assert peer.unanswered == 9


async def test_a_server_that_never_answers_a_kept_connection_is_found_out(opened: Open) -> None:
    """What was sent again at once is bounded: a new connection that is closed is a failure."""
    async with ScriptedEngine(script=replies(Answer(), Fault(hang="reset"))) as server:
        call = opened(section(server, max_retries=0))
        await call()
        with pytest.raises(EngineUnavailable, match="closed the connection"):
            await call()
    assert server.count == 3


# -- several servers


async def test_a_session_stays_on_one_server_and_sessions_spread() -> None:
    """Each of 40 sessions asks one server three times; both servers have some."""
    async with ScriptedEngine() as one, ScriptedEngine() as two:
        engine = open_token_engine(section(one, two), vocab_size=100)
        for n in range(40):
            for _ in range(3):
                await ask_tokens(engine, session=f"s{n}")
        await engine.close()
        sessions = [{r.ask.headers["x-session-id"] for r in server.records} for server in (one, two)]
    assert all(sessions)
    assert not sessions[0] & sessions[1]
    assert one.count + two.count == 120


@pytest.mark.parametrize("fault", [None, status(500), Fault(hang="reset")], ids=["dead", "500", "reset"])
async def test_one_sick_server_of_two_does_not_stop_the_run(fault: Fault | None) -> None:
    """P11: every request is answered, and the sick one is soon left alone."""
    async with ScriptedEngine(script=lambda ask: fault or Answer()) as sick, ScriptedEngine() as well:
        if fault is None:
            await sick.stop()
        engine = open_token_engine(section(sick, well), vocab_size=100)
        for n in range(30):
            await ask_tokens(engine, session=f"s{n}")
        await engine.close()
    assert well.count == 30
    assert sick.count <= 4


async def test_a_failed_request_is_repeated_on_the_other_server() -> None:
    """One failure is no reason to leave a server alone, but the request itself goes elsewhere at once."""
    async with ScriptedEngine(script=lambda ask: status(500)) as sick, ScriptedEngine() as well:
        engine = open_token_engine(section(sick, well), vocab_size=100)
        for n in range(100):
            await ask_tokens(engine, session=f"s{n}")
            if sick.count:
                break
        await engine.close()
    assert sick.count == 1
    assert well.count == n + 1


def test_one_request_finds_out_whether_a_sick_server_has_recovered() -> None:
    """The others stay away until that one was answered, or for another rest."""
    now = 0.0
    endpoints = Endpoints(["http://a", "http://b"], clock=lambda: now, rng=random.Random(0))
    session = next(s for s in map(str, range(99)) if endpoints.choose(s).url == "http://a")
    sick = endpoints.choose(session)
    endpoints.failed(sick, connection=True)
    assert endpoints.choose(session).url == "http://b"
    now = 100.0
    assert [endpoints.choose(session).url for _ in range(3)] == ["http://a", "http://b", "http://b"]
    now = 200.0
    assert endpoints.choose(session) is sick
    endpoints.succeeded(sick)
    assert [endpoints.choose(session).url for _ in range(3)] == ["http://a"] * 3


async def test_a_recovered_server_gets_its_sessions_back() -> None:
    """After its rest one request tries it, and its success opens it to all."""
    healthy = False
    async with (
        ScriptedEngine(script=lambda ask: Answer() if healthy else status(500)) as first,
        ScriptedEngine() as second,
    ):
        engine = open_token_engine(section(first, second), vocab_size=100)
        for n in range(20):
            await ask_tokens(engine, session=f"s{n}")
        healthy = True
        before = first.count
        end = time.monotonic() + 10
        while first.count < before + 5 and time.monotonic() < end:
            await asyncio.gather(*(ask_tokens(engine, session=f"s{n}") for n in range(20)))
            await asyncio.sleep(0.05)
        await engine.close()
    assert first.count >= before + 5
