"""Finds out which earlier turn a conversation continues.

Invariant: a turn is continued only when the messages before it are the ones its prompt was made of and its answer is the one the model gave; an
environment that rewrites history gets a prompt rendered anew.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from distaff.types import JSON, Message, Tool
from distaff_worker.steps import PrefixBreak, TokenStep


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Turn:
    """One answer with what it was an answer to."""

    messages: list[Message]
    tools: list[Tool]
    answer: Message
    step: TokenStep


def continued(turns: Sequence[Turn], messages: Sequence[Message], tools: Sequence[Tool]) -> Turn | None:
    """The turn with the longest conversation that `messages` continues by at least one message."""
    shorter = [turn for turn in turns if len(turn.messages) + 1 < len(messages)]
    by_length = sorted(shorter, key=lambda turn: len(turn.messages), reverse=True)
    return next((turn for turn in by_length if _continues(turn, messages, tools)), None)


def why_not_continued(turns: Sequence[Turn], messages: Sequence[Message]) -> PrefixBreak:
    """What keeps `messages` from continuing any of the turns."""
    longer = [turn for turn in turns if len(turn.messages) + 1 < len(messages)]
    return "tools_changed" if any(_continues(turn, messages, turn.tools) for turn in longer) else "messages_changed"


def _continues(turn: Turn, messages: Sequence[Message], tools: Sequence[Tool]) -> bool:
    at = len(turn.messages)
    return (
        same_answer(turn.answer, messages[at])
        and turn.tools == tools
        and all(same_message(old, new) for old, new in zip(turn.messages, messages, strict=False))
    )


def same_message(a: Message, b: Message) -> bool:
    """Equal but for the ways an environment may write "nothing" and for fields that no template shows."""
    return a is b or (_essence(a) == _essence(b) and (a.get("content") or "") == (b.get("content") or ""))


def same_answer(sampled: Message, returned: Message) -> bool:
    """`returned` is what the model sampled, up to whitespace at its ends; environments may drop the reasoning."""
    if returned.get("role") != "assistant" or _calls(sampled) != _calls(returned):
        return False
    a, b = sampled.get("content") or "", returned.get("content") or ""
    return a == b or (isinstance(a, str) and isinstance(b, str) and a.strip() == b.strip())


def _essence(message: Message) -> JSON:
    reasoning = message.get("reasoning_content") or ""
    return (message.get("role"), message.get("tool_call_id"), reasoning, _calls(message))


def _calls(message: Message) -> JSON:
    functions = [call.get("function") or {} for call in message.get("tool_calls") or []]
    return [(function.get("name"), function.get("arguments")) for function in functions]
