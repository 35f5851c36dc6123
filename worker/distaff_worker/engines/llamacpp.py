"""llama.cpp's /completion route with token ids.

Invariant: a completion is accepted only when the server streamed exactly one id with its log-probability for each token it
says it sampled. It does not always: a token that ends inside a UTF-8 character is streamed without either (emoji do
this), and stop strings hold tokens back. Such an answer is asked for again with another seed, never repaired.

The log-probabilities are of the model at temperature 1 before any sampler. Always streamed: the server notices that
a client of a plain request has gone only after it is done.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Mapping, Sequence

import aiohttp
import pydantic_core
import structlog

from distaff.errors import ConfigurationError, EngineAnswerError, EngineRefused
from distaff.types import JSON
from distaff_worker.engines import answers
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
from distaff_worker.engines.failures import error_text, refusal
from distaff_worker.engines.http import HttpPool, Reader, describe, read_events
from distaff_worker.engines.protocol import EngineInfo, Generation
from distaff_worker.engines.vllm import room

log = structlog.get_logger(__name__)

COMPLETION = "/completion"
NEUTRAL: Mapping[str, JSON] = {
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": 0,
    "min_p": 0.0,
    "typical_p": 1.0,
    "repeat_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "dry_multiplier": 0.0,
    "xtc_probability": 0.0,
    "mirostat": 0,
    "dynatemp_range": 0.0,
}
"""Sampling from the model itself; the server's own defaults are not neutral."""
MISALIGNED_ATTEMPTS = 4
_SEEDS = 2**32 - 1
"""The server's seeds are below; that number itself means "random"."""
_SEED_STEP = 1_000_003
_MEND = "use a llama.cpp server whose /completion knows return_tokens and n_probs"


class Misaligned(EngineAnswerError):
    """Tokens are missing in the stream."""


class LlamaCppEngine:
    """A TokenEngine; see `protocol.TokenEngine` for the contract."""

    def __init__(self, pool: HttpPool, *, vocab_size: int | None, encode: Encode | None = None) -> None:
        self._pool = pool
        self._vocab_size = vocab_size
        self._encode = encode
        self._model = pool.section.model
        self._max_context_tokens: int | None = None

    async def check(self) -> EngineInfo:
        """See `protocol.Engine`; also samples one token from each server. EngineAnswerError when it comes without logprob."""
        found = await discover(self._pool, must_list=True)
        check_vocabulary(found, self._vocab_size)
        text: dict[str, JSON] = {"content": PROBE_TEXT, "add_special": False}
        await asyncio.gather(*(check_tokenizer(self._pool, url, text, self._encode) for url in found.urls))
        properties = await asyncio.gather(*(self._properties(url) for url in found.urls))
        self._model, self._max_context_tokens = found.model, _slot_context(found, properties)
        await asyncio.gather(*(self._probe(url) for url in found.urls))
        return EngineInfo(
            kind="llamacpp",
            model=found.model,
            version=str(properties[0].get("build_info", "")),
            max_context_tokens=self._max_context_tokens,
        )

    async def close(self) -> None:
        await self._pool.close()

    async def generate(
        self, prompt_ids: Sequence[int], *, max_tokens: int, sampling: Mapping[str, JSON], session: str
    ) -> Generation:
        """See `protocol.TokenEngine`. Stop strings are refused (ConfigurationError); `stop_token_ids` end the completion."""
        if sampling.get("stop"):
            raise ConfigurationError(
                "llama.cpp loses log-probabilities when it is given stop strings: leave `stop` out of sampling, or use vLLM"
            )
        limit = room(len(prompt_ids), max_tokens=max_tokens, context=self._max_context_tokens)
        options = {**NEUTRAL, **sampling}
        stops = frozenset(options.pop("stop_token_ids", None) or ())

        async def once(seed_offset: int) -> Generation:
            await self._pool.turnstile.turn()
            body = _body(prompt_ids, limit, options, seed_offset=seed_offset)
            return await self._pool.post(COMPLETION, body, session=session, read=self._reader(stops))

        return await _until_aligned(once)

    async def _probe(self, url: str) -> None:
        async def once(seed_offset: int) -> Generation:
            body = _body([1], 1, {**NEUTRAL, "seed": 0}, seed_offset=seed_offset)
            timeout_s = self._pool.section.request_timeout_s
            return await self._pool.post_to(url, COMPLETION, body, read=self._reader(frozenset()), timeout_s=timeout_s)

        try:
            await _until_aligned(once)
        except (EngineRefused, EngineAnswerError) as error:
            raise without_tokens(error, kind="llamacpp", mend=_MEND) from None

    async def _properties(self, url: str) -> dict[str, JSON]:
        """/props, or nothing from a server that keeps them to itself."""
        try:
            document = await self._pool.get(url, "/props", timeout_s=ASK_TIMEOUT_S)
        except EngineRefused:
            return {}
        return document if isinstance(document, dict) else {}

    def _reader(self, stops: frozenset[int]) -> Reader[Generation]:
        async def read(response: aiohttp.ClientResponse) -> Generation:
            where = describe(response)
            ids, logprobs, end = await self._collect(response, stops, where=where)
            answers.check_model(end.get("model"), self._model, where=where)
            return answers.generation(
                ids,
                logprobs,
                finish_reason=answers.finish_reason(end.get("stop_type")),
                vocab_size=self._vocab_size,
                where=where,
            )

        return read

    async def _collect(
        self, response: aiohttp.ClientResponse, stops: frozenset[int], *, where: str
    ) -> tuple[list[JSON], list[JSON], dict[str, JSON]]:
        """Ids, log-probabilities and the last event. Leaving early closes the connection, which ends the completion."""
        ids: list[JSON] = []
        logprobs: list[JSON] = []
        async with contextlib.aclosing(read_events(response)) as events:
            async for event in events:
                if not ids:
                    await self._pool.turnstile.turn()
                _check_event(event, where=where, key_var=self._pool.section.api_key_var, secrets=self._pool.secrets)
                stopped = bool(ids) and ids[-1] in stops
                if stopped and not event.get("stop"):
                    return ids, logprobs, {"stop_type": "eos"}
                _append(event, ids, logprobs, where=where)
                if event.get("tokens_predicted") != len(ids):
                    raise Misaligned(f"{where}: {event.get('tokens_predicted')} tokens sampled but {len(ids)} streamed")
                if event.get("stop"):
                    return ids, logprobs, {**event, "stop_type": "eos"} if stopped else event
        raise EngineAnswerError(f"{where}: the stream ended before its last event")


