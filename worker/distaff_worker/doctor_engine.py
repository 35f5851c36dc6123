"""What `distaff doctor` asks of the engine, with the very clients a worker uses.

Invariant: samples a few tokens and changes nothing. What an RL run needs besides is looked at in `doctor_tokens`.
"""

from __future__ import annotations

import asyncio
from concurrent.futures import Executor
from dataclasses import dataclass

from distaff.clients import redact_url
from distaff.config import RunConfig
from distaff.errors import EngineAnswerError, EngineRefused, EngineUnavailable
from distaff.types import JSON
from distaff_worker.doctor_checks import Examiner, Found, there
from distaff_worker.doctor_tokens import ASK_S, QUESTION, TokenChecks
from distaff_worker.engines import open_chat_engine, open_token_engine
from distaff_worker.engines.discovery import Discovery, discover
from distaff_worker.engines.failures import refused_status
from distaff_worker.engines.http import HttpPool
from distaff_worker.engines.openai import OpenAIEngine
from distaff_worker.engines.protocol import ChatEngine, EngineInfo, TokenEngine
from distaff_worker.rendering.protocol import Renderer

ANSWER_TOKENS = 16


@dataclass(slots=True, kw_only=True)
class Opened:
    """The engine of the run, as far as its settings let it be opened."""

    pool: HttpPool | None = None
    """A second set of connections, for questions of our own."""
    tokens: TokenEngine | None = None
    """RL."""
    chat: ChatEngine | None = None
    """SFT and evaluation."""

    @property
    def engine(self) -> TokenEngine | ChatEngine | None:
        return self.tokens or self.chat

    async def close(self) -> None:
        for part in (self.pool, self.engine):
            if part is not None:
                await part.close()


async def open_engine(examiner: Examiner, config: RunConfig, renderer: Renderer | None) -> Opened:
    """The engine's clients, by the settings alone."""
    opened, mode = Opened(), config.run.mode

    async def pool() -> Found[None]:
        opened.pool = HttpPool(config.engine)
        urls = ", ".join(redact_url(url) for url in opened.pool.urls)
        key = f", key from {config.engine.api_key_var}" if config.engine.api_key_var else ""
        return Found(value=None, fact=f"{config.engine.kind} at {urls}{key}")

    async def client() -> Found[None]:
        if mode == "rl":
            vocab_size, encode = (renderer.vocab_size, renderer.encode) if renderer else (None, None)
            opened.tokens = open_token_engine(config.engine, vocab_size=vocab_size, encode=encode)
        else:
            opened.chat = open_chat_engine(config.engine)
        return Found(value=None, fact=f"kind {config.engine.kind} can play mode {mode}")

    await examiner.check("engine.settings", pool)
    await examiner.check("engine.mode", client, needs=("engine.settings",))
    return opened


async def examine_engine(
    examiner: Examiner,
    config: RunConfig,
    opened: Opened,
    renderer: Renderer | None,
    tokenizing: Executor,
    *,
    max_tokens: int,
) -> EngineInfo | None:
    """Every finding about the engine; what it says of itself when a run can use it. max_tokens: of one turn of the real run."""
    asking = _Asking(config, opened, max_tokens=max_tokens)
    limit_s, check = config.engine.request_timeout_s, examiner.check
    mend = "start the server, or correct engine.base_urls"
    await check("engine.reachable", asking.reachable, needs=("engine.settings",), mend=mend)
    await check("engine.model", asking.model, needs=("engine.reachable",))
    usable = ("engine.mode", "engine.model")
    if config.run.mode != "rl":
        info = await check("engine.ready", asking.ready, needs=usable)
        await check("engine.chat", asking.chat_reply, needs=("engine.ready",), limit_s=limit_s)
        return info
    tokens = TokenChecks(config, opened.pool, opened.tokens, asking.served, renderer, tokenizing)
    await check("engine.tokenizer", tokens.tokenizer, needs=("engine.model", "tokenizer.loads"))
    await check("engine.template", tokens.template, needs=("engine.model", "tokenizer.loads"))
    needs = (*usable, "tokenizer.loads", *(["engine.tokenizer"] if examiner.failed("engine.tokenizer") else []))
    info = await check("engine.ready", asking.ready, needs=needs, limit_s=2 * limit_s)
    await check("engine.tokens", tokens.tokens, needs=("engine.ready",), limit_s=limit_s)
    await check("engine.stop", tokens.stop, needs=("engine.tokens",))
    await check("engine.bridge", tokens.bridge, needs=("engine.tokens",), limit_s=2 * limit_s)
    return info


