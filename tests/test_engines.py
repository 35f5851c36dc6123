"""The engines against a scripted server: what is sent, what is accepted, what is an error, and that nothing hangs."""

from __future__ import annotations

import asyncio
import itertools
import json
import math
import random
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest

from distaff.config import EngineSection
from distaff.errors import (
    ConfigurationError,
    ContextOverflow,
    EngineAnswerError,
    EngineError,
    EngineRefused,
    EngineUnavailable,
)
from distaff_worker.engines import open_chat_engine, open_token_engine
from distaff_worker.engines.endpoints import Endpoints
from distaff_worker.engines.protocol import ChatEngine, ChatReply, Generation, TokenEngine
from distaff_worker.engines.turns import Turnstile
from tests.scripted_answers import render, render_stream
from tests.scripted_engine import Answer, Ask, Fault, Reply, Script, ScriptedEngine, status

KINDS = ("vllm", "llamacpp", "openai")
TOKEN_KINDS = ("vllm", "llamacpp")
DEADLINE_S = 0.6
NOISE_S = 5.0
"""The promise is one second; a machine that runs other tests beside these may take longer for work of its own."""

Call = Callable[[], Awaitable[Generation | ChatReply]]
Open = Callable[..., Call]


def section(*engines: ScriptedEngine | str, kind: str = "vllm", **settings: Any) -> EngineSection:
    urls = [engine if isinstance(engine, str) else engine.url for engine in engines]
    quick = {"request_timeout_s": 20.0, "retry_budget_s": 20.0, "connect_timeout_s": 10.0, "start_timeout_s": 0.3}
    return EngineSection.model_validate({"kind": kind, "base_urls": urls, **quick, **settings})


def ask_tokens(
    engine: TokenEngine, *, session: str = "s", max_tokens: int = 8, **sampling: Any
) -> Awaitable[Generation]:
    return engine.generate([1, 2, 3], max_tokens=max_tokens, sampling=sampling, session=session)


def ask_chat(engine: ChatEngine, *, session: str = "s", tools: Any = (), **sampling: Any) -> Awaitable[ChatReply]:
    messages = [{"role": "user", "content": "hi"}]
    return engine.chat(messages, tools=tools, max_tokens=8, sampling=sampling, session=session)


