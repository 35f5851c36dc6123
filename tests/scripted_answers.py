"""What the scripted engine is asked and answers, and how an answer looks on each route's wire.

Invariant: rendering is a pure function of the answer; malformed answers are made here on purpose, by the caller's fields.
"""

from __future__ import annotations

import functools
import itertools
import json
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

JSON = Any
GENERATION_ROUTES = ("/inference/v1/generate", "/v1/completions", "/generate", "/completion", "/v1/chat/completions")


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """One generation request as it arrived."""

    number: int
    """0, 1, 2, ... in order of arrival, over all generation routes."""
    path: str
    headers: dict[str, str]
    """Lower-case names."""
    body: dict[str, JSON]

    @property
    def prompt_ids(self) -> list[int]:
        """Of the token routes; empty on chat."""
        return list(self.body.get("token_ids") or self.body.get("input_ids") or self.body.get("prompt") or [])

    @property
    def messages(self) -> list[dict[str, JSON]]:
        """Of the chat route; empty on the token routes."""
        return list(self.body.get("messages") or [])

    @property
    def sampling(self) -> dict[str, JSON]:
        """The sampling parameters wherever the route keeps them."""
        return dict(self.body.get("sampling_params") or self.body)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Answer:
    """A good answer, or one that is bad inside; rendered for whichever route was asked."""

    token_ids: list[int] = field(default_factory=lambda: [5, 6, 7, 2])
    logprobs: list[float] | None = None
    """-0.25 for each token when None; another length, nan or -inf make a malformed answer."""
    finish_reason: str | None = "stop"
    text: str | None = "ok"
    """`content` on the chat route."""
    reasoning: str | None = None
    reasoning_field: str = "reasoning_content"
    tool_calls: list[dict[str, JSON]] | None = None
    """[{"id", "type": "function", "function": {"name", "arguments"}}]."""
    model: str | None = None
    """Name in the answer; the served one when None."""
    usage: bool = True
    prompt_tokens: int = 10
    policy_version: str = ""
    predicted: int | None = None
    """llama.cpp's own count of sampled tokens; the number of ids when None."""
    mangle: Callable[[dict[str, JSON]], JSON] | None = None
    """Last change to the rendered body (to each event on a stream)."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Fault:
    """Anything but a good answer."""

    status: int = 200
    headers: Mapping[str, str] = field(default_factory=dict)
    body: bytes = b""
    hang: str = ""
    """"" | "accept" (never answers) | "headers" (after the headers) | "drip" (one byte of the body each `drip_s`, for ever)
    | "stall" (sends the body and nothing more, not even the end) | "reset" (closes the connection without an answer) | "cut" (closes it in the middle of the body)."""
    drip_s: float = 0.05


Reply = Answer | Fault
Script = Callable[[Ask], Reply | Awaitable[Reply]]


def status(code: int, message: str = "scripted", **headers: str) -> Fault:
    """An error answer in the OpenAI shape; header names with _ for -: `status(429, retry_after="1")`."""
    error = {"error": {"message": message, "type": "scripted", "code": code}}
    return Fault(
        status=code,
        headers={"Content-Type": "application/json", **{k.replace("_", "-"): v for k, v in headers.items()}},
        body=json.dumps(error).encode(),
    )


@functools.lru_cache(maxsize=64)
def render(answer: Answer, path: str, model: str, prompt: tuple[int, ...] = (1, 2, 3)) -> bytes:
    """The body of `answer` on `path`. Cached by the identity of `answer`, so a constant script costs nothing.

    prompt: repeated, or its length, where the route does that.
    """
    name = answer.model or model
    match path:
        case "/v1/completions":
            body = _vllm_completions(answer, name, prompt)
        case "/generate":
            body = _sglang(answer, prompt)
        case _:
            shapes = {"/inference/v1/generate": _vllm, "/completion": _llamacpp, "/v1/chat/completions": _chat}
            body = shapes[path](answer, name)
    return json.dumps(answer.mangle(body) if answer.mangle else body).encode()


@functools.lru_cache(maxsize=64)
def render_stream(answer: Answer, model: str) -> list[bytes]:
    """The events of `answer` as llama.cpp streams them."""
    events = _llamacpp_events(answer, answer.model or model)
    mangled = [answer.mangle(event) for event in events] if answer.mangle else events
    return [b"data: " + json.dumps(event).encode() + b"\n\n" for event in mangled if event is not None]


def logprobs_of(answer: Answer) -> list[float]:
    return [-0.25] * len(answer.token_ids) if answer.logprobs is None else answer.logprobs


def _vllm(answer: Answer, model: str) -> dict[str, JSON]:
    content: list[JSON] = [
        {"token_id": token, "logprob": logprob, "rank": 1, "top_logprobs": []}
        for token, logprob in itertools.zip_longest(answer.token_ids, logprobs_of(answer), fillvalue=0)
    ][: len(logprobs_of(answer))]
    spans = [{"version": answer.policy_version, "start": 0, "end": len(answer.token_ids)}]
    choice = {
        "index": 0,
        "finish_reason": answer.finish_reason,
        "stop_reason": None,
        "token_ids": answer.token_ids,
        "logprobs": {"content": content},
        "weight_versions": spans if answer.policy_version else None,
    }
    return {"request_id": "generate-0", "model": model, "created": 0, "choices": [choice]}


def _vllm_completions(answer: Answer, model: str, prompt: tuple[int, ...]) -> dict[str, JSON]:
    """vLLM's OpenAI route as it answers return_token_ids and return_tokens_as_token_ids."""
    logprobs = logprobs_of(answer)
    named = [f"token_id:{token}" for token in answer.token_ids]
    choice = {
        "index": 0,
        "text": answer.text,
        "logprobs": {
            "text_offset": list(range(len(logprobs))),
            "token_logprobs": logprobs,
            "tokens": named,
            "top_logprobs": [{name: logprob} for name, logprob in zip(named, logprobs, strict=False)],
        },
        "finish_reason": answer.finish_reason,
        "stop_reason": None,
        "token_ids": answer.token_ids,
        "prompt_logprobs": None,
        "prompt_token_ids": list(prompt),
    }
    usage = {"prompt_tokens": len(prompt), "completion_tokens": len(answer.token_ids)}
    return {"id": "cmpl-0", "object": "text_completion", "model": model, "choices": [choice], "usage": usage}


