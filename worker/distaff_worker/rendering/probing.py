"""Finds out what a chat template does, by letting it write conversations of one's own.

Invariant: everything is read off what the template writes around marks and names no message contains; nothing is concluded from the model's name.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from distaff.errors import ConfigurationError
from distaff.types import JSON, Message, Tool
from distaff_worker.rendering.encoding import TextEncoder

Write = Callable[[Sequence[Message], Sequence[Tool], bool], str | None]
"""(messages, tools, with a generation prompt) -> the template's text, None when it refuses."""
CallStyle = Literal["hermes", "json", "none"]
MARK = "ENDOFTURN"

_TOOL: Tool = {
    "type": "function",
    "function": {
        "name": "probe_tool",
        "description": "probe",
        "parameters": {"type": "object", "properties": {"probe_argument": {"type": "string"}}},
    },
}
_USER: Message = {"role": "user", "content": "probe"}
_RESULT: Message = {"role": "tool", "tool_call_id": "call00000", "name": "probe_tool", "content": "1"}
_CALL = re.compile(
    r"(<tool_call>)?\s*{\s*\"name\":\s*\"probe_tool\",\s*\"(arguments|parameters)\":\s*{\s*\"probe_argument\""
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Traits:
    """What a template does."""

    closing_id: int | None
    """The special token behind an answer that ends the conversation; None when there is none."""
    closing_in_history: int | None
    """The one behind an answer that is followed by something."""
    closing_of_calls: int | None
    """The one behind tool calls."""
    has_tools: bool
    """It shows tool definitions."""
    call_style: CallStyle
    """How it writes tool calls, which is how the model was taught to."""
    calls_shown: int | None
    """How many tool calls of one message it shows; None where it shows all, or refuses itself what it cannot show."""
    opening: str
    """What it writes to open a turn of the model."""


def probe(write: Write, *, tokenizer: Any, encoder: TextEncoder, name: str) -> Traits:
    """Raises ConfigurationError when the template cannot even render a user and an assistant message."""
    added = tokenizer.added_tokens_decoder
    special = {*tokenizer.all_special_ids, *(number for number, token in added.items() if token.special)}
    closing_id = _first(encoder.encode_whole(_behind_answer(write, name)), {*special, *added})
    followed = write([_USER, {"role": "assistant", "content": MARK}, _USER], [], False)
    in_history = _first(encoder.encode_whole(_after(MARK, followed)), {*special, *added})
    with_call = write([_USER, _calling("probe_tool")], [_TOOL], False)
    has_tools = write([_USER], [_TOOL], True) != write([_USER], [], True)
    closed, opened = (write([_USER], [], opens) or "" for opens in (False, True))
    return Traits(
        closing_id=closing_id,
        closing_in_history=in_history if closing_id is not None else None,
        closing_of_calls=_first(encoder.encode_whole(_after("probe_argument", with_call))[::-1], special),
        has_tools=has_tools,
        call_style=_call_style(write) if has_tools else "none",
        calls_shown=_calls_shown(write),
        opening=opened[common_length(closed, opened) :],
    )


def common_length(a: str, b: str) -> int:
    """Length of the common prefix."""
    if b.startswith(a):
        return len(a)
    return next((at for at, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def _behind_answer(write: Write, name: str) -> str:
    text = write([_USER, {"role": "assistant", "content": MARK}], [], False)
    if text is None or MARK not in text:
        raise ConfigurationError(
            f"the chat template of {name} cannot render a user message and an answer: give tokenizer.chat_template"
        )
    return _after(MARK, text)


def _call_style(write: Write) -> CallStyle:
    call = _CALL.search(write([_USER, _calling("probe_tool"), _RESULT], [_TOOL], True) or "")
    if call is None:
        return "none"
    return "hermes" if call[1] else "json"


def _calls_shown(write: Write) -> int | None:
    one = write([_USER, _calling("second_probe")], [_TOOL], False)
    if one is not None and "second_probe" not in one:
        return 0
    two = write([_USER, _calling("probe_tool", "second_probe")], [_TOOL], False)
    return 1 if two is not None and "second_probe" not in two else None


def _calling(*names: str) -> Message:
    calls: list[JSON] = [
        {
            "id": f"call{number:05d}",
            "type": "function",
            "function": {"name": name, "arguments": '{"probe_argument": "x"}'},
        }
        for number, name in enumerate(names)
    ]
    return {"role": "assistant", "content": "", "tool_calls": calls}


def _after(mark: str, text: str | None) -> str:
    return text[text.rindex(mark) + len(mark) :] if text and mark in text else ""


def _first(ids: Sequence[int], wanted: set[int]) -> int | None:
    return next((token for token in ids if token in wanted), None)