async def _until_aligned(once: Callable[[int], Awaitable[Generation]]) -> Generation:
    """The first aligned answer; `once` is given what to add to the seed."""
    for attempt in range(MISALIGNED_ATTEMPTS - 1):
        try:
            return await once(attempt * _SEED_STEP)
        except Misaligned as error:
            log.info("completion.misaligned", attempt=attempt + 1, error=str(error))
    return await once((MISALIGNED_ATTEMPTS - 1) * _SEED_STEP)


def _body(prompt_ids: Sequence[int], limit: int, options: Mapping[str, JSON], *, seed_offset: int) -> bytes:
    payload = {
        **options,
        "prompt": list(prompt_ids),
        "n_predict": limit,
        "n_probs": 1,
        "return_tokens": True,
        "stream": True,
    }
    if isinstance(options.get("seed"), int):
        payload["seed"] = (options["seed"] + seed_offset) % _SEEDS
    return pydantic_core.to_json(payload)


def _check_event(event: JSON, *, where: str, key_var: str, secrets: list[str]) -> None:
    """Raise for an event that is no object, or that is an error (sent after the status was 200)."""
    if not isinstance(event, dict):
        raise EngineAnswerError(f"{where}: an event is not a JSON object")
    error = event.get("error")
    if error:
        code = error.get("code") if isinstance(error, dict) else None
        if isinstance(code, int) and 400 <= code < 500:
            raise refusal(code, pydantic_core.to_json(event), where=where, key_var=key_var, secrets=secrets)
        raise EngineAnswerError(f"{where}: {error_text(pydantic_core.to_json(event), secrets=secrets)}")


def _append(event: Mapping[str, JSON], ids: list[JSON], logprobs: list[JSON], *, where: str) -> None:
    """Add an event's tokens and log-probabilities; they must name the same tokens."""
    tokens = event.get("tokens") or []
    entries = event.get("completion_probabilities") or []
    if not isinstance(tokens, list) or not isinstance(entries, list) or not all(isinstance(e, dict) for e in entries):
        raise EngineAnswerError(f"{where}: an event without lists of tokens and log-probabilities")
    if [entry.get("id") for entry in entries] != tokens:
        raise EngineAnswerError(f"{where}: log-probabilities of other tokens than were sampled")
    ids += tokens
    logprobs += [entry.get("logprob") for entry in entries]


def _slot_context(found: Discovery, properties: Sequence[Mapping[str, JSON]]) -> int | None:
    """Context of one slot, the smallest of all servers."""
    settings = [entry.get("default_generation_settings") for entry in properties]
    sizes = [entry.get("n_ctx") for entry in settings if isinstance(entry, dict)]
    known = [size for size in (*sizes, found.max_context_tokens) if isinstance(size, int) and size > 0]
    return min(known, default=None)
