"""One model turn as the capture object of a rollout keeps it.

Invariant: a step is written by the ChatModel that sampled it and by nobody else.
"""

from __future__ import annotations

from dataclasses import dataclass

from distaff.types import FinishReason, Message, Tool


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenStep:
    """A turn in tokens: exact in RL mode, made by the training tokenizer in SFT mode."""

    prompt_ids: list[int]
    completion_ids: list[int]
    logprobs: list[float] | None
    """One for each completion id; None in SFT."""
    finish_reason: FinishReason
    bridged: bool = False
    """The prompt extends the tokens of the turn before by construction."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatStep:
    """A turn in messages (SFT, evaluation), not yet tokenized."""

    prompt: list[Message]
    tools: list[Tool]
    completion: Message
    finish_reason: FinishReason
    prompt_tokens: int
    completion_tokens: int
