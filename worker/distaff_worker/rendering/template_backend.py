"""Renders with the tokenizer's own chat template, whatever it is.

Invariant: ids equal what `apply_chat_template` gives for the same messages. A bridge takes from the template only the text after the end of
the assistant turn, and that end is found by a mark put into the turn's place, never by looking for the model's words.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

from jinja2 import TemplateError

from distaff.errors import ConfigurationError, TokenizationError
from distaff.types import Message, Tool
from distaff_worker.rendering.completions import (
    assistant_message,
    read_json_call,
    split_reasoning,
    split_tool_calls,
)
from distaff_worker.rendering.encoding import TextEncoder
from distaff_worker.rendering.messages import prepare, think_block
from distaff_worker.steps import TokenStep

_TEMPLATE_FAILURES = (TemplateError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError)
_PROBE_TOOL: Tool = {
    "type": "function",
    "function": {
        "name": "probe_tool",
        "description": "probe",
        "parameters": {"type": "object", "properties": {"probe_argument": {"type": "string"}}},
    },
}
_PROBE_CALL: Message = {
    "role": "assistant",
    "content": "",
    "tool_calls": [
        {
            "id": "call00000",
            "type": "function",
            "function": {"name": "probe_tool", "arguments": '{"probe_argument": "x"}'},
        }
    ],
}
_USER: Message = {"role": "user", "content": "probe"}
_MARK = "ENDOFTURN"
_END_NAMES = {"<|im_end|>", "<|endoftext|>", "<|eot_id|>", "<|eom_id|>", "<|end_of_text|>", "<end_of_turn>"}


class TemplateRenderer:
    """A tokenizer with a Jinja chat template, as a Renderer."""

    kind = "template"

    def __init__(self, tokenizer: Any, *, name: str, vocab_size: int, stop_ids: Sequence[int] = ()) -> None:
        """stop_ids: further tokens the model's generation settings name as ends.

        Raises ConfigurationError when the template cannot even render a user and an assistant message.
        """
        self._tokenizer = tokenizer
        self._encoder = TextEncoder(tokenizer)
        self.name = name
        self.vocab_size = vocab_size
        self._last_prompt: tuple[tuple[list[Message], list[Tool]], str] | None = None
        self._knows_reasoning = "reasoning_content" in _template_text(tokenizer)
        self._closing_id = self._find_closing_token()
        self.stop_ids = end_tokens(tokenizer, also=[*stop_ids, self._closing_id])
        self._stop_texts = [text for text in map(tokenizer.convert_ids_to_tokens, sorted(self.stop_ids)) if text]
        self._has_tools = self._probe([_USER], [_PROBE_TOOL]) != self._probe([_USER], [])
        self._call_style = self._find_call_style()

    def render(self, messages: Sequence[Message], tools: Sequence[Tool]) -> list[int]:
        return self._encoder.encode(self._prompt_text(messages, tools))

    def render_closed(self, messages: Sequence[Message], tools: Sequence[Tool]) -> list[int]:
        text = self._text(messages, tools, generation_prompt=False)
        reasoning = str(messages[-1].get("reasoning_content") or "").strip()
        return self._encoder.encode(self._with_reasoning(reasoning, messages, tools, text) if reasoning else text)

    def bridge(
        self,
        previous: TokenStep,
        previous_messages: Sequence[Message],
        new_messages: Sequence[Message],
        tools: Sequence[Tool],
    ) -> list[int] | None:
        if self._closing_id is None or any(message.get("role") == "assistant" for message in new_messages):
            return None
        added = self._text_after_turn(previous_messages, new_messages, tools)
        if added is None:
            return None
        before = previous.prompt_ids + previous.completion_ids
        ended = bool(previous.completion_ids) and previous.completion_ids[-1] in self.stop_ids
        return [*before, *([] if ended else [self._closing_id]), *self._encoder.encode(added)]

    def parse(
        self, completion_ids: Sequence[int], tools: Sequence[Tool], *, prompt_ids: Sequence[int] = (), turn: int = 0
    ) -> Message:
        text = self.decode(until_stop(completion_ids, self.stop_ids))
        reasoning = None
        if self._knows_reasoning:
            opened = self.decode(prompt_ids[-8:]).rstrip().endswith("<think>")
            reasoning, text = split_reasoning(text, opened_by_prompt=opened)
        if not tools or self._call_style == "none":
            return assistant_message(text, reasoning, [])
        read = split_tool_calls if self._call_style == "hermes" else read_json_call
        content, calls = read(text, turn=turn)
        return assistant_message(content, reasoning, calls)

    def encode(self, text: str) -> list[int]:
        return self._encoder.encode_whole(text)

    def decode(self, token_ids: Sequence[int]) -> str:
        return self._encoder.decode(token_ids)

    def _text(self, messages: Sequence[Message], tools: Sequence[Tool], *, generation_prompt: bool) -> str:
        if tools and not self._has_tools:
            raise TokenizationError(
                f"the environment has tools, but the chat template of {self.name} has no place for them: "
                "use a model with tool calling, or give tokenizer.chat_template"
            )
        return self._apply(messages, tools, generation_prompt=generation_prompt)

    def _apply(self, messages: Sequence[Message], tools: Sequence[Tool], *, generation_prompt: bool) -> str:
        ready = prepare(messages, inline_reasoning=not self._knows_reasoning)
        try:
            return str(
                self._tokenizer.apply_chat_template(
                    ready, tools=list(tools) or None, tokenize=False, add_generation_prompt=generation_prompt
                )
            )
        except _TEMPLATE_FAILURES as error:
            roles = ", ".join(str(message.get("role")) for message in messages[:20])
            raise TokenizationError(
                f"the chat template of {self.name} refuses the conversation ({type(error).__name__}: {str(error)[:300]}); "
                f"its roles are: {roles}. Change the environment's messages or give tokenizer.chat_template"
            ) from None

    def _probe(
        self, messages: Sequence[Message], tools: Sequence[Tool], *, generation_prompt: bool = True
    ) -> str | None:
        try:
            return self._apply(messages, tools, generation_prompt=generation_prompt)
        except TokenizationError:
            return None

    def _find_closing_token(self) -> int | None:
        """The special token the template puts behind an assistant message; None when it puts none."""
        answer: Message = {"role": "assistant", "content": _MARK}
        text = self._probe([_USER, answer], [], generation_prompt=False)
        if text is None or _MARK not in text:
            raise ConfigurationError(
                f"the chat template of {self.name} cannot render a user message and an answer: give tokenizer.chat_template"
            )
        tail = self._encoder.encode_whole(text[text.rindex(_MARK) + len(_MARK) :])
        specials = {*self._tokenizer.all_special_ids, *self._tokenizer.added_tokens_decoder}
        return next((token for token in tail if token in specials), None)

    def _find_call_style(self) -> str:
        """How the template writes tool calls, which is how the model was taught to: "hermes", "json" or "none"."""
        result: Message = {"role": "tool", "tool_call_id": "call00000", "name": "probe_tool", "content": "1"}
        text = self._probe([_USER, _PROBE_CALL, result], [_PROBE_TOOL]) or ""
        call = re.search(
            r"(<tool_call>)?\s*{\s*\"name\":\s*\"probe_tool\",\s*\"(arguments|parameters)\":\s*{\s*\"probe_argument\"",
            text,
        )
        if not self._has_tools or call is None:
            return "none"
        return "hermes" if call[1] else "json"

    def _text_after_turn(
        self, previous_messages: Sequence[Message], new_messages: Sequence[Message], tools: Sequence[Tool]
    ) -> str | None:
        mark = _MARK
        written = json.dumps([*previous_messages, *new_messages], ensure_ascii=False)
        while mark in written:
            mark += "X"
        marked = [*previous_messages[:-1], _marked(previous_messages[-1], mark), *new_messages]
        text = self._text(marked, tools, generation_prompt=True)
        if mark not in text:
            return None
        tail = text[text.rindex(mark) + len(mark) :]
        ends = [(tail.index(stop), stop) for stop in self._stop_texts if stop in tail]
        if not ends:
            return None
        at, stop = min(ends)
        return tail[at + len(stop) :]

    def _with_reasoning(self, reasoning: str, messages: Sequence[Message], tools: Sequence[Tool], closed: str) -> str:
        """The closed text; where the template drops the last turn's reasoning, with it put back where it was written."""
        prompt = self._prompt_text(messages[:-1], tools)
        answer = closed[_common_length(prompt, closed) :]
        if reasoning in answer:
            return closed
        block = think_block(reasoning)
        return prompt + (block.removeprefix("<think>\n") if prompt.rstrip().endswith("<think>") else block) + answer

    def _prompt_text(self, messages: Sequence[Message], tools: Sequence[Tool]) -> str:
        """Remembers the last one: a turn's prompt is asked for again when its answer is rendered."""
        key = (list(messages), list(tools))
        if self._last_prompt is None or self._last_prompt[0] != key:
            self._last_prompt = (key, self._text(messages, tools, generation_prompt=True))
        return self._last_prompt[1]


