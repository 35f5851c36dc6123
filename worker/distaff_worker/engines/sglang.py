"""SGLang's native /generate route.

Invariant: ids and log-probabilities come from the same entries (`meta_info.output_token_logprobs`: [logprob, id, text or null]), so they
cannot part; `output_ids`, where the server sends them too, must agree. A server that cut the prompt is refused.

The log-probabilities are those after temperature, before top-p and the like, unless the server runs with
SGLANG_RETURN_ORIGINAL_LOGPROB=1, which it does not tell: the check measures it. Format: python/sglang/srt of 0.5 (managers/io_struct.py,
managers/tokenizer_manager.py, sampling/sampling_params.py, utils/weight_versions.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from distaff.clients import redact_url
from distaff.errors import EngineAnswerError, EngineRefused
from distaff.types import JSON
from distaff_worker.engines import answers
from distaff_worker.engines.discovery import PROBE_TEXT
from distaff_worker.engines.gentle import LongList
from distaff_worker.engines.protocol import Generation
from distaff_worker.engines.token_engine import Facts, HttpTokenEngine, ask_for
from distaff_worker.engines.wires import Ask, JsonWire, Reading

_ENTRY = 2
"""Members of an entry that count: log-probability and id."""
_MEND = "use SGLang 0.5.3 or newer, serving a model that generates, with its native /generate route reachable"


class NativeWire(JsonWire):
    path = "/generate"
    long_list = LongList(holder=lambda document: document["meta_info"], name="output_token_logprobs", brackets="[]")

    def payload(self, ask: Ask) -> dict[str, JSON]:
        parameters = {name: value for name, value in ask.sampling.items() if name not in ("seed", "max_tokens")}
        if ask.sampling.get("seed") is not None:
            parameters["sampling_seed"] = ask.sampling["seed"]
        # Nothing is to be cut from the end of the answer: a stop token that was sampled is trained.
        parameters |= {"max_new_tokens": ask.max_tokens, "n": 1, "no_stop_trim": True, "skip_special_tokens": False}
        return {
            "input_ids": list(ask.prompt_ids),
            "sampling_params": parameters,
            "return_logprob": True,
            "logprob_start_len": -1,
            "top_logprobs_num": 0,
            "return_text_in_logprobs": False,
            "stream": False,
        }

    def parse(self, document: JSON, ask: Ask, reading: Reading) -> Generation:
        where = reading.where
        meta = document.get("meta_info") if isinstance(document, dict) else None
        if not isinstance(meta, dict):
            raise EngineAnswerError(f"{where}: the answer has no meta_info: {str(document)[:200]}")
        prompt_tokens = meta.get("prompt_tokens")
        if prompt_tokens is not None and prompt_tokens != len(ask.prompt_ids):
            raise EngineAnswerError(
                f"{where}: the server read {prompt_tokens} prompt tokens of {len(ask.prompt_ids)}: start it without "
                "--allow-auto-truncate"
            )
        ids, logprobs = _pairs(meta.get("output_token_logprobs"), where=where)
        output_ids = document.get("output_ids")
        if output_ids is not None and output_ids != ids:
            raise EngineAnswerError(f"{where}: output_ids are not the tokens that have log-probabilities")
        return answers.generation(
            ids,
            logprobs,
            finish_reason=answers.finish_reason(_reason(meta.get("finish_reason"))),
            vocab_size=reading.vocab_size,
            where=where,
            policy_version=answers.policy_version(meta.get("weight_versions"), meta.get("weight_version")),
        )


class SglangEngine(HttpTokenEngine):
    kind = "sglang"
    wires = (NativeWire(),)
    neutral: ClassVar[Mapping[str, JSON]] = {
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": -1,
        "min_p": 0.0,
        "frequency_penalty": 0.0,
        "presence_penalty": 0.0,
        "repetition_penalty": 1.0,
    }

    def tokenize_request(self, model: str) -> dict[str, JSON]:
        return {"model": model, "prompt": PROBE_TEXT, "add_special_tokens": False}

    async def facts(self, url: str) -> Facts:
        model = await ask_for(self.pool, url, "/model_info", "/get_model_info")
        if model.get("is_generation") is False:
            raise EngineRefused(f"engine at {redact_url(url)} serves a model that does not generate: {self.mend('')}")
        server = await ask_for(self.pool, url, "/server_info", "/get_server_info")
        return Facts(version=str(server.get("version", "")))

    def mend(self, version: str) -> str:
        return f"{_MEND}; this is version {version}" if version else _MEND


def _pairs(entries: JSON, *, where: str) -> tuple[list[JSON], list[JSON]]:
    """Ids and log-probabilities of [[logprob, id, ...], ...]."""
    if not isinstance(entries, list):
        raise EngineAnswerError(f"{where}: the answer has no output_token_logprobs")
    if not all(isinstance(entry, list) and len(entry) >= _ENTRY for entry in entries):
        raise EngineAnswerError(f"{where}: output_token_logprobs are not [log-probability, id] entries")
    return [entry[1] for entry in entries], [entry[0] for entry in entries]


def _reason(value: JSON) -> JSON:
    """The word in {"type": "stop", "matched": 2}."""
    return value.get("type") if isinstance(value, dict) else value