class _Asking:
    """The checks themselves; each returns what it found or raises."""

    def __init__(self, config: RunConfig, opened: Opened, *, max_tokens: int) -> None:
        self._config, self._opened, self._max_tokens = config, opened, max_tokens
        self.served: Discovery | None = None

    async def reachable(self) -> Found[None]:
        pool = there(self._opened.pool)
        answers = await asyncio.gather(*(self._listing(url) for url in pool.urls))
        away = [answer for answer in answers if answer]
        if len(away) == len(answers):
            raise away[0]
        if away:
            fact = f"{len(answers) - len(away)} of {len(answers)} servers answer: {'; '.join(map(str, away))}"
            return Found(value=None, fact=fact, status="warning", mend="start it, or take it out of engine.base_urls")
        return Found(value=None, fact="it answers" if len(answers) == 1 else f"all {len(answers)} servers answer")

    async def _listing(self, url: str) -> EngineUnavailable | None:
        try:
            await there(self._opened.pool).get(url, "/v1/models", timeout_s=ASK_S)
        except EngineUnavailable as error:
            return error
        except EngineRefused as error:
            if refused_status(error) != 404:
                raise
        except EngineAnswerError:
            raise EngineRefused(
                f"{redact_url(url)} does not answer like an inference engine. Correct engine.base_urls"
            ) from None
        return None

    async def model(self) -> Found[None]:
        must_list = self._config.run.mode == "rl" or self._config.engine.kind != "openai"
        found = self.served = await discover(there(self._opened.pool), must_list=must_list)
        if not found.served:
            fact = f"{found.model!r}, which nobody can confirm: the server lists no models"
            return Found(value=None, fact=fact, status="warning", mend="the check engine.chat asks it")
        return Found(value=None, fact=f"serves {found.model!r}")

    async def chat_reply(self) -> Found[None]:
        engine, sampling = there(self._opened.chat), self._config.sampling
        asked: dict[str, JSON] = {**sampling.extra, "temperature": sampling.temperature, "top_p": sampling.top_p}
        reply = await engine.chat(QUESTION, tools=[], max_tokens=ANSWER_TOKENS, sampling=asked, session="doctor")
        fact = (
            f"it answers: {reply.prompt_tokens} + {reply.completion_tokens} tokens, finish reason {reply.finish_reason}"
        )
        changed = engine.quirks.changes if isinstance(engine, OpenAIEngine) else []
        if changed:
            mend = "docs/hosted-apis.md says what that changes"
            return Found(value=None, fact=f"{fact}; {'; '.join(changed)}", status="warning", mend=mend)
        if not reply.completion_tokens:
            mend = "nothing is wrong with the answers; token counts of the run will be too low"
            return Found(value=None, fact="it answers, without usage", status="warning", mend=mend)
        return Found(value=None, fact=fact)

    async def ready(self) -> Found[EngineInfo]:
        """What a worker asks before the first rollout, all at once."""
        info = await there(self._opened.engine).check()
        context = info.max_context_tokens
        facts = [f"{info.kind} {info.version}".strip(), f"context {context} tokens" if context else "context unknown"]
        if info.route:
            facts.append(f"ids with log-probabilities (of the {info.logprobs}) on {info.route}")
        fact = ", ".join(facts).replace(" (of the unknown)", "")
        if context and self._max_tokens >= context:
            mend = f"lower sampling.max_tokens ({self._max_tokens}), or serve a longer context"
            return Found(value=info, fact=fact + ", which one answer may fill", status="warning", mend=mend)
        return Found(value=info, fact=fact)
