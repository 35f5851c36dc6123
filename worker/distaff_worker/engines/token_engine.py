"""The one token engine: check, probe, sample. What differs between servers is a `Wire` and a few facts in a subclass.

Invariant: a Generation has passed `answers.generation`; the route that is asked is one that every server which answered the check
has. Never parses a server's format: that is the Wire's business.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import aiohttp
import pydantic_core
import structlog

from distaff.errors import ContextOverflow, EngineAnswerError, EngineError, EngineRefused, EngineUnavailable
from distaff.types import JSON
from distaff_worker.engines.discovery import (
    ASK_TIMEOUT_S,
    PROBE_TEXT,
    Discovery,
    Encode,
    check_tokenizer,
    check_vocabulary,
    discover,
    without_tokens,
)
from distaff_worker.engines.failures import refused_status
from distaff_worker.engines.http import HttpPool, describe
from distaff_worker.engines.protocol import EngineInfo, Generation, LogprobsMode
from distaff_worker.engines.wires import Ask, Reading, Wire

log = structlog.get_logger(__name__)

NO_SUCH_ROUTE = (403, 404, 405, 501)
COLD = 0.05
"""A temperature at which the likeliest token is all but certain."""
MEASURE_ATTEMPTS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """What one server says of itself beyond /v1/models."""

    version: str = ""
    max_context_tokens: int | None = None


Sample = Callable[[Ask], Awaitable[Generation]]


class HttpTokenEngine(ABC):
    """A TokenEngine; see `protocol.TokenEngine` for the contract. A subclass says what it is, and which wires it has."""

    kind: ClassVar[str]
    wires: ClassVar[tuple[Wire, ...]]
    """In order of preference; the check takes the first that every server has."""
    neutral: ClassVar[Mapping[str, JSON]]
    """Sampling from the model itself, whatever the server or the model's generation_config.json has for defaults."""

    def __init__(self, pool: HttpPool, *, vocab_size: int | None, encode: Encode | None = None) -> None:
        """encode: the run's tokenizer, no special tokens added."""
        self.pool = pool
        self._vocab_size = vocab_size
        self._encode = encode
        self._model = pool.section.model
        self._wire = self.wires[0]
        self._max_context_tokens: int | None = None
        self._logprobs: LogprobsMode = "unknown"

    @abstractmethod
    def tokenize_request(self, model: str) -> dict[str, JSON]:
        """The body for /tokenize of PROBE_TEXT without special tokens."""

    @abstractmethod
    async def facts(self, url: str) -> Facts:
        """Ask one server; EngineRefused when it is of no use for an RL run."""

    @abstractmethod
    def mend(self, version: str) -> str:
        """How to get a server that returns ids and log-probabilities. version: of the one that does not, or ""."""

    async def sample(self, ask: Ask, send: Sample) -> Generation:
        """What `send` gives; overridden where an answer may have to be asked for again."""
        return await send(ask)

    async def check(self) -> EngineInfo:
        """See `protocol.Engine`; also samples one token from each server. EngineAnswerError when it comes without logprob."""
        found = await discover(self.pool, must_list=True)
        check_vocabulary(found, self._vocab_size)
        text = self.tokenize_request(found.model)
        await asyncio.gather(*(check_tokenizer(self.pool, url, text, self._encode) for url in found.urls))
        facts = await asyncio.gather(*(self.facts(url) for url in found.urls))
        self._model, self._max_context_tokens = found.model, _smallest_context(found, facts)
        self._wire, probe = await self._settle(found.urls, facts)
        if self._logprobs == "unknown":
            self._logprobs = await self._measure(found.urls[0])
        info = EngineInfo(
            kind=self.kind,
            model=found.model,
            version=facts[0].version,
            max_context_tokens=self._max_context_tokens,
            route=self._wire.path,
            logprobs=self._logprobs,
            returns_versions=bool(probe.policy_version),
        )
        _log_checked(info, [fact.version for fact in facts])
        return info

    async def close(self) -> None:
        await self.pool.close()

    async def generate(
        self, prompt_ids: Sequence[int], *, max_tokens: int, sampling: Mapping[str, JSON], session: str
    ) -> Generation:
        """See `protocol.TokenEngine`. max_tokens is cut to what the context leaves."""
        limit = room(len(prompt_ids), max_tokens=max_tokens, context=self._max_context_tokens)
        wire = self._wire
        ask = Ask(model=self._model, prompt_ids=prompt_ids, max_tokens=limit, sampling={**self.neutral, **sampling})

        async def send(ask: Ask) -> Generation:
            await self.pool.turnstile.turn()
            body = pydantic_core.to_json(wire.payload(ask))
            return await self.pool.post(wire.path, body, session=session, read=self._reader(wire, ask))

        return await self.sample(ask, send)

    def _reader(self, wire: Wire, ask: Ask) -> Callable[[aiohttp.ClientResponse], Awaitable[Generation]]:
        async def read(response: aiohttp.ClientResponse) -> Generation:
            where = describe(response)
            reading = Reading(pool=self.pool, vocab_size=self._vocab_size, where=where)
            generation = await wire.read(response, ask, reading)
            if generation.floored:
                count, floored = len(generation.token_ids), generation.floored
                log.warning("completion.logprobs_floored", floored=floored, tokens=count, server=where)
            return generation

        return read

    async def _settle(self, urls: Sequence[str], facts: Sequence[Facts]) -> tuple[Wire, Generation]:
        """The first wire that all servers have, with what the first server answered on it."""
        for wire in self.wires:
            answers = await asyncio.gather(*(self._probe(url, wire) for url in urls), return_exceptions=True)
            failed = [
                (error, fact) for error, fact in zip(answers, facts, strict=True) if isinstance(error, BaseException)
            ]
            if not failed:
                return wire, next(answer for answer in answers if isinstance(answer, Generation))
            error, fact = failed[0]
            absent = isinstance(error, EngineRefused) and refused_status(error) in NO_SUCH_ROUTE
            if absent and wire is not self.wires[-1]:
                log.info("engine.route_refused", kind=self.kind, route=wire.path, error=str(error))
                continue
            if isinstance(error, EngineRefused | EngineAnswerError):
                raise without_tokens(error, kind=self.kind, mend=self.mend(fact.version)) from None
            raise error
        raise EngineRefused(f"engine.kind {self.kind!r} has no route for token ids")

    async def _probe(self, url: str, wire: Wire, prompt: Sequence[int] = (1,), **sampling: JSON) -> Generation:
        """One token from one server."""
        ask = Ask(model=self._model, prompt_ids=prompt, max_tokens=1, sampling={**self.neutral, **sampling})
        timeout_s = self.pool.section.request_timeout_s

        async def send(ask: Ask) -> Generation:
            body = pydantic_core.to_json(wire.payload(ask))
            return await self.pool.post_to(url, wire.path, body, read=self._reader(wire, ask), timeout_s=timeout_s)

        return await self.sample(ask, send)

    async def _measure(self, url: str) -> LogprobsMode:
        """What the log-probabilities are of.

        The likeliest token is sampled greedily and again at a temperature near 0: of the model, its log-probability is the same
        in both; after temperature it is about 0 in the second. Nothing follows from a token that is certain anyway.
        """
        prompt = tuple(self._encode(PROBE_TEXT)) if self._encode else (1,)
        try:
            greedy = await self._probe(url, self._wire, prompt, temperature=0.0)
            for _ in range(MEASURE_ATTEMPTS):
                cold = await self._probe(url, self._wire, prompt, temperature=COLD)
                if cold.token_ids == greedy.token_ids:
                    return compared(greedy.logprobs, cold.logprobs)
        except EngineError as error:
            log.info("engine.logprobs_not_measured", error=str(error))
        return "unknown"


