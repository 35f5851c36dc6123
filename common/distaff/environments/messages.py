"""Messages between verifiers' flat shape and the OpenAI shape.

Invariant: what the model said goes back to it as the very message it gave, as long as the environment left it alone.
Never imports verifiers: it sees the libraries' message objects through `model_dump` only.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

from distaff.types import JSON, Message, Tool

_NOT_SAMPLING = ("n", "extra_body", "messages", "tools", "model", "stream")


def openai_message(message: Any) -> Message:
    """`message` (a mapping or a pydantic message of either API) in the OpenAI shape, without empty fields."""
    raw = message if isinstance(message, Mapping) else message.model_dump(exclude_none=True)
    fields = {key: value for key, value in raw.items() if value is not None}
    if fields.get("role") == "text":  # a plain string prompt
        fields["role"] = "user"
    if fields.get("role") == "assistant":
        fields.setdefault("content", None)
        calls = fields.pop("tool_calls", None)
        if calls:
            fields["tool_calls"] = [_openai_call(call) for call in calls]
    return fields


def _openai_call(call: Any) -> dict[str, JSON]:
    raw = call if isinstance(call, Mapping) else call.model_dump(exclude_none=True)
    function = raw.get("function") or raw
    return {
        "id": raw["id"],
        "type": "function",
        "function": {"name": function["name"], "arguments": function["arguments"]},
    }


def openai_tool(tool: Any) -> Tool:
    """A tool definition of verifiers in the OpenAI shape."""
    return {"type": "function", "function": tool.model_dump(exclude_none=True)}


def flat_calls(message: Message) -> list[dict[str, str]]:
    """The tool calls of an OpenAI assistant message in verifiers' flat shape: id, name, arguments (a JSON string)."""
    calls = message.get("tool_calls") or []
    return [
        {
            "id": call.get("id") or f"call_{i}",
            "name": call["function"]["name"],
            "arguments": _text(call["function"].get("arguments") or "{}"),
        }
        for i, call in enumerate(calls)
    ]


def _text(arguments: JSON) -> str:
    return arguments if isinstance(arguments, str) else json.dumps(arguments)


def flat_sampling(args: Mapping[str, Any]) -> dict[str, JSON]:
    """What an environment sets for itself, flat and under the names our engines use; verifiers' own defaults left out."""
    given = {key: value for key, value in args.items() if value is not None and key not in _NOT_SAMPLING}
    flat = {**{key: value for key, value in (args.get("extra_body") or {}).items() if value is not None}, **given}
    if "max_completion_tokens" in flat:
        flat.setdefault("max_tokens", flat["max_completion_tokens"])
        del flat["max_completion_tokens"]
    return flat


class Recall:
    """The assistant messages one model gave, found again by what they say."""

    def __init__(self) -> None:
        self._said: dict[str, Message] = {}

    def remember(self, message: Message) -> None:
        self._said[_essence(message)] = message

    def openai(self, messages: Iterable[Any]) -> list[Message]:
        """`messages` in the OpenAI shape, those of the model as it gave them."""
        return [self._original(openai_message(message)) for message in messages]

    def _original(self, message: Message) -> Message:
        return self._said.get(_essence(message), message) if message.get("role") == "assistant" else message


def _essence(message: Message) -> str:
    calls = [[call["id"], call["name"], call["arguments"]] for call in flat_calls(message)]
    return json.dumps([message.get("content") or "", message.get("reasoning_content") or "", calls])
