"""What an engine sends and what comes back, against a scripted server."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from distaff.errors import (
    ConfigurationError,
    ContextOverflow,
    EngineRefused,
)
from distaff_worker.engines import open_chat_engine, open_token_engine
from distaff_worker.engines.protocol import Generation
from distaff_worker.turns import Turnstile
from tests.engines_support import (
    KINDS,
    TOKEN_KINDS,
    Open,
    ask_chat,
    ask_tokens,
    replies,
    section,
    until,
)
from tests.engines_support import opened as opened
from tests.engines_support import short_backoff as short_backoff
from tests.scripted_answers import render_stream
from tests.scripted_engine import Answer, Ask, Fault, Reply, ScriptedEngine, status

pytestmark = pytest.mark.usefixtures("short_backoff")

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
    assert ask.sampling["sampling_seed" if kind == "sglang" else "seed"] == 11
    assert ask.sampling["top_k"] == (-1 if kind == "sglang" else 0)
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
        name = {"vllm": "max_tokens", "sglang": "max_new_tokens", "llamacpp": "n_predict"}[kind]
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
        "id": "call00000",
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


# -- load


@pytest.mark.parametrize("kind", KINDS)
async def test_five_hundred_calls_are_in_flight_at_once(kind: str, opened: Open) -> None:
    """No hidden limit on connections: the server answers only when all have arrived."""
    async with ScriptedEngine(barrier=500) as server:
        call = opened(section(server, kind=kind, model="scripted"))
        await asyncio.gather(*(call() for _ in range(500)))
    assert server.max_in_flight == 500


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
