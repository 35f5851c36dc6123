"""llama.cpp's /completion route with token ids.

Invariant: a completion is accepted only when the server streamed exactly one id with its log-probability for each token it
says it sampled. It does not always: a token that ends inside a UTF-8 character is streamed without either (emoji do
this), and stop strings hold tokens back. Such an answer is asked for again with another seed, never repaired.

The log-probabilities are of the model at temperature 1 before any sampler. Always streamed: the server notices that
a client of a plain request has gone only after it is done.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import replace
from typing import ClassVar

import aiohttp
import pydantic_core
import structlog

from distaff.errors import ConfigurationError, EngineAnswerError
from distaff.types import JSON
from distaff_worker.engines import answers
from distaff_worker.engines.discovery import PROBE_TEXT
from distaff_worker.engines.failures import error_text, refusal
from distaff_worker.engines.http import read_events
from distaff_worker.engines.protocol import Generation
from distaff_worker.engines.token_engine import Facts, HttpTokenEngine, Sample, ask_for
from distaff_worker.engines.wires import Ask, Reading, Wire

log = structlog.get_logger(__name__)

MISALIGNED_ATTEMPTS = 4
_SEEDS = 2**32 - 1
"""The server's seeds are below; that number itself means "random"."""
_SEED_STEP = 1_000_003


class Misaligned(EngineAnswerError):
    """Tokens are missing in the stream."""


class CompletionWire(Wire):
    path = "/completion"

    def payload(self, ask: Ask) -> dict[str, JSON]:
        options = {name: value for name, value in ask.sampling.items() if name != "stop_token_ids"}
        if options.get("stop"):
            raise ConfigurationError(
                "llama.cpp loses log-probabilities when it is given stop strings: leave `stop` out of sampling, or use vLLM"
            )
        if isinstance(options.get("seed"), int):
            options["seed"] = (options["seed"] + ask.attempt * _SEED_STEP) % _SEEDS
        own = {"prompt": list(ask.prompt_ids), "n_predict": ask.max_tokens, "n_probs": 1}
        return {**options, **own, "return_tokens": True, "stream": True}

    async def read(self, response: aiohttp.ClientResponse, ask: Ask, reading: Reading) -> Generation:
        stops = frozenset(ask.sampling.get("stop_token_ids") or ())
        ids, logprobs, end = await _collect(response, stops, reading)
        answers.check_model(end.get("model"), ask.model, where=reading.where)
        return answers.generation(
            ids,
            logprobs,
            finish_reason=answers.finish_reason(end.get("stop_type")),
            vocab_size=reading.vocab_size,
            where=reading.where,
        )


class LlamaCppEngine(HttpTokenEngine):
    kind = "llamacpp"
    wires = (CompletionWire(),)
    neutral: ClassVar[Mapping[str, JSON]] = {
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

    def tokenize_request(self, model: str) -> dict[str, JSON]:
        return {"content": PROBE_TEXT, "add_special": False}

    async def facts(self, url: str) -> Facts:
        """n_ctx is the size of one slot here; /v1/models may name that of all."""
        document = await ask_for(self.pool, url, "/props")
        settings = document.get("default_generation_settings")
        size = settings.get("n_ctx") if isinstance(settings, dict) else None
        return Facts(
            version=str(document.get("build_info", "")),
            max_context_tokens=size if isinstance(size, int) and size > 0 else None,
        )

    def mend(self, version: str) -> str:
        return "use a llama.cpp server whose /completion knows return_tokens and n_probs"

    async def sample(self, ask: Ask, send: Sample) -> Generation:
        """The first aligned answer; each is asked for with another seed."""
        for attempt in range(MISALIGNED_ATTEMPTS - 1):
            try:
                return await send(replace(ask, attempt=attempt))
            except Misaligned as error:
                log.info("completion.misaligned", attempt=attempt + 1, error=str(error))
        return await send(replace(ask, attempt=MISALIGNED_ATTEMPTS - 1))


async def _collect(
    response: aiohttp.ClientResponse, stops: frozenset[int], reading: Reading
) -> tuple[list[JSON], list[JSON], dict[str, JSON]]:
    """Ids, log-probabilities and the last event. Leaving early closes the connection, which ends the completion."""
    where, pool = reading.where, reading.pool
    ids: list[JSON] = []
    logprobs: list[JSON] = []
    async with contextlib.aclosing(read_events(response)) as events:
        async for event in events:
            if not ids:
                await pool.turnstile.turn()
            _check_event(event, where=where, key_var=pool.section.api_key_var, secrets=pool.secrets)
            stopped = bool(ids) and ids[-1] in stops
            if stopped and not event.get("stop"):
                return ids, logprobs, {"stop_type": "eos"}
            _append(event, ids, logprobs, where=where)
            if event.get("tokens_predicted") != len(ids):
                raise Misaligned(f"{where}: {event.get('tokens_predicted')} tokens sampled but {len(ids)} streamed")
            if event.get("stop"):
                return ids, logprobs, {**event, "stop_type": "eos"} if stopped else event
    raise EngineAnswerError(f"{where}: the stream ended before its last event")


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
    logprobs += [entry.get("logprob", answers.ABSENT) for entry in entries]