def _sglang(answer: Answer, prompt: tuple[int, ...]) -> dict[str, JSON]:
    """SGLang's native route, made from its documented format; never compared with a running server."""
    logprobs = logprobs_of(answer)
    count = len(answer.token_ids)
    pairs = itertools.zip_longest(logprobs, answer.token_ids[: len(logprobs)], fillvalue=0)
    reasons: dict[str | None, JSON] = {
        "stop": {"type": "stop", "matched": answer.token_ids[-1] if answer.token_ids else None},
        "length": {"type": "length", "length": count},
        "abort": {"type": "abort", "message": "aborted", "status_code": None, "err_type": None},
    }
    versions = answer.policy_version.split(">")
    share = max(1, count // len(versions))
    edges = [n * share for n in range(len(versions))] + [count]
    meta = {
        "id": "0" * 32,
        "finish_reason": reasons.get(answer.finish_reason),
        "prompt_tokens": len(prompt),
        "weight_version": versions[-1] or "default",
        "weight_versions": [
            {"version": version or "default", "start": start, "end": end}
            for version, start, end in zip(versions, edges, edges[1:], strict=False)
        ],
        "num_retractions": 0,
        "completion_tokens": count,
        "cached_tokens": 0,
        "input_token_logprobs": [],
        "output_token_logprobs": [[logprob, token, None] for logprob, token in pairs],
        "output_token_logprobs_length": len(logprobs),
        "e2e_latency": 0.25,
    }
    return {"text": answer.text, "output_ids": answer.token_ids, "meta_info": meta}


def _probabilities(answer: Answer) -> list[dict[str, JSON]]:
    pairs = itertools.zip_longest(answer.token_ids, logprobs_of(answer), fillvalue=0)
    return [{"id": i, "token": f"t{i}", "bytes": [], "logprob": p, "top_logprobs": []} for i, p in pairs][
        : len(logprobs_of(answer))
    ]


def _llamacpp_end(answer: Answer, model: str) -> dict[str, JSON]:
    return {
        "index": 0,
        "content": "",
        "tokens": [],
        "stop": True,
        "model": model,
        "tokens_predicted": len(answer.token_ids) if answer.predicted is None else answer.predicted,
        "tokens_evaluated": answer.prompt_tokens,
        "truncated": False,
        "stop_type": {"stop": "eos", "length": "limit"}.get(answer.finish_reason or "", "none"),
        "stopping_word": "",
    }


def _llamacpp(answer: Answer, model: str) -> dict[str, JSON]:
    full = {"tokens": answer.token_ids, "completion_probabilities": _probabilities(answer)}
    return _llamacpp_end(answer, model) | full


def _llamacpp_events(answer: Answer, model: str) -> list[dict[str, JSON]]:
    events: list[dict[str, JSON]] = []
    for n, (token, entry) in enumerate(itertools.zip_longest(answer.token_ids, _probabilities(answer))):
        event = {"index": 0, "content": "x", "tokens": [] if token is None else [token], "stop": False}
        events.append(event | {"tokens_predicted": n + 1, "completion_probabilities": [entry] if entry else []})
    return [*events, _llamacpp_end(answer, model)]


def _chat(answer: Answer, model: str) -> dict[str, JSON]:
    message: dict[str, JSON] = {"role": "assistant", "content": answer.text}
    if answer.reasoning is not None:
        message[answer.reasoning_field] = answer.reasoning
    if answer.tool_calls is not None:
        message["tool_calls"] = answer.tool_calls
    body: dict[str, JSON] = {
        "id": "chatcmpl-0",
        "object": "chat.completion",
        "created": 0,
        "model": model,
        "choices": [{"index": 0, "message": message, "finish_reason": answer.finish_reason, "logprobs": None}],
    }
    if answer.usage:
        completion = len(answer.token_ids)
        body["usage"] = {
            "prompt_tokens": answer.prompt_tokens,
            "completion_tokens": completion,
            "total_tokens": answer.prompt_tokens + completion,
        }
    return body


DEFAULT_ANSWER = Answer()
