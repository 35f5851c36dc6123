"""A real small tokenizer (SmolLM2's) in several chat formats, a slow reference for SFT masks, and conversations."""

from __future__ import annotations

import copy
import functools
import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from distaff.types import Message, Tool
from distaff_worker.demo_engine.gguf_tokenizer import demo_tokenizer_dir
from distaff_worker.rendering.template_backend import TemplateRenderer
from distaff_worker.steps import ChatStep

TEMPLATES = Path(__file__).parent / "templates"
STYLES = {
    "smollm2": (),
    "qwen3_style": ("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"),
    "llama3_style": ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
    "r1_style": ("<think>", "</think>", "<|user|>", "<|assistant|>", "<|system|>", "<|end_of_text|>"),
}
ENDS = {
    "smollm2": "<|im_end|>",
    "qwen3_style": "<|im_end|>",
    "llama3_style": "<|eot_id|>",
    "r1_style": "<|end_of_text|>",
}
ADD: Tool = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Adds two numbers.",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}},
    },
}


@functools.cache
def smollm2_folder() -> str:
    """Folder of SmolLM2's tokenizer with its own template."""
    return str(demo_tokenizer_dir(Path(tempfile.gettempdir()) / "distaff-test-tokenizers"))


@functools.cache
def tokenizer(style: str) -> Any:
    """SmolLM2's tokenizer with the special tokens and the template of a chat format. Not to be changed."""
    from transformers import AddedToken, AutoTokenizer

    made = AutoTokenizer.from_pretrained(smollm2_folder())
    special = [token for token in STYLES[style] if token.startswith("<|")]
    plain = [token for token in STYLES[style] if not token.startswith("<|")]
    made.add_tokens([AddedToken(token, special=True, normalized=False) for token in special], special_tokens=True)
    made.add_tokens([AddedToken(token, special=False, normalized=False) for token in plain])
    if style != "smollm2":
        made.chat_template = (TEMPLATES / f"{style}.jinja").read_text(encoding="utf-8")
        made.eos_token = ENDS[style]
        made.unk_token = None
    return made


@functools.cache
def renderer(style: str) -> TemplateRenderer:
    made = tokenizer(style)
    return TemplateRenderer(made, name=style, vocab_size=len(made))


def user(text: str) -> Message:
    return {"role": "user", "content": text}


def assistant(
    text: str | None, *, reasoning: str = "", calls: Sequence[tuple[str, str]] = (), turn: int = 0
) -> Message:
    """calls: (name, arguments as JSON text)."""
    message: Message = {"role": "assistant", "content": text}
    if reasoning:
        message["reasoning_content"] = reasoning
    if calls:
        message["tool_calls"] = [
            {"id": f"call{turn:03d}{n:02d}", "type": "function", "function": {"name": name, "arguments": arguments}}
            for n, (name, arguments) in enumerate(calls)
        ]
    return message


def tool_result(text: str, *, turn: int = 0, number: int = 0) -> Message:
    return {"role": "tool", "tool_call_id": f"call{turn:03d}{number:02d}", "content": text}


def chat_steps(messages: Sequence[Message], tools: Sequence[Tool] = (), *, finish: str = "stop") -> list[ChatStep]:
    """One step for each assistant message, as an API would have given it. finish: of the last one."""
    turns = [at for at, message in enumerate(messages) if message["role"] == "assistant"]
    return [
        ChatStep(
            prompt=list(messages[:at]),
            tools=list(tools),
            completion=messages[at],
            finish_reason=finish if at == turns[-1] else "stop",  # type: ignore[arg-type]
            prompt_tokens=0,
            completion_tokens=0,
        )
        for at in turns
    ]


def slow_reference(steps: Sequence[ChatStep], style: str) -> list[tuple[list[int], list[bool]]]:
    """(ids, mask) of each sample, by rendering every prefix anew with `apply_chat_template` and comparing token by token."""
    samples: list[tuple[list[int], list[bool]]] = []
    for step in steps:
        prompt = _ids(step.prompt, step, style, generation_prompt=True)
        closed = _ids([*step.prompt, step.completion], step, style, generation_prompt=False)
        if style == "qwen3_style" and not step.completion.get("reasoning_content"):
            # The template writes an empty thought before the answer; the model did not.
            text = tokenizer(style).decode(prompt) + "<think>\n\n</think>\n\n"
            prompt = tokenizer(style).encode(text, add_special_tokens=False)
        start = 0
        while start < min(len(prompt), len(closed)) and prompt[start] == closed[start]:
            start += 1
        end = tokenizer(style).convert_tokens_to_ids(ENDS[style])
        stop = len(closed) - closed[::-1].index(end) - (1 if step.finish_reason == "length" else 0)
        if stop > start:
            _join(samples, closed[:start], closed[start:stop])
    return samples


def _join(samples: list[tuple[list[int], list[bool]]], prompt: list[int], completion: list[int]) -> None:
    fitting = [one for one in samples if prompt[: len(one[0])] == one[0]]
    ids, mask = max(fitting, key=lambda one: len(one[0])) if fitting else ([], [])
    if not fitting:
        samples.append((ids, mask))
    mask += [False] * (len(prompt) - len(ids)) + [True] * len(completion)
    ids += prompt[len(ids) :] + completion


def _ids(messages: Sequence[Message], step: ChatStep, style: str, *, generation_prompt: bool) -> list[int]:
    ready = [_plain(message, style) for message in messages]
    return list(
        tokenizer(style).apply_chat_template(
            ready, tools=step.tools or None, add_generation_prompt=generation_prompt, return_dict=False
        )
    )


def _plain(message: Message, style: str) -> Message:
    """What the format's documentation asks for: text, argument objects, and thinking inside the content where there is no field."""
    ready = copy.deepcopy(message)
    ready["content"] = ready.get("content") or ""
    for call in ready.get("tool_calls", []):
        call["function"]["arguments"] = json.loads(call["function"]["arguments"])
    if style in ("smollm2", "llama3_style") and ready.get("reasoning_content"):
        ready["content"] = f"<think>\n{ready.pop('reasoning_content')}\n</think>\n\n{ready['content']}"
    return ready
