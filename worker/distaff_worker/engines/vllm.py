"""vLLM: its token-in, token-out route, or its OpenAI completions route where that is what the server has.

Invariant: `choices[0].token_ids` are the sampled tokens, and each log-probability stands beside the id it is of. The
log-probabilities are vLLM's `raw_logprobs` (of the model at temperature 1) unless the server was started with
--logprobs-mode processed_logprobs.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import ClassVar

from distaff.errors import EngineAnswerError
from distaff.types import JSON
from distaff_worker.engines import answers
from distaff_worker.engines.discovery import PROBE_TEXT
from distaff_worker.engines.gentle import LongList
from distaff_worker.engines.protocol import Generation
from distaff_worker.engines.token_engine import Facts, HttpTokenEngine, ask_for
from distaff_worker.engines.wires import Ask, JsonWire, Reading, Wire

OLDEST = (0, 10, 2)
"""The first whose OpenAI routes return token ids."""
_RELEASE = re.compile(r"(\d+)\.(\d+)\.(\d+)")
_MEND = (
    "start vLLM 0.32 or newer with --enable-scale-out (route /inference/v1/generate), or any from 0.10.2 on, whose "
    "/v1/completions knows return_token_ids"
)


class GenerateWire(JsonWire):
    """vLLM 0.32 with --enable-scale-out."""

    path = "/inference/v1/generate"
    long_list = LongList(holder=lambda document: document["choices"][0]["logprobs"])

    def payload(self, ask: Ask) -> dict[str, JSON]:
        parameters = {**ask.sampling, "max_tokens": ask.max_tokens, "logprobs": 0, "n": 1}
        payload = {"token_ids": list(ask.prompt_ids), "sampling_params": parameters, "stream": False}
        return {"model": ask.model, **payload} if ask.model else payload

    def parse(self, document: JSON, ask: Ask, reading: Reading) -> Generation:
        choice = answers.only_choice(document, where=reading.where)
        answers.check_model(document.get("model"), ask.model, where=reading.where)
        logprobs = choice.get("logprobs")
        content = logprobs.get("content") if isinstance(logprobs, dict) else None
        entries = content if isinstance(content, list) and all(isinstance(entry, dict) for entry in content) else None
        ids = choice.get("token_ids")
        if entries is not None:
            _check_named(ids, [entry.get("token_id") for entry in entries], where=reading.where)
        return answers.generation(
            ids,
            None if entries is None else [entry.get("logprob", answers.ABSENT) for entry in entries],
            finish_reason=answers.finish_reason(choice.get("finish_reason")),
            vocab_size=reading.vocab_size,
            where=reading.where,
            policy_version=answers.policy_version(choice.get("weight_versions")),
        )


class CompletionsWire(JsonWire):
    """vLLM from 0.10.2 on: the OpenAI route with ids beside the text. Names no weight version."""

    path = "/v1/completions"
    long_list = LongList(holder=lambda document: document["choices"][0]["logprobs"], name="top_logprobs")

    def payload(self, ask: Ask) -> dict[str, JSON]:
        own = {
            "prompt": list(ask.prompt_ids),
            "max_tokens": ask.max_tokens,
            "logprobs": 0,
            "return_token_ids": True,
            "return_tokens_as_token_ids": True,
            "n": 1,
            "stream": False,
            "echo": False,
            "add_special_tokens": False,
        }
        return {"model": ask.model, **ask.sampling, **own} if ask.model else {**ask.sampling, **own}

    def parse(self, document: JSON, ask: Ask, reading: Reading) -> Generation:
        choice = answers.only_choice(document, where=reading.where)
        answers.check_model(document.get("model"), ask.model, where=reading.where)
        ids, prompt_ids = choice.get("token_ids"), choice.get("prompt_token_ids")
        if prompt_ids is not None and prompt_ids != list(ask.prompt_ids):
            raise EngineAnswerError(f"{reading.where}: the answer is for another prompt than was sent")
        logprobs = choice.get("logprobs")
        logprobs = logprobs if isinstance(logprobs, dict) else {}
        named = logprobs.get("tokens")
        if isinstance(named, list):
            _check_named(ids, [_named_id(token) for token in named], where=reading.where)
        return answers.generation(
            ids,
            logprobs.get("token_logprobs"),
            finish_reason=answers.finish_reason(choice.get("finish_reason")),
            vocab_size=reading.vocab_size,
            where=reading.where,
        )


class VllmEngine(HttpTokenEngine):
    kind = "vllm"
    wires: ClassVar[tuple[Wire, ...]] = (GenerateWire(), CompletionsWire())
    neutral: ClassVar[Mapping[str, JSON]] = {
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": 0,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
    }

    def tokenize_request(self, model: str) -> dict[str, JSON]:
        return {"model": model, "prompt": PROBE_TEXT, "add_special_tokens": False}

    async def facts(self, url: str) -> Facts:
        document = await ask_for(self.pool, url, "/version")
        return Facts(version=str(document.get("version", "")))

    def mend(self, version: str) -> str:
        release = _RELEASE.match(version)
        if release and tuple(map(int, release.groups())) < OLDEST:
            return f"its version {version} is too old; {_MEND}"
        return f"{_MEND}; this is version {version}" if version else _MEND


def _check_named(ids: JSON, named: list[JSON], *, where: str) -> None:
    """Raise EngineAnswerError where a log-probability names another token than was sampled at its place."""
    if not isinstance(ids, list) or named == ids:
        return
    for token, other in zip(ids, named, strict=False):
        if other is not None and other != token:
            raise EngineAnswerError(f"{where}: log-probability of token {other} where token {token} was sampled")


def _named_id(token: JSON) -> int | None:
    """The id in "token_id:17"; None for a token that is named by its text."""
    digits = token.removeprefix("token_id:") if isinstance(token, str) and token.startswith("token_id:") else ""
    return int(digits) if digits.isascii() and digits.isdigit() and len(digits) < 12 else None
