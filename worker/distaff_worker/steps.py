"""One model turn as the capture object of a rollout keeps it, and the training sequences made of such turns.

Invariant: a step is written by the ChatModel that sampled it and by nobody else.
"""

from __future__ import annotations

from dataclasses import dataclass

from distaff.types import BoolArray, FinishReason, FloatArray, IntArray, Message, Tool


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


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class SampleTokens:
    """One token sequence for a trainer, L tokens long, not yet tied to a group."""

    token_ids: IntArray
    """int32 (L,)."""
    loss_mask: BoolArray
    """bool (L,): True exactly on completion ids of the steps in it."""
    logprobs: FloatArray | None
    """float32 (L,), 0.0 where the mask is False; None in SFT."""
