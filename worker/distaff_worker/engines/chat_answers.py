"""The many shapes of a chat API's answer, as one: an assistant message in the OpenAI shape, a reason, counts.

Invariant: what the model said is kept: text, refusal, thoughts, every tool call with its arguments as the model wrote them. An answer that
says nothing at all is an EngineAnswerError. Knows no provider by name.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass

import aiohttp
import pydantic_core

from distaff.errors import EngineAnswerError
from distaff.types import JSON, FinishReason, Message
from distaff_worker.engines import answers
from distaff_worker.engines.failures import PassingFailure, error_text, is_passing, refusal
from distaff_worker.engines.http import HttpPool, Reader, describe, read_body
from distaff_worker.engines.quirks import ReasoningField

UNNAMED = "unnamed_function"
"""For a call whose name is empty: the environment answers that it has no such tool, and APIs refuse an empty name in a conversation."""
_REASONS: Mapping[str, FinishReason] = {
    "complete": "stop",
    "completed": "stop",
    "finish_reason_unspecified": "none",
    "stop_token": "stop",
    "refusal": "stop",
    "max_output_tokens": "length",
    "max_completion_tokens": "length",
    "token_limit": "length",
    "model_context_window_exceeded": "length",
    "tool_call": "tool_calls",
    "safety": "abort",
    "recitation": "abort",
    "blocklist": "abort",
    "prohibited_content": "abort",
    "spii": "abort",
    "sensitive": "abort",
    "insufficient_system_resource": "abort",
    "network_error": "abort",
    "cancelled": "abort",
    "error": "abort",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    prompt_tokens: int
    completion_tokens: int
    given: bool


def reader(pool: HttpPool) -> Reader[bytes]:
    """Reads a body, and raises what an error inside one with status 200 would have raised with its own status."""

    async def read(response: aiohttp.ClientResponse) -> bytes:
        body = await read_body(response)
        if b'"error"' in body:
            _raise_error(body, pool, where=describe(response))
        return body

    return read


def _raise_error(body: bytes, pool: HttpPool, *, where: str) -> None:
    try:
        document = pydantic_core.from_json(body)
    except ValueError:
        return
    error = _error_in(document)
    if error is None:
        return
    code = error.get("code") if isinstance(error, dict) else None
    status = int(code) if isinstance(code, (int, str)) and str(code).isdigit() else 0
    text = pydantic_core.to_json({"error": error})
    if is_passing(status, text):
        reason = f"it answers with error {status}: {error_text(text, secrets=pool.secrets)}"
        raise PassingFailure(reason, sick=status >= 500)
    if 400 <= status < 500:
        raise refusal(status, text, where=f"{where},", key_var=pool.section.api_key_var, secrets=pool.secrets)
    raise EngineAnswerError(f"{where}: the answer is an error: {error_text(text, secrets=pool.secrets)}")


def _error_in(document: JSON) -> JSON:
    """An error in place of an answer, or of its only choice."""
    if not isinstance(document, dict):
        return None
    if document.get("error"):
        return document["error"]
    choices = document.get("choices")
    first = choices[0] if isinstance(choices, list) and choices else None
    return (first.get("error") or None) if isinstance(first, dict) else None


def finish_reason(value: JSON) -> FinishReason:
    """The API's word as ours; "none" for a missing or unknown one."""
    if not isinstance(value, str):
        return "none"
    word = value.strip().lower()
    return _REASONS.get(word) or answers.finish_reason(word)


def usage(document: Mapping[str, JSON]) -> Usage:
    """Counts by either of their names; 0 where there are none."""
    counts = document.get("usage")
    counts = counts if isinstance(counts, dict) else {}
    prompt, completion = (_count(counts, side) for side in (("prompt", "input"), ("completion", "output")))
    return Usage(prompt_tokens=prompt or 0, completion_tokens=completion or 0, given=completion is not None)


def _count(counts: Mapping[str, JSON], sides: tuple[str, str]) -> int | None:
    values = [counts.get(f"{side}_tokens") for side in sides]
    return next((value for value in values if isinstance(value, int) and value >= 0), None)


