"""vLLM's token-in, token-out route.

Invariant: `choices[0].token_ids` are the sampled tokens and `logprobs.content` has exactly one entry for each. The
log-probabilities are vLLM's `raw_logprobs` (of the model at temperature 1) unless the server was started with
--logprobs-mode processed_logprobs.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence

import aiohttp
import pydantic_core

from distaff.errors import ContextOverflow, EngineAnswerError, EngineRefused, EngineUnavailable
from distaff.types import JSON
from distaff_worker.engines import answers
from distaff_worker.engines.discovery import (
    ASK_TIMEOUT_S,
    PROBE_TEXT,
    Encode,
    check_tokenizer,
    check_vocabulary,
    discover,
    without_tokens,
)
from distaff_worker.engines.gentle import LARGE_BYTES, parse_gently
from distaff_worker.engines.http import HttpPool, check_density, describe, not_json, parse_json, read_parts
from distaff_worker.engines.protocol import EngineInfo, Generation

GENERATE = "/inference/v1/generate"
NEUTRAL: Mapping[str, JSON] = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0}
"""Sampling from the model itself, whatever the model's generation_config.json says."""
_MEND = "start vLLM 0.32 or newer with --enable-scale-out"


class VllmEngine:
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
        text: dict[str, JSON] = {"model": found.model, "prompt": PROBE_TEXT, "add_special_tokens": False}
        await asyncio.gather(*(check_tokenizer(self._pool, url, text, self._encode) for url in found.urls))
        self._model, self._max_context_tokens = found.model, found.max_context_tokens
        await asyncio.gather(*(self._probe(url) for url in found.urls))
        version = await self._version(found.urls[0])
        return EngineInfo(kind="vllm", model=found.model, version=version, max_context_tokens=found.max_context_tokens)

    async def close(self) -> None:
        await self._pool.close()

    async def generate(
        self, prompt_ids: Sequence[int], *, max_tokens: int, sampling: Mapping[str, JSON], session: str
    ) -> Generation:
        """See `protocol.TokenEngine`. max_tokens is cut to what the context leaves."""
        limit = room(len(prompt_ids), max_tokens=max_tokens, context=self._max_context_tokens)
        await self._pool.turnstile.turn()
        body = self._body(prompt_ids, max_tokens=limit, sampling=sampling)
        return await self._pool.post(GENERATE, body, session=session, read=self._read)

    async def _probe(self, url: str) -> None:
        body = self._body([1], max_tokens=1, sampling={})
        timeout_s = self._pool.section.request_timeout_s
        try:
            await self._pool.post_to(url, GENERATE, body, read=self._read, timeout_s=timeout_s)
        except (EngineRefused, EngineAnswerError) as error:
            raise without_tokens(error, kind="vllm", mend=_MEND) from None

    async def _version(self, url: str) -> str:
        try:
            document = await self._pool.get(url, "/version", timeout_s=ASK_TIMEOUT_S)
        except (EngineRefused, EngineUnavailable, EngineAnswerError):
            return ""
        return str(document.get("version", "")) if isinstance(document, dict) else ""

    def _body(self, prompt_ids: Sequence[int], *, max_tokens: int, sampling: Mapping[str, JSON]) -> bytes:
        parameters = {**NEUTRAL, **sampling, "max_tokens": max_tokens, "logprobs": 0, "n": 1}
        payload = {"token_ids": list(prompt_ids), "sampling_params": parameters, "stream": False}
        return pydantic_core.to_json({"model": self._model, **payload} if self._model else payload)

    async def _read(self, response: aiohttp.ClientResponse) -> Generation:
        where = describe(response)
        parts = await read_parts(response, self._pool.bulk)
        if sum(map(len, parts)) >= LARGE_BYTES:
            return await self._pool.off_loop(lambda: self._generation(_parse_large(parts, where=where), where=where))
        await self._pool.turnstile.turn()
        return self._generation(parse_json(b"".join(parts), where=where), where=where)

    def _generation(self, document: JSON, *, where: str) -> Generation:
        choice = answers.only_choice(document, where=where)
        answers.check_model(document.get("model"), self._model, where=where)
        ids = choice.get("token_ids")
        return answers.generation(
            ids,
            _logprobs(choice, ids, where=where),
            finish_reason=answers.finish_reason(choice.get("finish_reason")),
            vocab_size=self._vocab_size,
            where=where,
            policy_version=_version_of(choice),
        )


def _parse_large(parts: list[bytes], *, where: str) -> JSON:
    body = b"".join(parts)
    check_density(body, where=where)
    try:
        return parse_gently(body, lambda document: document["choices"][0]["logprobs"])
    except ValueError as error:
        raise not_json(error, where=where) from None


def room(prompt_tokens: int, *, max_tokens: int, context: int | None) -> int:
    """Tokens that may be sampled: max_tokens, or what the context leaves. Raises ContextOverflow when that is nothing."""
    if context is None:
        return max_tokens
    if prompt_tokens >= context:
        raise ContextOverflow(f"a prompt of {prompt_tokens} tokens does not fit the engine's context of {context}")
    return min(max_tokens, context - prompt_tokens)


def _logprobs(choice: Mapping[str, JSON], ids: JSON, *, where: str) -> JSON:
    """The log-probability of each entry; entries that name another token than `token_ids` does are an error."""
    logprobs = choice.get("logprobs")
    content = logprobs.get("content") if isinstance(logprobs, dict) else None
    if not isinstance(content, list) or not all(isinstance(entry, dict) for entry in content):
        return None
    named = [entry.get("token_id") for entry in content]
    if isinstance(ids, list) and named != ids:
        for token, other in zip(ids, named, strict=False):
            if other is not None and other != token:
                raise EngineAnswerError(f"{where}: log-probability of token {other} where token {token} was sampled")
    return [entry.get("logprob") for entry in content]


def _version_of(choice: Mapping[str, JSON]) -> str:
    """The weight version; "old>new" when the weights changed while it was sampled."""
    spans = choice.get("weight_versions")
    if not isinstance(spans, list):
        return ""
    return ">".join(
        dict.fromkeys(str(span["version"]) for span in spans if isinstance(span, dict) and "version" in span)
    )
