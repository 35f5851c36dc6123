"""vLLM with and without its token route: which one is used, what is sent on the OpenAI one, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
import structlog.testing

from distaff.errors import ContextOverflow, EngineAnswerError, EngineRefused
from distaff_worker.engines import open_token_engine
from distaff_worker.engines.protocol import EngineInfo, TokenEngine
from tests.engines_support import ask_tokens, in_choice, section
from tests.engines_support import short_backoff as short_backoff
from tests.scripted_answers import render
from tests.scripted_engine import Answer, Fault, Reply, ScriptedEngine, status

pytestmark = pytest.mark.usefixtures("short_backoff")

GENERATE = "/inference/v1/generate"
COMPLETIONS = "/v1/completions"


async def checked(*servers: ScriptedEngine) -> tuple[TokenEngine, EngineInfo]:
    engine = open_token_engine(section(*servers), vocab_size=100)
    return engine, await engine.check()


@pytest.mark.parametrize("code", [403, 404])
async def test_the_completions_route_is_used_where_generate_is_not(code: int) -> None:
    """Switched off (403) or not there (404); ids and log-probabilities are the answer's; the log says which route."""
    answer = Answer(token_ids=[9, 8, 2], logprobs=[-0.5, -1.25, -3.0], finish_reason="length")
    async with ScriptedEngine(
        script=lambda ask: answer if ask.body["max_tokens"] > 1 else Answer(token_ids=[9])
    ) as server:
        server.refused[GENERATE] = code
        with structlog.testing.capture_logs() as logs:
            engine, info = await checked(server)
        got = await ask_tokens(engine, temperature=0.7, seed=11, stop_token_ids=[2], session="rollout-1")
        await engine.close()
    assert (got.token_ids, got.logprobs, got.finish_reason) == ([9, 8, 2], [-0.5, -1.25, -3.0], "length")
    assert info.route == COMPLETIONS
    assert [event["route"] for event in logs if event["event"] == "engine.checked"] == [COMPLETIONS]
    ask = server.records[-1].ask
    assert ask.path == COMPLETIONS
    assert ask.headers["x-session-id"] == "rollout-1"
    assert ask.body == {
        "model": "scripted",
        "prompt": [1, 2, 3],
        "temperature": 0.7,
        "top_p": 1.0,
        "top_k": 0,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "seed": 11,
        "stop_token_ids": [2],
        "max_tokens": 8,
        "logprobs": 0,
        "return_token_ids": True,
        "return_tokens_as_token_ids": True,
        "n": 1,
        "stream": False,
        "echo": False,
        "add_special_tokens": False,
    }


async def test_the_token_route_is_preferred() -> None:
    """A server that has both is asked on /inference/v1/generate only."""
    async with ScriptedEngine() as server:
        engine, info = await checked(server)
        await ask_tokens(engine)
        await engine.close()
    assert info.route == GENERATE
    assert {record.ask.path for record in server.records} == {GENERATE}


async def test_the_route_is_one_that_all_servers_have() -> None:
    """A rollout may go on at another server: with one that has only the OpenAI routes, all are asked there."""
    async with ScriptedEngine() as new, ScriptedEngine(refused={GENERATE: 404}) as old:
        engine, info = await checked(new, old)
        for n in range(20):
            await ask_tokens(engine, session=f"s{n}")
        await engine.close()
    assert info.route == COMPLETIONS
    for server in (new, old):
        assert COMPLETIONS in {record.ask.path for record in server.records[2:]}


def _renamed(token: str) -> Callable[[dict[str, Any]], dict[str, Any]]:
    def change(body: dict[str, Any]) -> dict[str, Any]:
        body["choices"][0]["logprobs"]["tokens"][1] = token
        return body

    return change