def until_stop(ids: Sequence[int], stop_ids: frozenset[int]) -> Sequence[int]:
    """The ids before the first stop token."""
    ends = [ids.index(end) for end in stop_ids.intersection(ids)]
    return ids[: min(ends)] if ends else ids


def _marked(message: Message, mark: str) -> Message:
    """The assistant message with the mark as its content and in the arguments of its tool calls."""
    marked: Message = {"role": "assistant", "content": mark}
    if calls := message.get("tool_calls"):
        marked["tool_calls"] = [
            {**call, "function": {**call["function"], "arguments": json.dumps({mark: mark})}} for call in calls
        ]
    return marked


def _common_length(a: str, b: str) -> int:
    if b.startswith(a):
        return len(a)
    return next((at for at, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def _template_text(tokenizer: Any) -> str:
    template = tokenizer.chat_template
    return template if isinstance(template, str) else json.dumps(template)


def end_tokens(tokenizer: Any, *, also: Sequence[int | None] = ()) -> frozenset[int]:
    """The tokenizer's end of sequence, special tokens that engines take for an end by their name, and `also`."""
    named = {number for number, token in tokenizer.added_tokens_decoder.items() if token.content in _END_NAMES}
    return frozenset(int(end) for end in {*named, *also, tokenizer.eos_token_id} if end is not None)
