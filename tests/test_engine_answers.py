"""A malformed answer never gets past an engine (P12), against a scripted server."""

from __future__ import annotations

import asyncio
import itertools
import math
import random
from collections.abc import Callable
from typing import Any

import pytest

from distaff.errors import (
    EngineAnswerError,
    EngineError,
)
from distaff_worker.engines import open_chat_engine, open_token_engine
from tests.engines_support import (
    KINDS,
    TOKEN_KINDS,
    Call,
    Open,
    ask_chat,
    ask_tokens,
    in_choice,
    replies,
    section,
    until,
)
from tests.engines_support import opened as opened
from tests.engines_support import short_backoff as short_backoff
from tests.scripted_answers import render
from tests.scripted_engine import Answer, Ask, Fault, Reply, ScriptedEngine

pytestmark = pytest.mark.usefixtures("short_backoff")


def _set(**fields: Any) -> Callable[[dict[str, Any]], dict[str, Any]]:
    return lambda body: body | fields


def _in_meta(**fields: Any) -> Callable[[dict[str, Any]], dict[str, Any]]:
    return lambda body: body | {"meta_info": body["meta_info"] | fields}


def _bare_event(event: dict[str, Any]) -> dict[str, Any]:
    return event | {"completion_probabilities": [{"id": 6}]} if event["tokens"] == [6] else event


def _bare_entry(body: dict[str, Any]) -> dict[str, Any]:
    del body["choices"][0]["logprobs"]["content"][1]["logprob"]
    return body


BAD_FOR_TOKENS = {
    "fewer logprobs": Answer(token_ids=[5, 6, 2], logprobs=[-0.1, -0.2]),
    "more logprobs": Answer(token_ids=[5, 2], logprobs=[-0.1, -0.2, -0.3]),
    "nan": Answer(token_ids=[5, 2], logprobs=[-0.1, math.nan]),
    "minus infinity": Answer(token_ids=[5, 2], logprobs=[-math.inf, -0.1]),
    "positive": Answer(token_ids=[5, 2], logprobs=[0.5, -0.1]),
    "no finite logprob": Answer(token_ids=[5, 2], logprobs=[-9999.0, None]),  # type: ignore[list-item]
    "outside the vocabulary": Answer(token_ids=[5, 100], logprobs=[-0.1, -0.1]),
    "negative id": Answer(token_ids=[-1, 2], logprobs=[-0.1, -0.1]),
    "boolean id": Answer(token_ids=[True, 2], logprobs=[-0.1, -0.1]),
    "string id": Answer(token_ids=["5", 2], logprobs=[-0.1, -0.1]),  # type: ignore[list-item]
    "string logprob": Answer(token_ids=[5, 2], logprobs=["-0.1", -0.1]),  # type: ignore[list-item]
    "boolean logprob": Answer(token_ids=[5, 2], logprobs=[False, -0.1]),
    "no tokens": Answer(token_ids=[]),
    "not an object": Answer(mangle=lambda body: [1, 2]),
}
BAD_FOR_VLLM = {
    "an entry without logprob": Answer(mangle=_bare_entry),
    "other model": Answer(model="other"),
    "no ids": Answer(mangle=in_choice(token_ids=None)),
    "no logprobs": Answer(mangle=in_choice(logprobs=None)),
    "logprobs of other tokens": Answer(mangle=in_choice(token_ids=[5, 6, 2, 7])),
    "no choices": Answer(mangle=_set(choices=[])),
    "a number too large for a float": Fault(
        body=render(Answer(logprobs=[-0.125] * 4), "/inference/v1/generate", "scripted").replace(
            b"-0.125", b"-1e999", 1
        )
    ),
    "two choices": Answer(mangle=lambda body: body | {"choices": body["choices"] * 2}),
}
BAD_FOR_SGLANG = {
    "no meta_info": Answer(mangle=_set(meta_info=None)),
    "no entries": Answer(mangle=_in_meta(output_token_logprobs=None)),
    "entries without ids": Answer(mangle=_in_meta(output_token_logprobs=[[-0.1], [-0.2]])),
    "entries that are objects": Answer(mangle=_in_meta(output_token_logprobs=[{"logprob": -0.1, "id": 5}])),
    "other output ids": Answer(mangle=_set(output_ids=[5, 6, 7, 3])),
    "a prompt that was cut": Answer(mangle=_in_meta(prompt_tokens=2)),
    "error with status 200": Answer(mangle=lambda body: {"error": {"message": "boom"}}),
}
BAD_FOR_LLAMACPP = {
    "other model": Answer(model="other"),
    "an entry without logprob": Answer(mangle=_bare_event),
    "tokens dropped from the stream": Answer(token_ids=[5, 6, 2], predicted=4),
    "probabilities of other tokens": Answer(mangle=lambda e: e | {"tokens": [t + 1 for t in e["tokens"]]}),
    "no last event": Answer(mangle=lambda e: None if e["stop"] else e),
    "error in the stream": Answer(mangle=lambda e: {"error": {"code": 500, "message": "boom"}} if e["stop"] else e),
}
BAD_FOR_CHAT = {
    "no choices": Answer(mangle=_set(choices=[])),
    "choices null": Answer(mangle=_set(choices=None)),
    "no message": Answer(mangle=in_choice(message=None)),
    "null content": Answer(text=None),
    "content a number": Answer(mangle=in_choice(message={"content": 3})),
    "tool call without function": Answer(tool_calls=[{"id": "x"}]),
    "tool call that is no object": Answer(tool_calls=[{"id": "x", "function": "f"}]),
    "tool name a number": Answer(tool_calls=[{"function": {"name": 3, "arguments": "{}"}}]),
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
    *[("sglang", name, reply) for name, reply in BAD_FOR_SGLANG.items()],
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
