"""Reads and prepares turns of gpt-oss's format, in which reasoning, calls and answers are messages on channels of their own.

Invariant: every character the model wrote ends up in the reasoning, a call or the content; a call without a name or one that was cut stays in the
content. Model output is data: nothing in it is evaluated. Format: OpenAI's harmony guide.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

from distaff.types import JSON
from distaff_worker.rendering.completions import tool_call

_BLOCK = re.compile(r"(.*?)<\|message\|>(.*?)(?:<\|end\|>|(?=<\|start\|>|<\|channel\|>)|\Z)", re.DOTALL)
_CHANNEL = re.compile(r"<\|channel\|>\s*(analysis|commentary|final)\b")
_RECIPIENT = re.compile(r"to=functions\.([^\s<]+)")
_HEADER = re.compile(rf"<\|start\|>\s*assistant\b|{_CHANNEL.pattern}|{_RECIPIENT.pattern}|<\|constrain\|>|\bjson\b")
"""What a header is made of; anything else in it is text."""


def is_harmony(template: str) -> bool:
    """The template writes channels."""
    return "<|channel|>" in template and "<|message|>" in template


def split_harmony(text: str, *, turn: int, with_tools: bool, closed: bool) -> tuple[str, str | None, list[JSON]]:
    """(content, reasoning or None, tool calls) of a completion without its stop token.

    closed: the stop token was sampled; a call that was cut off is one only if its arguments are whole.
    """
    reasoning: list[str] = []
    content: list[str] = []
    calls: list[JSON] = []
    end = 0
    for block in _BLOCK.finditer(text):
        header, body, end = block[1], block[2], block.end()
        channel, recipient = _CHANNEL.search(header), _RECIPIENT.search(header)
        content.append(_HEADER.sub("", header).strip())
        if recipient and with_tools and (closed or end < len(text) or _is_json(body)):
            calls.append(tool_call(recipient[1], body, number=len(calls), turn=turn))
        elif recipient:
            content.append(f"to=functions.{recipient[1]} {body}")
        elif channel and channel[1] == "analysis":
            reasoning.append(body)
        else:
            content.append(body)
    content.append(text[end:])
    return "\n".join(filter(None, content)), "\n".join(filter(None, reasoning)) or None, calls


def in_fields(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Messages as gpt-oss's template reads them: reasoning as `thinking`, and before a call reasoning and content as one."""
    return [_in_fields(message) for message in messages]


def _in_fields(message: dict[str, Any]) -> dict[str, Any]:
    reasoning = message.get("reasoning_content")
    if not reasoning:
        return message
    if message.get("tool_calls") and message.get("content"):
        reasoning = f"{reasoning}\n\n{message['content']}"
        message = {**message, "content": ""}
    return {**message, "reasoning_content": reasoning, "thinking": reasoning}


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True
