"""What the worker asks of an inference engine. Two kinds: token in, token out (RL), and chat (SFT, evaluation).

Invariant: an answer is complete and aligned or it is an EngineError; nothing is guessed, padded or re-encoded.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from distaff.types import JSON, FinishReason, Message, Tool

LogprobsMode = Literal["model", "sampling", "unknown"]
"""What log-probabilities are of: the model at temperature 1 whatever the sampling is, the distribution that was sampled
from (after temperature), or not found out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineInfo:
    """What the engine says of itself when it is checked."""

    kind: str
    model: str
    """The name to send: the configured one, or the only one served."""
    version: str
    max_context_tokens: int | None
    """prompt + completion; None when the engine does not say."""
    route: str = ""
    """Path that tokens are asked for on; "" for a chat engine."""
    logprobs: LogprobsMode = "unknown"
    """As measured by the check."""
    returns_versions: bool = False
    """Answers name the version of the weights."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """Sampled tokens. `len(token_ids) == len(logprobs)`; every logprob is finite and <= 0 (within 1e-4)."""

    token_ids: list[int]
    """As sampled, the stop token included when it was sampled."""
    logprobs: list[float]
    """Natural log, of each sampled token; `alignment.LOGPROB_FLOOR` where the engine has none or one below that."""
    finish_reason: FinishReason
    policy_version: str = ""
    """Weight version the engine names, "" when it names none."""
    floored: int = 0
    """How many log-probabilities are the floor."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatReply:
    message: Message
    finish_reason: FinishReason
    prompt_tokens: int
    completion_tokens: int


class Engine(Protocol):
    async def check(self) -> EngineInfo:
        """Ask every base URL who it is. Raises EngineUnavailable (nobody answers), EngineRefused (bad key, unknown model)."""
        ...

    async def close(self) -> None: ...


class TokenEngine(Engine, Protocol):
    async def generate(
        self, prompt_ids: Sequence[int], *, max_tokens: int, sampling: Mapping[str, JSON], session: str
    ) -> Generation:
        """Sample a completion of `prompt_ids`.

        sampling: temperature, top_p, seed (int or absent) and engine-specific extras. session: the rollout's id; requests of one
        session go to one server while it lives. Cancelling the call aborts the request on the server.
        Raises EngineUnavailable, EngineRefused, EngineAnswerError, ContextOverflow.
        """
        ...


class ChatEngine(Engine, Protocol):
    async def chat(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Tool],
        max_tokens: int,
        sampling: Mapping[str, JSON],
        session: str,
    ) -> ChatReply:
        """Sample the next assistant message. Errors as in `TokenEngine.generate`."""
        ...

    def temperature(self, asked: float) -> float:
        """What answers are really sampled with: `asked`, or the fixed one of an API that has refused to be asked."""
        ...
