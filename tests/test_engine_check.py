"""What an engine's check finds before the first rollout, each with its mend; and that no secret is in a message."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from distaff.errors import (
    ConfigurationError,
    EngineAnswerError,
    EngineError,
    EngineRefused,
    EngineUnavailable,
)
from distaff_worker.engines import open_chat_engine, open_token_engine
from tests.engines_support import (
    KINDS,
    TOKEN_KINDS,
    Open,
    ask_tokens,
    free_port,
    in_choice,
    section,
)
from tests.engines_support import opened as opened
from tests.engines_support import short_backoff as short_backoff
from tests.scripted_engine import Answer, Reply, ScriptedEngine, status

pytestmark = pytest.mark.usefixtures("short_backoff")


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
    config = section(f"http://127.0.0.1:{free_port()}", kind=kind)
    engine = open_chat_engine(config) if kind == "openai" else open_token_engine(config, vocab_size=100)
    with pytest.raises(EngineUnavailable, match=r"127\.0\.0\.1.*no connection.*Start the server.*engine\.base_urls"):
        await engine.check()
    await engine.close()


async def test_check_passes_with_one_of_two_servers() -> None:
    """The other one is used when it comes."""
    async with ScriptedEngine() as server:
        engine = open_token_engine(section(f"http://127.0.0.1:{free_port()}", server), vocab_size=100)
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
    engine = open_token_engine(section(f"http://user:canary@127.0.0.1:{free_port()}", max_retries=1), vocab_size=100)
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
    with pytest.raises(
        ConfigurationError, match=r"token ids with their log-probabilities.*'vllm', 'sglang' or 'llamacpp'"
    ):
        open_token_engine(section("http://127.0.0.1:9", kind="openai"), vocab_size=100)


def _without_probabilities(event: dict[str, Any]) -> dict[str, Any]:
    return event | {"tokens": [], "completion_probabilities": []}


def _without_output_logprobs(body: dict[str, Any]) -> dict[str, Any]:
    body["meta_info"].pop("output_token_logprobs")
    return body


@pytest.mark.parametrize(
    ("kind", "reply"),
    [
        ("vllm", Answer(mangle=in_choice(logprobs=None))),
        ("vllm", Answer(mangle=in_choice(token_ids=None))),
        ("vllm", status(404, "Not Found")),
        ("vllm", status(403, "PermissionDenied")),
        ("sglang", Answer(mangle=_without_output_logprobs)),
        ("sglang", Answer(logprobs=[])),
        ("sglang", status(404, "Not Found")),
        ("llamacpp", Answer(mangle=_without_probabilities)),
        ("llamacpp", Answer(logprobs=[])),
    ],
    ids=[
        "no logprobs",
        "no ids",
        "no route",
        "route off",
        "sglang: neither",
        "sglang: no logprobs",
        "sglang: no route",
        "llamacpp: neither",
        "llamacpp: no logprobs",
    ],
)
async def test_check_finds_an_engine_without_ids_or_logprobs(kind: str, reply: Reply) -> None:
    """One token is sampled before the run; the error says what RL needs and how to get it."""
    async with ScriptedEngine(script=lambda ask: reply) as server:
        engine = open_token_engine(section(server, kind=kind), vocab_size=100)
        with pytest.raises((EngineRefused, EngineAnswerError), match=f"An RL run needs token ids.*'{kind}'"):
            await engine.check()
        await engine.close()


@pytest.mark.parametrize("answer", ["404 Not Found", "200 OK"])
async def test_check_finds_a_server_that_is_no_engine(answer: str) -> None:
    """A web page, found or not, is answered with the setting to correct."""

    async def page(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(f"HTTP/1.1 {answer}\r\nContent-Length: 13\r\n\r\n<html></html>".encode())
        await writer.drain()
        writer.close()

    async with await asyncio.start_server(page, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        engine = open_token_engine(section(f"http://127.0.0.1:{port}"), vocab_size=100)
        with pytest.raises(EngineRefused, match=r"Correct engine\.base_urls"):
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