@pytest.fixture(autouse=True)
def _short_backoff(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("distaff_worker.engines.http.FIRST_BACKOFF_S", 0.05)


@pytest.fixture
async def opened() -> AsyncIterator[Open]:
    """opened(section, vocab_size) -> a call of that engine, whatever its kind; closes them all."""
    engines: list[TokenEngine | ChatEngine] = []

    def make(config: EngineSection, vocab_size: int | None = 100) -> Call:
        if config.kind == "openai":
            chat = open_chat_engine(config)
            engines.append(chat)
            return lambda: ask_chat(chat)
        tokens = open_token_engine(config, vocab_size=vocab_size)
        engines.append(tokens)
        return lambda: ask_tokens(tokens)

    yield make
    for engine in engines:
        await engine.close()


async def until(condition: Callable[[], bool], *, seconds: float = 3.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            raise TimeoutError("the condition did not come true")
        await asyncio.sleep(0.01)


def replies(*sequence: Reply) -> Script:
    """The nth request gets the nth reply, further ones the last."""
    return lambda ask: sequence[min(ask.number, len(sequence) - 1)]


# -- what is sent and what comes back


@pytest.mark.parametrize("kind", TOKEN_KINDS)
async def test_ids_and_logprobs_are_the_ones_in_the_answer(kind: str) -> None:
    """Ids, log-probabilities and the reason come back unchanged, in order."""
    answer = Answer(token_ids=[9, 8, 7, 2], logprobs=[-0.5, -1.25, 0.0, -3.0], finish_reason="length")
    async with ScriptedEngine(script=lambda ask: answer) as server:
        engine = open_token_engine(section(server, kind=kind), vocab_size=100)
        got = await ask_tokens(engine, temperature=0.7, seed=11, session="rollout-1")
        await engine.close()
    assert (got.token_ids, got.logprobs, got.finish_reason) == ([9, 8, 7, 2], [-0.5, -1.25, 0.0, -3.0], "length")
    ask = server.records[0].ask
    assert ask.prompt_ids == [1, 2, 3]
    assert ask.headers["x-session-id"] == "rollout-1"
    assert ask.sampling["temperature"] == 0.7
    assert ask.sampling["seed"] == 11
    assert ask.sampling["top_k"] == 0
    assert ask.sampling["min_p"] == 0


async def test_llamacpp_is_always_streamed_and_told_to_return_tokens() -> None:
    """A plain request would not be aborted when the client goes."""
    async with ScriptedEngine() as server:
        engine = open_token_engine(section(server, kind="llamacpp"), vocab_size=100)
        await ask_tokens(engine, seed=2**63 - 1)
        await engine.close()
    body = server.records[0].ask.body
    assert body["stream"] is True
    assert body["return_tokens"] is True
    assert body["n_probs"] == 1
    assert body["n_predict"] == 8
    assert 0 <= body["seed"] < 2**32 - 1


async def test_vllm_weight_versions_are_kept() -> None:
    """The version the engine names is in the generation."""
    async with ScriptedEngine(script=lambda ask: Answer(policy_version="step-7")) as server:
        engine = open_token_engine(section(server), vocab_size=100)
        assert (await ask_tokens(engine)).policy_version == "step-7"
        await engine.close()


async def test_llamacpp_stop_token_ids_end_the_completion_and_free_the_server() -> None:
    """The server does not know them: the engine stops reading at the first and closes the connection."""
    events = render_stream(Answer(token_ids=[9, 8, 7, 6]), "scripted")[:-1]
    endless = Fault(hang="drip", body=b"".join(events), drip_s=0.0001)
    async with ScriptedEngine(script=lambda ask: endless) as server:
        engine = open_token_engine(section(server, kind="llamacpp"), vocab_size=100)
        got = await ask_tokens(engine, stop_token_ids=[7])
        await until(lambda: server.connections == 0)
        await engine.close()
    assert (got.token_ids, got.finish_reason) == ([9, 8, 7], "stop")
    assert "stop_token_ids" not in server.records[0].ask.body


async def test_llamacpp_stop_token_that_the_server_knows_ends_normally() -> None:
    """The last event is read, so the connection is kept; a stop token as the last allowed one is a stop."""
    answer = Answer(token_ids=[9, 2], finish_reason="length")
    async with ScriptedEngine(script=lambda ask: answer) as server:
        engine = open_token_engine(section(server, kind="llamacpp"), vocab_size=100)
        got = await ask_tokens(engine, stop_token_ids=[2])
        assert server.connections == 1
        await engine.close()
    assert (got.token_ids, got.finish_reason) == ([9, 2], "stop")


async def test_llamacpp_refuses_stop_strings() -> None:
    """They make the server lose log-probabilities."""
    engine = open_token_engine(section("http://127.0.0.1:9", kind="llamacpp"), vocab_size=100)
    with pytest.raises(ConfigurationError, match="stop"):
        await ask_tokens(engine, stop=["\n"])
    await engine.close()


@pytest.mark.parametrize("kind", TOKEN_KINDS)
async def test_max_tokens_is_cut_to_the_context_and_a_full_context_is_an_overflow(kind: str) -> None:
    """vLLM refuses prompt + max_tokens above its context; the prompt alone may not fit."""
    async with ScriptedEngine(max_model_len=5) as server:
        engine = open_token_engine(section(server, kind=kind), vocab_size=100)
        await engine.check()
        await ask_tokens(engine, max_tokens=100)
        name = "max_tokens" if kind == "vllm" else "n_predict"
        assert server.records[-1].ask.sampling[name] == 2
        with pytest.raises(ContextOverflow):
            await engine.generate([1] * 5, max_tokens=1, sampling={}, session="s")
        await engine.close()


async def test_chat_reply_has_content_reasoning_tool_calls_and_usage() -> None:
    """Both names of the reasoning field; tools and extras go out, the run's session too."""
    call = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    answer = Answer(
        text=None, tool_calls=[call], reasoning="hm", reasoning_field="reasoning", finish_reason="tool_calls"
    )
    tool = {"type": "function", "function": {"name": "add", "parameters": {}}}
    async with ScriptedEngine(script=lambda ask: answer) as server:
        engine = open_chat_engine(section(server, kind="openai", model="scripted"))
        got = await ask_chat(engine, tools=[tool], top_k=5, session="r")
        await engine.close()
    assert got.message == {"role": "assistant", "content": None, "reasoning_content": "hm", "tool_calls": [call]}
    assert (got.finish_reason, got.prompt_tokens, got.completion_tokens) == ("tool_calls", 10, 4)
    ask = server.records[0].ask
    assert ask.body["tools"] == [tool]
    assert ask.body["top_k"] == 5
    assert ask.body["model"] == "scripted"
    assert ask.headers["x-session-id"] == "r"


async def test_chat_quirks_are_absorbed() -> None:
    """No usage, a list of parts, "stop" beside tool calls, a call without id, an unknown reason, an empty answer."""
    call = {"type": "function", "function": {"name": "f", "arguments": None}}
    parts = [{"type": "thinking", "thinking": "hm"}, {"type": "text", "text": "a"}, {"type": "text", "text": "b"}]

    def with_parts(body: dict[str, Any]) -> dict[str, Any]:
        body["choices"][0]["message"]["content"] = parts
        return body

    sequence = [
        Answer(usage=False, finish_reason="eos"),
        Answer(mangle=with_parts, finish_reason=None),
        Answer(text="", tool_calls=[call], finish_reason="stop"),
        Answer(text=""),
        Answer(text=None, finish_reason="length"),
        Answer(finish_reason="content_filter"),
    ]
    async with ScriptedEngine(script=replies(*sequence)) as server:
        engine = open_chat_engine(section(server, kind="openai", model="scripted"))
        got = [await ask_chat(engine) for _ in sequence]
        await engine.close()
    assert (got[0].prompt_tokens, got[0].finish_reason) == (0, "stop")
    assert got[1].message == {"role": "assistant", "content": "ab", "reasoning_content": "hm"}
    assert got[1].finish_reason == "none"
    assert got[2].finish_reason == "tool_calls"
    assert got[2].message["tool_calls"][0] == {
        "id": "call_0",
        "type": "function",
        "function": {"name": "f", "arguments": "{}"},
    }
    assert got[3].message["content"] == ""
    assert got[4].finish_reason == "length"
    assert got[5].finish_reason == "abort"


async def test_max_completion_tokens_is_used_where_max_tokens_is_refused() -> None:
    """Found out once, from the refusal."""

    def script(ask: Ask) -> Reply:
        if "max_tokens" in ask.body:
            return status(400, "Unsupported parameter: 'max_tokens'. Use 'max_completion_tokens' instead.")
        return Answer()

    async with ScriptedEngine(script=script) as server:
        engine = open_chat_engine(section(server, kind="openai", model="scripted"))
        await ask_chat(engine)
        await ask_chat(engine)
        await engine.close()
    assert [("max_tokens" in r.ask.body, "max_completion_tokens" in r.ask.body) for r in server.records] == [
        (True, False),
        (False, True),
        (False, True),
    ]


async def test_a_message_that_is_not_unicode_is_refused_before_it_is_sent() -> None:
    """Half a surrogate pair from an environment is a typed error, not a crash."""
    async with ScriptedEngine() as server:
        engine = open_chat_engine(section(server, kind="openai", model="scripted"))
        with pytest.raises(EngineRefused, match="surrogate"):
            await engine.chat([{"role": "user", "content": "\ud800"}], tools=[], max_tokens=1, sampling={}, session="")
        await engine.close()
    assert server.count == 0


# -- malformed answers (P12)


def _set(**fields: Any) -> Callable[[dict[str, Any]], dict[str, Any]]:
    return lambda body: body | fields


def _in_choice(**fields: Any) -> Callable[[dict[str, Any]], dict[str, Any]]:
    def change(body: dict[str, Any]) -> dict[str, Any]:
        if "choices" in body:
            body["choices"][0] |= fields
        return body

    return change


BAD_FOR_TOKENS = {
    "fewer logprobs": Answer(token_ids=[5, 6, 2], logprobs=[-0.1, -0.2]),
    "more logprobs": Answer(token_ids=[5, 2], logprobs=[-0.1, -0.2, -0.3]),
    "nan": Answer(token_ids=[5, 2], logprobs=[-0.1, math.nan]),
    "minus infinity": Answer(token_ids=[5, 2], logprobs=[-math.inf, -0.1]),
    "positive": Answer(token_ids=[5, 2], logprobs=[0.5, -0.1]),
    "sentinel": Answer(token_ids=[5, 2], logprobs=[-9999.0, -0.1]),
    "outside the vocabulary": Answer(token_ids=[5, 100], logprobs=[-0.1, -0.1]),
    "negative id": Answer(token_ids=[-1, 2], logprobs=[-0.1, -0.1]),
    "boolean id": Answer(token_ids=[True, 2], logprobs=[-0.1, -0.1]),
    "string id": Answer(token_ids=["5", 2], logprobs=[-0.1, -0.1]),  # type: ignore[list-item]
    "string logprob": Answer(token_ids=[5, 2], logprobs=["-0.1", -0.1]),  # type: ignore[list-item]
    "null logprob": Answer(token_ids=[5, 2], logprobs=[None, -0.1]),  # type: ignore[list-item]
    "no tokens": Answer(token_ids=[]),
    "not an object": Answer(mangle=lambda body: [1, 2]),
    "other model": Answer(model="other"),
}
BAD_FOR_VLLM = {
    "no ids": Answer(mangle=_in_choice(token_ids=None)),
    "no logprobs": Answer(mangle=_in_choice(logprobs=None)),
    "logprobs of other tokens": Answer(mangle=_in_choice(token_ids=[5, 6, 2, 7])),
    "no choices": Answer(mangle=_set(choices=[])),
    "a number too large for a float": Fault(
        body=render(Answer(logprobs=[-0.125] * 4), "/inference/v1/generate", "scripted").replace(b"-0.125", b"-1e999")
    ),
    "two choices": Answer(mangle=lambda body: body | {"choices": body["choices"] * 2}),
}
BAD_FOR_LLAMACPP = {
    "tokens dropped from the stream": Answer(token_ids=[5, 6, 2], predicted=4),
    "probabilities of other tokens": Answer(mangle=lambda e: e | {"tokens": [t + 1 for t in e["tokens"]]}),
    "no last event": Answer(mangle=lambda e: None if e["stop"] else e),
    "error in the stream": Answer(mangle=lambda e: {"error": {"code": 500, "message": "boom"}} if e["stop"] else e),
}
BAD_FOR_CHAT = {
    "no choices": Answer(mangle=_set(choices=[])),
    "choices null": Answer(mangle=_set(choices=None)),
    "no message": Answer(mangle=_in_choice(message=None)),
    "null content": Answer(text=None),
    "content a number": Answer(mangle=_in_choice(message={"content": 3})),
    "tool call without name": Answer(tool_calls=[{"id": "x", "function": {}}]),
    "tool arguments an object": Answer(tool_calls=[{"function": {"name": "f", "arguments": {}}}]),
    "error with status 200": Answer(mangle=lambda body: {"error": {"message": "boom"}}),
    "not an object": Answer(mangle=lambda body: [1]),
    "another served model": Answer(model="other"),
}
BAD_BYTES = {
    "html": Fault(body=b"<html>busy</html>"),
    "half": Fault(body=b'{"choices": ['),
    "empty": Fault(),
    "nan": Fault(body=b'{"choices": [NaN]}'),
    "not utf-8": Fault(body=b'{"a": "\xff"}'),
    "deep": Fault(body=b"[" * 100_000),
}
BAD = [
    *[(kind, name, reply) for kind in TOKEN_KINDS for name, reply in BAD_FOR_TOKENS.items()],
    *[("vllm", name, reply) for name, reply in BAD_FOR_VLLM.items()],
    *[("llamacpp", name, reply) for name, reply in BAD_FOR_LLAMACPP.items()],
    *[("openai", name, reply) for name, reply in BAD_FOR_CHAT.items()],
    *[(kind, f"bytes: {name}", reply) for kind in KINDS for name, reply in BAD_BYTES.items()],
]


@pytest.mark.parametrize(("kind", "reply"), [pytest.param(k, r, id=f"{k}: {n}") for k, n, r in BAD])
async def test_a_malformed_answer_is_a_typed_error(kind: str, reply: Reply, opened: Open) -> None:
    """P12: nothing malformed gets past the engine, and the same call with a good answer passes."""
    good = True
    async with ScriptedEngine(script=lambda ask: Answer() if good else reply, served=["scripted", "other"]) as server:
        if kind == "openai":
            chat = open_chat_engine(section(server, kind=kind, model="scripted"))
            await chat.check()
            call: Call = lambda: ask_chat(chat)  # noqa: E731
        else:
            call = opened(section(server, kind=kind, model="scripted"))
        await call()
        good = False
        with pytest.raises(EngineAnswerError):
            await call()
        if kind == "openai":
            await chat.close()


JUNK: list[Any] = [None, True, -1, 10**30, 0.5, "x", "", [], {}, [[]], [None], {"a": 1}, [1, "x"], {"error": {}}]


def _damaged(value: Any, rng: random.Random) -> Any:
    """A copy of a JSON value with one node, somewhere, replaced by junk or taken away."""
    if isinstance(value, (dict, list)) and value and rng.random() < 0.85:
        copy: Any = dict(value) if isinstance(value, dict) else list(value)
        key = rng.choice(list(copy) if isinstance(copy, dict) else range(len(copy)))
        if rng.random() < 0.1:
            del copy[key]
        else:
            copy[key] = _damaged(copy[key], rng)
        return copy
    return rng.choice(JUNK)


@pytest.mark.parametrize("kind", KINDS)
async def test_a_damaged_answer_is_a_good_one_or_a_typed_error(kind: str, opened: Open) -> None:
    """P12: 300 answers, each damaged in one random place, never cause any other exception; seeds are numbers of requests."""
    call_of = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}

    def script(ask: Ask) -> Reply:
        rng = random.Random(ask.number)
        event = 0 if kind != "llamacpp" else rng.randrange(3)
        seen = itertools.count()
        return Answer(
            token_ids=[5, 2],
            tool_calls=[call_of],
            reasoning="r",
            policy_version="1",
            mangle=lambda body: _damaged(body, rng) if next(seen) == event else body,
        )

    async with ScriptedEngine(script=script) as server:
        call = opened(section(server, kind=kind, model="scripted"))
        outcomes = await asyncio.gather(*(call() for _ in range(300)), return_exceptions=True)
    assert [o for o in outcomes if isinstance(o, BaseException) and not isinstance(o, EngineError)] == []
    assert any(isinstance(outcome, EngineAnswerError) for outcome in outcomes)


async def test_a_misaligned_llamacpp_answer_is_asked_for_again_with_another_seed() -> None:
    """A token that ends inside a character is streamed without id: never shifted, sampled anew."""
    bad, good = Answer(token_ids=[5, 6], predicted=3), Answer(token_ids=[7, 2])
    async with ScriptedEngine(script=replies(bad, bad, good)) as server:
        engine = open_token_engine(section(server, kind="llamacpp"), vocab_size=100)
        got = await ask_tokens(engine, seed=1)
        await engine.close()
    assert got.token_ids == [7, 2]
    assert len({record.ask.body["seed"] for record in server.records}) == 3


@pytest.mark.parametrize("kind", KINDS)
async def test_an_answer_above_the_size_limit_is_refused(
    kind: str, opened: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A hostile or broken server cannot exhaust memory."""
    monkeypatch.setattr("distaff_worker.engines.http.MAX_ANSWER_BYTES", 1 << 16)
    async with ScriptedEngine(script=lambda ask: Fault(body=b" " * (1 << 17))) as server:
        with pytest.raises(EngineAnswerError, match="larger"):
            await opened(section(server, kind=kind, model="scripted"))()
        await until(lambda: server.connections == 0)


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
    """No retry begins after retry_budget_s."""
    async with ScriptedEngine(script=lambda ask: status(503)) as server:
        begun = time.monotonic()
        with pytest.raises(EngineUnavailable):
            await opened(section(server, max_retries=1000, retry_budget_s=1.0))()
        assert time.monotonic() - begun < 2.0
    assert 2 <= server.count < 100


@pytest.mark.parametrize("kind", KINDS)
async def test_retry_after_is_honoured(kind: str, opened: Open) -> None:
    """P11: the second request comes no sooner than the server asked for."""
    async with ScriptedEngine(script=replies(status(429, Retry_After="0.7"), Answer())) as server:
        await opened(section(server, kind=kind, model="scripted"))()
    first, second = server.records
    assert second.started - first.ended >= 0.69


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


# -- the check


async def test_check_says_model_version_and_context() -> None:
    """The only served model is taken when none is configured."""
    async with ScriptedEngine(model="m", max_model_len=777) as server:
        engine = open_token_engine(section(server), vocab_size=100)
        info = await engine.check()
        await engine.close()
    assert (info.kind, info.model, info.version, info.max_context_tokens) == ("vllm", "m", "0.0-scripted", 777)


@pytest.mark.parametrize("kind", KINDS)
async def test_check_of_an_unknown_model_lists_the_served_ones(kind: str) -> None:
    """The mend is in the message."""
    async with ScriptedEngine(served=["alpha", "beta"]) as server:
        config = section(server, kind=kind, model="gamma")
        engine = open_chat_engine(config) if kind == "openai" else open_token_engine(config, vocab_size=100)
        with pytest.raises(EngineRefused, match=r"'gamma'; it serves: alpha, beta.*engine\.model"):
            await engine.check()
        await engine.close()


async def test_check_of_two_models_without_a_configured_one_asks_for_it() -> None:
    """Nothing is guessed."""
    async with ScriptedEngine(served=["alpha", "beta"]) as server:
        engine = open_token_engine(section(server), vocab_size=100)
        with pytest.raises(EngineRefused, match=r"2 models \(alpha, beta\); name one"):
            await engine.check()
        await engine.close()


async def test_check_waits_for_an_engine_that_is_still_loading() -> None:
    """503 while the model loads is not a failure before start_timeout_s."""
    async with ScriptedEngine(ready_after_s=0.5) as server:
        engine = open_token_engine(section(server, start_timeout_s=10), vocab_size=100)
        assert (await engine.check()).model == "scripted"
        await engine.close()


@pytest.mark.parametrize("kind", KINDS)
async def test_check_of_a_dead_engine_names_url_and_mend(kind: str) -> None:
    """After start_timeout_s, in one message."""
    config = section(f"http://127.0.0.1:{_free_port()}", kind=kind)
    engine = open_chat_engine(config) if kind == "openai" else open_token_engine(config, vocab_size=100)
    with pytest.raises(EngineUnavailable, match=r"127\.0\.0\.1.*no connection.*Start the server.*engine\.base_urls"):
        await engine.check()
    await engine.close()


async def test_check_passes_with_one_of_two_servers() -> None:
    """The other one is used when it comes."""
    async with ScriptedEngine() as server:
        engine = open_token_engine(section(f"http://127.0.0.1:{_free_port()}", server), vocab_size=100)
        assert (await engine.check()).model == "scripted"
        await engine.close()


@pytest.mark.parametrize("kind", KINDS)
async def test_a_wrong_key_names_the_variable_and_never_the_key(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """P28: the key is in no error text, even when the server repeats it."""
    monkeypatch.setenv("MY_ENGINE_KEY", "canary-1234")
    async with ScriptedEngine(api_key="right") as server:
        config = section(server, kind=kind, api_key_var="MY_ENGINE_KEY")
        engine = open_chat_engine(config) if kind == "openai" else open_token_engine(config, vocab_size=100)
        with pytest.raises(EngineRefused, match="MY_ENGINE_KEY") as error:
            await engine.check()
        await engine.close()
    assert "canary-1234" not in str(error.value)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("code", [400, 500])
async def test_no_error_text_repeats_the_key(
    kind: str, code: int, opened: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    """P28: a server may echo what it was sent; the right key reaches it."""
    monkeypatch.setenv("MY_ENGINE_KEY", "canary-1234")
    monkeypatch.setenv("OTHER_API_KEY", "canary-5678")
    echo = status(code, "you sent Authorization: Bearer canary-1234, api_key=canary-1234 canary-5678")
    async with ScriptedEngine(api_key="canary-1234", script=lambda ask: echo) as server:
        with pytest.raises(EngineError) as error:
            await opened(section(server, kind=kind, api_key_var="MY_ENGINE_KEY", max_retries=0, model="m"))()
    assert server.count == 1
    assert "canary" not in str(error.value)


async def test_a_password_in_the_url_is_in_no_error_text() -> None:
    """P28."""
    engine = open_token_engine(section(f"http://user:canary@127.0.0.1:{_free_port()}", max_retries=1), vocab_size=100)
    with pytest.raises(EngineUnavailable) as checked:
        await engine.check()
    with pytest.raises(EngineUnavailable) as asked:
        await ask_tokens(engine)
    await engine.close()
    assert "canary" not in str(checked.value) + str(asked.value)


def test_a_key_variable_that_is_not_set_is_a_configuration_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Found when the engine is opened, with the mend."""
    monkeypatch.delenv("MISSING_ENGINE_KEY", raising=False)
    with pytest.raises(ConfigurationError, match=r"MISSING_ENGINE_KEY, which is not set.*export MISSING_ENGINE_KEY="):
        open_chat_engine(section("http://127.0.0.1:9", kind="openai", api_key_var="MISSING_ENGINE_KEY"))


def test_rl_with_a_chat_api_is_a_configuration_error() -> None:
    """The message says what RL needs and which kinds have it."""
    with pytest.raises(ConfigurationError, match=r"token ids with their log-probabilities.*'vllm' or 'llamacpp'"):
        open_token_engine(section("http://127.0.0.1:9", kind="openai"), vocab_size=100)


def _without_probabilities(event: dict[str, Any]) -> dict[str, Any]:
    return event | {"tokens": [], "completion_probabilities": []}


@pytest.mark.parametrize(
    ("kind", "reply"),
    [
        ("vllm", Answer(mangle=_in_choice(logprobs=None))),
        ("vllm", Answer(mangle=_in_choice(token_ids=None))),
        ("vllm", status(404, "Not Found")),
        ("vllm", status(403, "PermissionDenied")),
        ("llamacpp", Answer(mangle=_without_probabilities)),
        ("llamacpp", Answer(logprobs=[])),
    ],
    ids=["no logprobs", "no ids", "no route", "route off", "llamacpp: neither", "llamacpp: no logprobs"],
)
async def test_check_finds_an_engine_without_ids_or_logprobs(kind: str, reply: Reply) -> None:
    """One token is sampled before the run; the error says what RL needs and how to get it."""
    async with ScriptedEngine(script=lambda ask: reply) as server:
        engine = open_token_engine(section(server, kind=kind), vocab_size=100)
        with pytest.raises((EngineRefused, EngineAnswerError), match=f"An RL run needs token ids.*'{kind}'"):
            await engine.check()
        await engine.close()


async def test_check_finds_a_tokenizer_of_another_model() -> None:
    """llama.cpp says how many outputs its model has."""
    async with ScriptedEngine() as server:
        server.documents["/v1/models"] = {"data": [{"id": "scripted", "meta": {"n_vocab": 90, "n_ctx": 64}}]}
        engine = open_token_engine(section(server, kind="llamacpp"), vocab_size=91)
        with pytest.raises(EngineRefused, match=r"91 ids.*has 90.*tokenizer\.name"):
            await engine.check()
        await engine.close()


@pytest.mark.parametrize("kind", TOKEN_KINDS)
async def test_check_finds_a_tokenizer_that_gives_other_ids(kind: str) -> None:
    """The server's /tokenize decides, where it has one."""
    async with ScriptedEngine() as server:
        engine = open_token_engine(section(server, kind=kind), vocab_size=100, encode=lambda text: [1, 2, 3])
        await engine.check()
        server.documents["/tokenize"] = {"tokens": [1, 2, 3]}
        await engine.check()
        server.documents["/tokenize"] = {"tokens": [1, 2, 4]}
        with pytest.raises(EngineRefused, match=r"does not fit.*tokenizer\.name"):
            await engine.check()
        await engine.close()


# -- load


@pytest.mark.parametrize("kind", KINDS)
async def test_five_hundred_calls_are_in_flight_at_once(kind: str, opened: Open) -> None:
    """No hidden limit on connections: the server answers only when all have arrived."""
    async with ScriptedEngine(barrier=500) as server:
        call = opened(section(server, kind=kind, model="scripted"))
        await asyncio.gather(*(call() for _ in range(500)))
    assert server.max_in_flight == 500


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


def test_recorded_raw_answers_are_what_was_sent() -> None:
    """The scripted engine on a thread of its own keeps the bytes of each answer."""

    async def play(url: str) -> Generation:
        engine = open_token_engine(section(url), vocab_size=100)
        try:
            return await ask_tokens(engine)
        finally:
            await engine.close()

    with ScriptedEngine() as server:
        got = asyncio.run(play(server.url))
    assert json.loads(server.records[0].raw)["choices"][0]["token_ids"] == got.token_ids


async def test_a_turnstile_lets_few_pass_in_one_turn_of_the_loop_and_all_in_order() -> None:
    """A burst costs many short turns; one that is cancelled while it waits holds nobody up."""
    loop = asyncio.get_running_loop()
    turnstile = Turnstile(3)
    turns: list[int] = []
    order: list[int] = []
    now = 0

    def count() -> None:
        nonlocal now
        now += 1
        if len(order) < 19:
            loop.call_soon(count)

    async def pass_through(n: int) -> None:
        await turnstile.turn()
        turns.append(now)
        order.append(n)

    tasks = [asyncio.ensure_future(pass_through(n)) for n in range(20)]
    loop.call_soon(count)
    await asyncio.sleep(0)
    tasks[10].cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert order == [n for n in range(20) if n != 10]
    assert max(turns.count(turn) for turn in set(turns)) <= 3
    await asyncio.wait_for(turnstile.turn(), 1)
