"""The one place where an engine's answer is checked.

Invariant: what passes has one finite log-probability <= 0 (within 1e-4) for every sampled token, every id inside the
vocabulary, and the asked model's name. Nothing is padded or shifted. A log-probability that is minus infinity or no number
reaches us in one of three spellings: null, -9999.0 (vLLM), the lowest float32 (SGLang, llama.cpp). Each becomes
LOGPROB_FLOOR and is counted; an answer that has no other is an error.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from types import NoneType

import numpy as np

from distaff.alignment import LOGPROB_FLOOR
from distaff.errors import EngineAnswerError
from distaff.types import JSON, FinishReason
from distaff_worker.engines.protocol import Generation

LOGPROB_TOLERANCE = 1e-4
ABSENT: JSON = "absent"
"""Stands for a member that an entry ought to have: null may be a log-probability, this is none."""

_FINISH_REASONS: dict[str, FinishReason] = {
    "stop": "stop",
    "eos": "stop",
    "end_turn": "stop",
    "stop_sequence": "stop",
    "length": "length",
    "limit": "length",
    "max_tokens": "length",
    "model_length": "length",
    "tool_calls": "tool_calls",
    "tool_use": "tool_calls",
    "function_call": "tool_calls",
    "abort": "abort",
    "content_filter": "abort",
}


def generation(
    token_ids: JSON,
    logprobs: JSON,
    *,
    finish_reason: FinishReason,
    vocab_size: int | None,
    where: str,
    policy_version: str = "",
) -> Generation:
    """A checked Generation. Raises EngineAnswerError. Only an aborted one may be empty."""
    ids = _token_ids(token_ids, vocab_size=vocab_size, where=where)
    if not ids and finish_reason != "abort":
        raise EngineAnswerError(f"{where}: the answer has no token ids")
    values, floored = _logprobs(logprobs, where=where)
    if len(ids) != len(values):
        raise EngineAnswerError(f"{where}: {len(ids)} token ids but {len(values)} log-probabilities")
    return Generation(
        token_ids=ids, logprobs=values, finish_reason=finish_reason, policy_version=policy_version, floored=floored
    )


def _token_ids(value: JSON, *, vocab_size: int | None, where: str) -> list[int]:
    if not isinstance(value, list):
        raise EngineAnswerError(f"{where}: the answer has no list of token ids")
    if not set(map(type, value)) <= {int}:
        raise EngineAnswerError(f"{where}: the token ids are not all integers")
    largest = math.inf if vocab_size is None else vocab_size - 1
    if value and not (min(value) >= 0 and max(value) <= largest):
        outside = next(token for token in value if not 0 <= token <= largest)
        raise EngineAnswerError(
            f"{where}: token id {outside} is outside the tokenizer's vocabulary of {vocab_size}: is it the served model's?"
        )
    return value


def _logprobs(value: JSON, *, where: str) -> tuple[list[float], int]:
    """The log-probabilities and how many of them were floored."""
    if not isinstance(value, list):
        raise EngineAnswerError(f"{where}: the answer has no log-probabilities")
    kinds = set(map(type, value))
    if not kinds <= {int, float, NoneType}:
        raise EngineAnswerError(f"{where}: the log-probabilities are not all numbers")
    if NoneType in kinds:
        value = [LOGPROB_FLOOR if logprob is None else logprob for logprob in value]
    try:
        numbers = np.array(value, np.float64)
    except OverflowError:
        raise EngineAnswerError(f"{where}: a log-probability is not finite") from None
    if not np.isfinite(numbers).all():
        raise EngineAnswerError(f"{where}: a log-probability is not finite")
    if value and numbers.max() > LOGPROB_TOLERANCE:
        raise EngineAnswerError(f"{where}: log-probability {numbers.max()} is above 0")
    floored = int(np.count_nonzero(numbers <= LOGPROB_FLOOR))
    if floored and floored == len(value):
        raise EngineAnswerError(f"{where}: the engine has no finite log-probability for any of {floored} tokens")
    checked: list[float] = np.maximum(numbers, LOGPROB_FLOOR).tolist()
    return checked, floored


def policy_version(spans: JSON, whole: JSON = None) -> str:
    """The weight version of an answer; "old>new" when the weights changed while it was sampled.

    spans: [{"version", "start", "end"}, ...] in the order of the tokens. whole: the version, where there are no spans.
    """
    if not isinstance(spans, list):
        return str(whole) if isinstance(whole, str | int) else ""
    return ">".join(
        dict.fromkeys(str(span["version"]) for span in spans if isinstance(span, dict) and "version" in span)
    )


def finish_reason(value: JSON) -> FinishReason:
    """The engine's word as ours; "none" for a missing or unknown one."""
    return _FINISH_REASONS.get(value, "none") if isinstance(value, str) else "none"


def only_choice(document: JSON, *, where: str) -> dict[str, JSON]:
    """choices[0] of an answer in the OpenAI shape. Raises EngineAnswerError; also for an error sent with status 200."""
    if not isinstance(document, dict):
        raise EngineAnswerError(f"{where}: the answer is not a JSON object")
    if document.get("error"):
        raise EngineAnswerError(f"{where}: the answer is an error: {str(document['error'])[:200]}")
    choices = document.get("choices")
    if not isinstance(choices, list) or len(choices) != 1 or not isinstance(choices[0], dict):
        count = len(choices) if isinstance(choices, list) else "no"
        raise EngineAnswerError(f"{where}: the answer has {count} choices instead of one")
    return choices[0]


def check_model(answered: JSON, asked: str, *, where: str, others: Sequence[str] | None = None) -> None:
    """Raise EngineAnswerError when another model answered than was asked.

    others: where names are aliases (hosted APIs answer with dated names), only these are known to be other models.
    """
    if not asked or not isinstance(answered, str) or answered == asked:
        return
    if others is None or answered in others:
        raise EngineAnswerError(f"{where}: model {answered!r} answered instead of {asked!r}")
