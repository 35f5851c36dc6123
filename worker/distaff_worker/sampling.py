"""Sampling parameters of one turn: the environment's, under the run's, and a seed.

Invariant: every turn of a run with a seed has a seed of its own that depends on the run's seed and the turn's place only.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass

from distaff.config import RolloutSection, SamplingSection
from distaff.types import JSON

_BUDGET = ("n", "seed", "max_tokens", "max_completion_tokens", "timeout")
_CONTENT = ("model", "messages", "prompt", "tools")
_TRANSPORT = ("stream", "stream_options", "extra_body", "extra_headers")
_ANSWER = ("logprobs", "top_logprobs", "prompt_logprobs", "return_token_ids")
_OURS = frozenset((*_BUDGET, *_CONTENT, *_TRANSPORT, *_ANSWER))
"""What an environment cannot set: the run or the engine client decides."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Bounds on a rollout; 0: none."""

    max_turns: int = 0
    max_context_tokens: int = 0
    """Of prompt and completion of one turn together."""
    max_total_completion_tokens: int = 0
    """Sampled over all turns."""

    @classmethod
    def of(cls, section: RolloutSection, *, engine_context_tokens: int | None) -> Limits:
        """The tighter of what the run asks and what the engine can."""
        bounds = [bound for bound in (section.max_context_tokens, engine_context_tokens) if bound]
        return cls(
            max_turns=section.max_turns,
            max_context_tokens=min(bounds, default=0),
            max_total_completion_tokens=section.max_total_completion_tokens,
        )


def derive_seed(*parts: int | str) -> int:
    """A seed in [0, 2**31) from the parts: SHA-256 of their text, the same on every machine."""
    text = "\x1f".join(map(str, parts))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "big") & 0x7FFFFFFF


def turn_sampling(
    environment: Mapping[str, JSON], run: SamplingSection, *, rollout_seed: int | None, turn: int
) -> dict[str, JSON]:
    """Parameters for the engine, max_tokens apart. The run's win over the environment's; `extra_body` is taken apart."""
    body = environment.get("extra_body")
    theirs = {**environment, **(body if isinstance(body, dict) else {})}
    merged = {key: value for key, value in theirs.items() if key not in _OURS and value is not None}
    merged |= {**run.extra, "temperature": run.temperature, "top_p": run.top_p}
    if rollout_seed is not None:
        merged["seed"] = derive_seed(rollout_seed, turn)
    return merged
