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

from distaff.errors import TokenizationError
from distaff.types import Message, Tool
from distaff_worker.rendering.completions import (
    assistant_message,
    read_json_call,
    split_reasoning,
    split_tool_calls,
)
from distaff_worker.rendering.encoding import TextEncoder
from distaff_worker.rendering.harmony import in_fields, is_harmony, split_harmony
from distaff_worker.rendering.messages import prepare, think_block
from distaff_worker.rendering.probing import MARK, common_length, probe
from distaff_worker.rendering.protocol import Prefix
from distaff_worker.rendering.segments import Segments, open_segmented
from distaff_worker.steps import TokenStep

_TEMPLATE_FAILURES = (TemplateError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError)
_EMPTY_THINKING = re.compile(r"\s*<think>\s*</think>\s*")
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
        template = _template_text(tokenizer)
        self._harmony = is_harmony(template)
        self._has_reasoning_field = "reasoning_content" in template or self._harmony
        self._thinks = self._has_reasoning_field or "</think>" in template
        self._traits = probe(self._probe, tokenizer=tokenizer, encoder=self._encoder, name=name)
        traits = self._traits
        self.stop_ids = end_tokens(tokenizer, also=[*stop_ids, traits.closing_id, traits.closing_of_calls])
        ends = {*self.stop_ids, *filter(None, [traits.closing_in_history])}
        self._end_texts = [text for text in map(tokenizer.convert_ids_to_tokens, sorted(ends)) if text]
        self._segmented = open_segmented(tokenizer.chat_template) if isinstance(tokenizer.chat_template, str) else None

    def render(self, messages: Sequence[Message], tools: Sequence[Tool]) -> list[int]:
        return self._encoder.encode(self._prompt_text(messages, tools))

    def render_closed(self, messages: Sequence[Message], tools: Sequence[Tool]) -> list[int]:
        text = self._behind_prompt(messages, tools, self._text(messages, tools, generation_prompt=False))
        reasoning = _reasoning(messages[-1])
        return self._encoder.encode(self._with_reasoning(reasoning, messages, tools, text) if reasoning else text)

    def prefixes(self, messages: Sequence[Message], tools: Sequence[Tool]) -> dict[int, Prefix]:
        places = _answers(messages)
        segments = self._segments(messages, tools) if len(places) > 1 else None
        if segments is None or not any(segments.proven):
            return {}
        before_first = segments.ends[places[0] - 1]
        first = self._text(messages[: places[0]], tools, generation_prompt=True)
        if before_first < 0 or not first.startswith(segments.text[:before_first]):
            return {}
        closings = (first[before_first:], segments.text[segments.ends[-1] :])
        proven = [at for at in places if segments.proven[at - 1] and segments.proven[at]]
        kept = [at for at in proven if _reasoning(messages[at]) in segments.of(at)]
        cuts = [cut for at in kept for cut in zip((segments.ends[at - 1], segments.ends[at]), closings, strict=True)]
        heads = self._encoder.encode_prefixes(segments.text, cuts)
        return {at: Prefix(prompt_ids=heads[2 * n], closed_ids=heads[2 * n + 1]) for n, at in enumerate(kept)}

    def turns(self, messages: Sequence[Message], tools: Sequence[Tool]) -> tuple[list[int], dict[int, tuple[int, int]]]:
        segments, places = self._segments(messages, tools), _answers(messages)
        if segments is None or any(segments.ends[at - 1] < 0 for at in places):
            raise TokenizationError(
                f"the turns of a conversation cannot be told apart in the chat template of {self.name}: "
                'set sft.loss_mask to "each_turn" or "last_turn"'
            )
        spans = [self._span(messages[at], segments, at) for at in places]
        ids, found = self._encoder.encode_spans(segments.text, spans)
        return ids, dict(zip(places, found, strict=True))

    def bridge(
        self,
        previous: TokenStep,
        previous_messages: Sequence[Message],
        new_messages: Sequence[Message],
        tools: Sequence[Tool],
    ) -> list[int] | None:
        if self._traits.closing_id is None or any(message.get("role") == "assistant" for message in new_messages):
            return None
        added = self._text_after_turn(previous_messages, new_messages, tools)
        if added is None:
            return None
        before = previous.prompt_ids + previous.completion_ids
        ended = bool(previous.completion_ids) and previous.completion_ids[-1] in self.stop_ids
        in_history, at_end = self._traits.closing_in_history, self._traits.closing_id
        closing = at_end if in_history is None else in_history
        return [*before, *([] if ended else [closing]), *self._encoder.encode(added)]

    def parse(
        self, completion_ids: Sequence[int], tools: Sequence[Tool], *, prompt_ids: Sequence[int] = (), turn: int = 0
    ) -> Message:
        text = self.decode(until_stop(completion_ids, self.stop_ids))
        reasoning = None
        if self._harmony:
            closed = not self.stop_ids.isdisjoint(completion_ids)
            content, reasoning, calls = split_harmony(text, turn=turn, with_tools=bool(tools), closed=closed)
            return assistant_message(content, reasoning, calls)
        if self._thinks:
            opened = self.decode(prompt_ids[-8:]).rstrip().endswith("<think>")
            reasoning, text = split_reasoning(text, opened_by_prompt=opened)
        if not tools:
            return assistant_message(text, reasoning, [])
        if self._traits.call_style == "none":
            raise TokenizationError(
                f"the chat template of {self.name} writes tool calls in a form that cannot be read back: set "
                "tokenizer.renderer to the model's format, or give tokenizer.chat_template"
            )
        if self._traits.call_style == "hermes":
            content, calls = split_tool_calls(text, turn=turn)
        else:
            closed = not self.stop_ids.isdisjoint(completion_ids)
            content, calls = read_json_call(text, turn=turn, tools=tools, closed=closed)
        return assistant_message(content, reasoning, calls)

    def forget(self) -> None:
        """Let go of what was rendered and encoded so far."""
        self._encoder.forget()
        self._last_prompt = None

    def encode(self, text: str) -> list[int]:
        return self._encoder.encode_whole(text)

    def decode(self, token_ids: Sequence[int]) -> str:
        return self._encoder.decode(token_ids)

    def _text(self, messages: Sequence[Message], tools: Sequence[Tool], *, generation_prompt: bool) -> str:
        if tools and not self._traits.has_tools:
            raise TokenizationError(
                f"the environment has tools, but the chat template of {self.name} has no place for them: "
                "use a model with tool calling, or give tokenizer.chat_template"
            )
        most = max((len(message.get("tool_calls") or []) for message in messages), default=0)
        if self._traits.calls_shown is not None and most > self._traits.calls_shown:
            raise TokenizationError(
                f"a message of the conversation has {most} tool calls, but the chat template of {self.name} shows "
                f"{self._traits.calls_shown or 'none'}: use a model that has them, or give tokenizer.chat_template"
            )
        return self._apply(messages, tools, generation_prompt=generation_prompt)

    def _apply(self, messages: Sequence[Message], tools: Sequence[Tool], *, generation_prompt: bool) -> str:
        ready = self._ready(messages)
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

    def _probe(self, messages: Sequence[Message], tools: Sequence[Tool], generation_prompt: bool) -> str | None:
        try:
            return self._apply(messages, tools, generation_prompt=generation_prompt)
        except TokenizationError:
            return None

    def _ready(self, messages: Sequence[Message]) -> list[dict[str, Any]]:
        ready = prepare(messages, inline_reasoning=not self._has_reasoning_field)
        return in_fields(ready) if self._harmony else ready

    def _segments(self, messages: Sequence[Message], tools: Sequence[Tool]) -> Segments | None:
        """The conversation in one rendering, None where the template's own differs from it."""
        if self._segmented is None:
            return None
        text = self._text(messages, tools, generation_prompt=False)
        arguments = {**self._tokenizer.special_tokens_map, "tools": list(tools) or None, "documents": None}
        found = self._segmented.render(self._ready(messages), arguments)
        return found if found is not None and found.text == text else None

    def _behind_prompt(self, messages: Sequence[Message], tools: Sequence[Tool], closed: str) -> str:
        """The closed text as it continues the prompt: a template may write what came before otherwise once it knows the answer."""
        before = self._prompt_text(messages[:-1], tools).removesuffix(self._traits.opening)
        if closed.startswith(before):
            return closed
        segments = self._segments(messages, tools)
        if segments is None or len(messages) == 1 or segments.ends[-2] < 0:
            raise TokenizationError(
                f"the chat template of {self.name} writes the conversation otherwise when it ends in an answer: "
                "give tokenizer.chat_template"
            )
        return before + segments.text[segments.ends[-2] :]

    def _span(self, message: Message, segments: Segments, at: int) -> tuple[int, int]:
        """Where the answer begins and ends in the text: without what opens the turn, up to and with a stop token."""
        begin, end = segments.ends[at - 1], segments.ends[at]
        begin += common_length(self._traits.opening, segments.of(at))
        if not _reasoning(message) and "</think>" not in str(message.get("content")):
            empty = _EMPTY_THINKING.match(segments.text, begin, end)
            begin = empty.end() if empty else begin
        stops = [self._tokenizer.convert_ids_to_tokens(stop) for stop in self.stop_ids]
        found = [place + len(stop) for stop in stops if (place := segments.text.rfind(stop, begin, end)) >= 0]
        if found:
            return begin, max(found)
        in_history = self._traits.closing_in_history
        closing = "" if in_history is None else self._tokenizer.convert_ids_to_tokens(in_history)
        place = segments.text.rfind(closing, begin, end) if closing else -1
        return begin, place if place >= 0 else end

    def _text_after_turn(
        self, previous_messages: Sequence[Message], new_messages: Sequence[Message], tools: Sequence[Tool]
    ) -> str | None:
        mark = MARK
        written = json.dumps([*previous_messages, *new_messages], ensure_ascii=False)
        while mark in written:
            mark += "X"
        marked = [*previous_messages[:-1], _marked(previous_messages[-1], mark), *new_messages]
        text = self._text(marked, tools, generation_prompt=True)
        if mark not in text:
            return None
        tail = text[text.rindex(mark) + len(mark) :]
        ends = [(tail.index(stop), stop) for stop in self._end_texts if stop in tail]
        if not ends:
            return None
        at, stop = min(ends)
        return tail[at + len(stop) :]

    def _with_reasoning(self, reasoning: str, messages: Sequence[Message], tools: Sequence[Tool], closed: str) -> str:
        """The closed text; where the template drops the last turn's reasoning, with it put back where it was written."""
        prompt = self._prompt_text(messages[:-1], tools)
        answer = closed[common_length(prompt, closed) :]
        if reasoning in answer:
            return closed
        block = think_block(reasoning)
        opened = prompt.rstrip().endswith("<think>")
        return prompt + (block.removeprefix("<think>\n") if opened else block) + answer.lstrip("\n")

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


def _answers(messages: Sequence[Message]) -> list[int]:
    """Places of assistant messages that answer something."""
    return [at for at, message in enumerate(messages) if at and message.get("role") == "assistant"]


def _reasoning(message: Message) -> str:
    return str(message.get("reasoning_content") or "").strip()


def _template_text(tokenizer: Any) -> str:
    template = tokenizer.chat_template
    return template if isinstance(template, str) else json.dumps(template)


def end_tokens(tokenizer: Any, *, also: Sequence[int | None] = ()) -> frozenset[int]:
    """The tokenizer's end of sequence, special tokens that engines take for an end by their name, and `also`."""
    named = {number for number, token in tokenizer.added_tokens_decoder.items() if token.content in _END_NAMES}
    return frozenset(int(end) for end in {*named, *also, tokenizer.eos_token_id} if end is not None)