BAD: dict[str, Reply] = {
    "fewer logprobs": Answer(token_ids=[5, 6, 2], logprobs=[-0.1, -0.2]),
    "more logprobs": Answer(token_ids=[5, 2], logprobs=[-0.1, -0.2, -0.3]),
    "positive": Answer(token_ids=[5, 2], logprobs=[0.5, -0.1]),
    "outside the vocabulary": Answer(token_ids=[5, 100]),
    "no tokens": Answer(token_ids=[]),
    "no ids": Answer(mangle=in_choice(token_ids=None)),
    "no logprobs": Answer(mangle=in_choice(logprobs=None)),
    "logprobs a list": Answer(mangle=in_choice(logprobs=[-0.1] * 4)),
    "logprobs of other tokens": Answer(mangle=_renamed("token_id:3")),
    "another prompt": Answer(mangle=in_choice(prompt_token_ids=[1, 2])),
    "other model": Answer(model="other"),
    "two choices": Answer(mangle=lambda body: body | {"choices": body["choices"] * 2}),
    "NaN": Answer(token_ids=[5, 2], logprobs=[float("nan"), -0.1]),
    "half": Fault(body=render(Answer(), COMPLETIONS, "scripted")[:100]),
}


@pytest.mark.parametrize("reply", BAD.values(), ids=BAD.keys())
async def test_a_malformed_completion_is_a_typed_error(reply: Reply) -> None:
    """P12: on the OpenAI route as well, and the same call with a good answer passes."""
    good = True
    async with ScriptedEngine(script=lambda ask: Answer() if good else reply, refused={GENERATE: 404}) as server:
        engine, _ = await checked(server)
        await ask_tokens(engine)
        good = False
        with pytest.raises(EngineAnswerError):
            await ask_tokens(engine)
        await engine.close()


async def test_tokens_named_by_their_text_are_no_contradiction() -> None:
    """A server without return_tokens_as_token_ids names texts; the ids stand beside them."""
    async with ScriptedEngine(script=lambda ask: Answer(mangle=_renamed(" the")), refused={GENERATE: 404}) as server:
        engine, _ = await checked(server)
        assert (await ask_tokens(engine)).token_ids == [5, 6, 7, 2]
        await engine.close()


async def test_max_tokens_is_cut_on_the_completions_route_too() -> None:
    """prompt + max_tokens never exceeds the context; what the server still refuses is an overflow."""
    overflow = status(400, "This model's maximum context length is 5 tokens.")
    async with ScriptedEngine(max_model_len=5, refused={GENERATE: 404}) as server:
        engine, _ = await checked(server)
        await ask_tokens(engine, max_tokens=100)
        assert server.records[-1].ask.body["max_tokens"] == 2
        server.script = lambda ask: overflow
        with pytest.raises(ContextOverflow):
            await ask_tokens(engine)
        await engine.close()


def _older(body: dict[str, Any]) -> dict[str, Any]:
    """What a server sends that has never heard of return_token_ids."""
    choice = body["choices"][0]
    for name in ("token_ids", "prompt_token_ids"):
        choice.pop(name)
    return body


async def test_a_server_too_old_is_refused_with_its_version_and_mend() -> None:
    """It answers, but without ids: nothing is re-encoded."""
    async with ScriptedEngine(script=lambda ask: Answer(mangle=_older), refused={GENERATE: 404}) as server:
        server.documents["/version"] = {"version": "0.9.1"}
        engine = open_token_engine(section(server), vocab_size=100)
        with pytest.raises(EngineAnswerError, match=r"version 0\.9\.1 is too old.*0\.32.*--enable-scale-out.*0\.10\.2"):
            await engine.check()
        await engine.close()


async def test_a_server_with_neither_route_is_refused_with_the_mend() -> None:
    """The refusal of the last route is the reason, with what to start."""
    async with ScriptedEngine(refused={GENERATE: 404, COMPLETIONS: 404}) as server:
        engine = open_token_engine(section(server), vocab_size=100)
        with pytest.raises(EngineRefused, match=r"/v1/completions.*An RL run needs token ids.*--enable-scale-out"):
            await engine.check()
        await engine.close()


async def test_a_server_that_is_started_anew_with_the_token_route_is_asked_there_after_a_check() -> None:
    """The worker checks an engine again when it has answered nothing; the route follows."""
    async with ScriptedEngine(refused={GENERATE: 403}) as server:
        engine, _ = await checked(server)
        server.refused.clear()
        assert (await engine.check()).route == GENERATE
        await ask_tokens(engine)
        await engine.close()
    assert server.records[-1].ask.path == GENERATE
    assert json.loads(server.records[-1].raw)["choices"][0]["token_ids"] == [5, 6, 7, 2]
