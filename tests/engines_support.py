"""What the engine tests share: quick settings, one call of an engine of any kind, fixtures."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest

from distaff.config import EngineSection
from distaff_worker.engines import open_chat_engine, open_token_engine
from distaff_worker.engines.protocol import ChatEngine, ChatReply, Generation, TokenEngine
from tests.scripted_engine import Reply, Script, ScriptedEngine

KINDS = ("vllm", "sglang", "llamacpp", "openai")
TOKEN_KINDS = ("vllm", "sglang", "llamacpp")
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


async def until(condition: Callable[[], bool], *, seconds: float = 3.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            raise TimeoutError("the condition did not come true")
        await asyncio.sleep(0.01)


def replies(*sequence: Reply) -> Script:
    """The nth request gets the nth reply, further ones the last."""
    return lambda ask: sequence[min(ask.number, len(sequence) - 1)]


def in_choice(**fields: Any) -> Callable[[dict[str, Any]], dict[str, Any]]:
    def change(body: dict[str, Any]) -> dict[str, Any]:
        if "choices" in body:
            body["choices"][0] |= fields
        return body

    return change


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


@pytest.fixture
def short_backoff(monkeypatch: pytest.MonkeyPatch) -> None:
    """Retries come quickly."""
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
