"""One model turn as the capture object of a rollout keeps it, and the training sequences made of such turns.

Invariant: a step is written by the ChatModel that sampled it and by nobody else.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from distaff.types import BoolArray, FinishReason, FloatArray, IntArray, Message, Tool

PrefixBreak = Literal["messages_changed", "tools_changed", "format_not_continued"]
"""Why a prompt does not extend the tokens of an earlier turn: the environment changed what was said, or the tools, or the chat
format has no way to go on behind an answer."""


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
    broken_by: PrefixBreak | None = None
    """Why it does not, although there was a turn before."""


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
