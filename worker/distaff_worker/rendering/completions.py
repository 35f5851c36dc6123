"""Reads a sampled assistant turn: reasoning, tool calls, content.

Invariant: every character the model wrote ends up in one of the three; a malformed call comes back to the model, as a tool error or as
plain text. Model output is data: it goes through `json.loads` and nothing else.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence

from distaff.types import JSON, Message, Tool
from distaff_worker.rendering.encoding import encodable

_CALL = re.compile(r"<tool_call>(.*?)(?:</tool_call>|\Z)", re.DOTALL)
_NAME = re.compile(r'"name"\s*:\s*"([^"\\]{1,200})"')
_ARGUMENTS = re.compile(r'"(?:arguments|parameters)"\s*:\s*', re.DOTALL)
_JSON_NAME = re.compile(r'\s*{\s*"name"\s*:\s*"([^"\\]{1,200})"')
_OPEN, _CLOSE = "<think>", "</think>"


def split_reasoning(text: str, *, opened_by_prompt: bool) -> tuple[str | None, str]:
    """(reasoning or None, the rest) of a completion that may begin with a <think> block; one that is never closed is all reasoning."""
    body = text.lstrip()
    if body.startswith(_OPEN):
        body = body[len(_OPEN) :]
    elif not opened_by_prompt:
        return None, text
    reasoning, closed, rest = body.partition(_CLOSE)
    return reasoning.strip("\n"), rest.lstrip("\n") if closed else ""


def split_tool_calls(text: str, *, turn: int) -> tuple[str, list[JSON]]:
    """(content, tool calls) of hermes-style text: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`.

    A block that is not JSON but names a function is kept with its arguments as they stand; any other stays in the content.
    """
    calls: list[JSON] = []
    content: list[str] = []
    start = 0
    for match in _CALL.finditer(text):
        call = read_call(match[1], number=len(calls), turn=turn, closed=match[0].endswith("</tool_call>"))
        if call is not None:
            calls.append(call)
            content.append(text[start : match.start()])
            start = match.end()
    content.append(text[start:])
    if not calls:
        return text, []
    return "".join(part if part.strip() else "" for part in content).rstrip("\n"), calls


def read_call(raw: str, *, number: int, turn: int, closed: bool = True) -> JSON | None:
    """One tool call in the OpenAI shape, None when no function can be made out. An unclosed one must be whole JSON."""
    try:
        value = json.loads(raw)
    except (ValueError, RecursionError):
        return _malformed(raw, number=number, turn=turn) if closed else None
    if not isinstance(value, dict) or not isinstance(value.get("name"), str) or not value["name"]:
        return None
    return tool_call(value["name"], value.get("arguments", {}), number=number, turn=turn)


def tool_call(name: str, arguments: JSON, *, number: int, turn: int) -> JSON:
    """A tool call with the arguments as JSON text (text is passed on as it is)."""
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return {
        "id": call_id(turn, number),
        "type": "function",
        "function": {"name": encodable(name), "arguments": encodable(text)},
    }


def call_id(turn: int, number: int) -> str:
    """Nine letters and digits, which every template accepts, unique in a conversation of up to 1,000 turns."""
    return f"call{turn % 1000:03d}{number % 100:02d}"


def assistant_message(content: str, reasoning: str | None, calls: Sequence[JSON]) -> Message:
    """An assistant message without empty fields."""
    message: Message = {"role": "assistant", "content": content}
    if reasoning:
        message["reasoning_content"] = reasoning
    if calls:
        message["tool_calls"] = list(calls)
    return message


def _malformed(raw: str, *, number: int, turn: int) -> JSON | None:
    name = _NAME.search(raw)
    if name is None:
        return None
    arguments = _ARGUMENTS.search(raw)
    text = raw[arguments.end() :].strip().removesuffix("}").rstrip() if arguments else raw.strip()
    return tool_call(name[1], text, number=number, turn=turn)


def read_json_call(text: str, *, turn: int, tools: Sequence[Tool] = (), closed: bool = True) -> tuple[str, list[JSON]]:
    """(content, tool calls) of a completion that is one JSON object `{"name": ..., "parameters": {...}}` (Llama 3).

    One that is not JSON but begins as a call of one of `tools` is kept with its arguments as they stand, unless it was cut off (not closed).
    """
    raw = text.strip().removeprefix("<|python_tag|>")
    try:
        value = json.loads(raw)
    except (ValueError, RecursionError):
        call = _malformed_json_call(raw, tools, turn=turn) if closed else None
        return ("", [call]) if call else (text, [])
    if not isinstance(value, dict) or not isinstance(value.get("name"), str) or not value["name"]:
        return text, []
    return "", [tool_call(value["name"], value.get("parameters", value.get("arguments", {})), number=0, turn=turn)]


def _malformed_json_call(raw: str, tools: Sequence[Tool], *, turn: int) -> JSON | None:
    name = _JSON_NAME.match(raw)
    if name is None or name[1] not in {(tool.get("function") or {}).get("name") for tool in tools}:
        return None
    return _malformed(raw, number=0, turn=turn)
