"""Brings messages into the shape chat templates expect.

Invariant: nothing is lost silently: what a text template cannot hold is a TokenizationError. Never changes its input.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from distaff.errors import TokenizationError
from distaff.types import JSON, Message
from distaff_worker.images import NOT_TEXT, is_text


def prepare(messages: Sequence[Message], *, inline_reasoning: bool = False) -> list[dict[str, Any]]:
    """Copies with text content ("" for none), tool-call arguments as objects where they are JSON, and no null fields.

    inline_reasoning: put reasoning into the content as a <think> block, for templates that do not know the field.
    """
    names = tool_names(messages)
    return [_prepare(message, names, inline_reasoning=inline_reasoning) for message in messages]


def _prepare(message: Message, names: dict[str, str], *, inline_reasoning: bool) -> dict[str, Any]:
    ready = {key: value for key, value in message.items() if value is not None}
    ready["content"] = content_text(message.get("content"))
    if calls := message.get("tool_calls"):
        ready["tool_calls"] = [_call_with_object(call) for call in calls]
    else:
        ready.pop("tool_calls", None)
    if message.get("role") == "tool" and "name" not in ready and (name := names.get(str(message.get("tool_call_id")))):
        ready["name"] = name
    if inline_reasoning and (reasoning := ready.pop("reasoning_content", "")):
        ready["content"] = f"{think_block(reasoning)}{ready['content']}"
    return ready


def content_text(content: JSON) -> str:
    """The text of a message's content; raises TokenizationError for parts that are not text."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if isinstance(content, list) and is_text(content):
        return "".join(str(part.get("text", "")) for part in content)
    raise TokenizationError(NOT_TEXT)


def think_block(reasoning: str) -> str:
    """Reasoning in the form most reasoning models write it."""
    return f"<think>\n{reasoning.strip(chr(10))}\n</think>\n\n"


def tool_names(messages: Sequence[Message]) -> dict[str, str]:
    """Tool-call id -> name of the function, over all assistant messages."""
    calls = [call for message in messages for call in message.get("tool_calls") or []]
    return {str(call.get("id")): str((call.get("function") or {}).get("name", "")) for call in calls}


def _call_with_object(call: JSON) -> JSON:
    function = dict(call.get("function") or {})
    function["arguments"] = _object(function.get("arguments"))
    return {**call, "type": "function", "function": function}


def _object(arguments: JSON) -> JSON:
    """Templates that walk over arguments need an object, those that print them accept text."""
    if not isinstance(arguments, str):
        return {} if arguments is None else arguments
    if not arguments.strip():
        return {}
    try:
        value = json.loads(arguments)
    except (ValueError, RecursionError):
        return arguments
    return value if isinstance(value, dict) else arguments