def reasoning_field(value: JSON) -> ReasoningField | None:
    """How a message gives the model's thoughts; None when it has none."""
    if not isinstance(value, dict):
        return None
    if isinstance(value.get("content"), list) and any(_thought(part) for part in value["content"]):
        return "parts"
    if value.get("reasoning_content"):
        return "reasoning_content"
    return "reasoning" if value.get("reasoning") or value.get("reasoning_details") else None


def assistant_message(value: JSON, *, where: str, calls_before: int = 0) -> Message:
    """The message of a choice: role, content (string or None) and, where there are any, reasoning_content and tool_calls.

    calls_before: tool calls of the conversation so far, for ids that an API leaves out.
    """
    if not isinstance(value, dict):
        raise EngineAnswerError(f"{where}: the answer has no message")
    content, thoughts = _text(value.get("content"), where=where)
    refused = value.get("refusal")
    if not content and isinstance(refused, str) and refused:
        content = refused
    message: Message = {"role": "assistant", "content": content}
    thoughts = thoughts or _thoughts(value)
    if thoughts:
        message["reasoning_content"] = thoughts
    calls = _tool_calls(value, where=where)
    if calls:
        message["tool_calls"] = _numbered(calls, calls_before)
    return message


def _thoughts(value: Mapping[str, JSON]) -> str:
    for name in ("reasoning_content", "reasoning"):
        text = value.get(name)
        if isinstance(text, str) and text:
            return text
    details = value.get("reasoning_details")
    parts = details if isinstance(details, list) else []
    return "".join(part["text"] for part in parts if isinstance(part, dict) and isinstance(part.get("text"), str))


def _text(content: JSON, *, where: str) -> tuple[str | None, str]:
    """(text, thoughts) of a content that is a string, null, or a list of parts."""
    if content is None or isinstance(content, str):
        return content, ""
    if not isinstance(content, list) or not all(isinstance(part, dict) for part in content):
        raise EngineAnswerError(f"{where}: content is neither text nor a list of parts")
    said = [part.get("text") or part.get("refusal") for part in content if not _thought(part)]
    return "".join(text for text in said if isinstance(text, str)), "".join(_thought(part) for part in content)


def _thought(part: JSON) -> str:
    """The text of a part that is a thought: a string, or parts again."""
    thinking = part.get("thinking") if isinstance(part, dict) else None
    if isinstance(thinking, list):
        texts = [inner.get("text") for inner in thinking if isinstance(inner, dict)]
        return "".join(text for text in texts if isinstance(text, str))
    return thinking if isinstance(thinking, str) else ""


def _tool_calls(value: Mapping[str, JSON], *, where: str) -> list[dict[str, JSON]]:
    calls = value.get("tool_calls")
    if not calls:
        legacy = value.get("function_call")
        calls = [{"function": legacy}] if isinstance(legacy, dict) and legacy else []
    if not isinstance(calls, list):
        raise EngineAnswerError(f"{where}: tool_calls is not a list")
    return [_tool_call(call, where=where) for call in calls]


def _tool_call(call: JSON, *, where: str) -> dict[str, JSON]:
    function = call.get("function") if isinstance(call, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(function, dict) or not isinstance(name, (str, type(None))):
        raise EngineAnswerError(f"{where}: a tool call without a function")
    return {
        "id": str(call.get("id") or ""),
        "type": "function",
        "function": {"name": (name or "").strip() or UNNAMED, "arguments": _arguments(function.get("arguments"))},
    }


def _arguments(value: JSON) -> str:
    """JSON text as the model wrote it; some servers have parsed it already."""
    if isinstance(value, str):
        return value or "{}"
    return "{}" if value is None else json.dumps(value, ensure_ascii=False)


def _numbered(calls: list[dict[str, JSON]], before: int) -> list[dict[str, JSON]]:
    """Each with an id that no other call of the message has; nine letters and digits, which every API takes back."""
    seen: set[str] = set()
    for n, call in enumerate(calls):
        if not call["id"] or call["id"] in seen:
            call["id"] = f"call{before + n:05d}"
        seen.add(call["id"])
    return calls