def compared(greedy: Sequence[float], cold: Sequence[float]) -> LogprobsMode:
    """What the log-probability of one and the same token, sampled greedily and at a temperature near 0, says of its kind."""
    if len(greedy) != 1 or len(cold) != 1 or greedy[0] > -0.1:
        return "unknown"
    ratio = cold[0] / greedy[0]
    # Rounding and batching move a bf16 log-probability by some hundredths.
    return "model" if 0.8 < ratio < 1.25 else "sampling" if ratio < 0.5 else "unknown"


def room(prompt_tokens: int, *, max_tokens: int, context: int | None) -> int:
    """Tokens that may be sampled: max_tokens, or what the context leaves. Raises ContextOverflow when that is nothing."""
    if context is None:
        return max_tokens
    if prompt_tokens >= context:
        raise ContextOverflow(f"a prompt of {prompt_tokens} tokens does not fit the engine's context of {context}")
    return min(max_tokens, context - prompt_tokens)


async def ask_for(pool: HttpPool, url: str, *paths: str) -> dict[str, JSON]:
    """The JSON object on the first of `paths` that the server has; nothing from one that keeps it to itself."""
    for path in paths:
        try:
            document = await pool.get(url, path, timeout_s=ASK_TIMEOUT_S)
        except (EngineRefused, EngineUnavailable, EngineAnswerError):
            continue
        if isinstance(document, dict):
            return document
    return {}


def _smallest_context(found: Discovery, facts: Sequence[Facts]) -> int | None:
    sizes = [found.max_context_tokens, *(fact.max_context_tokens for fact in facts)]
    return min((size for size in sizes if size is not None), default=None)


def _log_checked(info: EngineInfo, versions: Sequence[str]) -> None:
    log.info(
        "engine.checked",
        kind=info.kind,
        model=info.model,
        versions=list(dict.fromkeys(versions)),
        route=info.route,
        logprobs=info.logprobs,
        max_context_tokens=info.max_context_tokens,
    )
