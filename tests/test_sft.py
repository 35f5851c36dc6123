"""SFT masks equal, token for token, a slow reference that renders every prefix anew."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from distaff.errors import TokenizationError
from distaff.types import Message, Tool
from distaff_worker.rendering.encoding import TextEncoder
from distaff_worker.rendering.template_backend import TemplateRenderer
from distaff_worker.samples import steps_to_samples
from distaff_worker.sft import tokenize_chat
from distaff_worker.steps import ChatStep
from tests.tokens_support import (
    ADD,
    STYLES,
    assistant,
    chat_steps,
    renderer,
    slow_reference,
    tokenizer,
    tool_result,
    user,
)

REFERENCE_STYLES = ["smollm2", "qwen3_style", "llama3_style"]
WITH_TOOLS = ["qwen3_style", "llama3_style"]
WORDS = [
    "yes",
    " no",
    "\n",
    "\n\n",
    "  ",
    "1234",
    "é",
    "🙂",
    "👩‍👩‍👧",
    "漢字",
    "<|im_",
    "end|>",
    "</s>",
    ".\n",
    "\t",
    "\u2028",
]
TEXTS = st.lists(st.sampled_from(WORDS), min_size=1, max_size=6).map("".join)


def trained(steps: list[ChatStep], style: str) -> list[tuple[list[int], list[bool]]]:
    samples = steps_to_samples(tokenize_chat(steps, renderer(style)))
    return [(sample.token_ids.tolist(), sample.loss_mask.tolist()) for sample in samples]


def trained_text(steps: list[ChatStep], style: str) -> list[str]:
    """The trained tokens of each sample as text, "|" between separate spans."""
    texts = []
    for ids, mask in trained(steps, style):
        spans: list[list[int]] = [[]]
        for token, on in zip(ids, mask, strict=True):
            if on:
                spans[-1].append(token)
            elif spans[-1]:
                spans.append([])
        texts.append("|".join(renderer(style).decode(span) for span in spans if span))
    return texts


CHAT: list[Message] = [
    {"role": "system", "content": "You are terse."},
    user("Hello 🙂"),
    assistant("Hi!\n"),
    user("2 + 2?\n\n"),
    assistant("\n4", reasoning="Two and two.\nFour."),
    user("Sure?"),
    assistant("Yes."),
]
TOOL_CHAT: list[Message] = [
    user("Add 1 and 2, then 3."),
    assistant(None, reasoning="I need the tool.", calls=[("add", '{"a": 1, "b": 2}')]),
    tool_result("3"),
    assistant("", reasoning="Again.", calls=[("add", '{"b":3,"a":3}')], turn=1),
    tool_result("6", turn=1),
    assistant("6"),
    user("And the word?"),
    assistant("six", reasoning="In English."),
]


@pytest.mark.parametrize("style", REFERENCE_STYLES)
def test_masks_equal_the_slow_reference(style: str) -> None:
    """A chat with reasoning, leading and trailing newlines and emoji."""
    steps = chat_steps(CHAT)
    assert trained(steps, style) == slow_reference(steps, style)


@pytest.mark.parametrize("style", WITH_TOOLS)
def test_masks_equal_the_slow_reference_with_tools(style: str) -> None:
    """Tool definitions, calls, results and the reasoning between them (Llama 3's calls have no room for reasoning)."""
    calls_think = style == "qwen3_style"
    messages = [
        {key: value for key, value in message.items() if calls_think or key != "reasoning_content"}
        for message in TOOL_CHAT
    ]
    steps = chat_steps(messages, [ADD])
    assert trained(steps, style) == slow_reference(steps, style)


@pytest.mark.parametrize("style", REFERENCE_STYLES)
def test_masks_equal_the_slow_reference_after_a_cut(style: str) -> None:
    """The stop token that the template puts behind a turn cut by length is not trained."""
    steps = chat_steps(CHAT, finish="length")
    found = trained(steps, style)
    assert found == slow_reference(steps, style)
    assert found[-1][0][-1] not in renderer(style).stop_ids


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_masks_equal_the_slow_reference_for_random_conversations(data: st.DataObject) -> None:
    """Adversarial merges at every boundary: newlines, spaces, digits, emoji, pieces of special tokens."""
    style = data.draw(st.sampled_from(REFERENCE_STYLES))
    with_tools = style in WITH_TOOLS and data.draw(st.booleans())
    messages: list[Message] = []
    for turn in range(data.draw(st.integers(1, 4))):
        messages.append(user(data.draw(TEXTS)))
        if with_tools and data.draw(st.booleans()):
            call = ("add", json.dumps({"a": turn, "b": data.draw(TEXTS)}))
            messages += [assistant(None, calls=[call], turn=turn), tool_result(data.draw(TEXTS), turn=turn)]
        reasoning = data.draw(st.sampled_from(["", "think", "one.\ntwo 🙂"]))
        messages.append(assistant(data.draw(TEXTS), reasoning=reasoning, turn=turn))
    tools: list[Tool] = [ADD] if with_tools else []
    steps = chat_steps(messages, tools, finish=data.draw(st.sampled_from(["stop", "length"])))
    assert trained(steps, style) == slow_reference(steps, style)


def test_a_chat_is_one_sample_that_trains_every_answer_with_its_stop_token() -> None:
    """The newline behind the stop token belongs to the template and stays untrained."""
    steps = chat_steps([user("a"), assistant("one"), user("b"), assistant("two")])
    assert trained_text(steps, "smollm2") == ["one<|im_end|>|two<|im_end|>"]


def test_reasoning_the_template_drops_later_is_trained_in_its_own_context() -> None:
    """Each turn is trained as it was generated: the earlier one with its thinking, the later one behind a history without."""
    steps = chat_steps([user("a"), assistant("one", reasoning="because"), user("b"), assistant("two", reasoning="so")])
    first, second = trained_text(steps, "qwen3_style")
    assert first == "<think>\nbecause\n</think>\n\none<|im_end|>"
    assert second == "<think>\nso\n</think>\n\ntwo<|im_end|>"


def test_reasoning_within_a_tool_cycle_stays_in_one_sample() -> None:
    """Thinking between tool calls is part of the context the next call was generated in."""
    (text, _) = trained_text(chat_steps(TOOL_CHAT, [ADD]), "qwen3_style")
    assert text.count("<think>") == 2
    assert '{"name": "add", "arguments": {"a": 1, "b": 2}}' in text
    assert "Again." in text


def test_a_template_that_always_drops_reasoning_does_not_lose_it() -> None:
    """The prompt opens the thinking, the model writes and closes it: that is what is trained."""
    steps = chat_steps([user("a"), assistant("one", reasoning="because"), user("b"), assistant("two", reasoning="so")])
    assert trained_text(steps, "r1_style") == [
        "because\n</think>\n\none<|end_of_text|>",
        "so\n</think>\n\ntwo<|end_of_text|>",
    ]


def test_a_template_that_drops_the_content_of_a_call_does_not_lose_reasoning() -> None:
    """Llama 3's calls stand alone; the thinking before one is trained all the same."""
    text = trained_text(chat_steps(TOOL_CHAT[:2], [ADD]), "llama3_style")[0]
    assert "<think>\nI need the tool.\n</think>" in text
    assert text.endswith('{"name": "add", "parameters": {"a": 1, "b": 2}}<|eot_id|>')


def test_a_prompt_that_no_given_turn_begins_with_is_cut_at_the_common_prefix() -> None:
    """An answer without thinking, in a format whose prompt opens one: trained behind the assistant's tag."""
    (step,) = tokenize_chat(chat_steps([user("a"), assistant("one")]), renderer("r1_style"))
    assert renderer("r1_style").decode(step.prompt_ids) == "<|user|>a<|assistant|>"
    assert renderer("r1_style").decode(step.completion_ids) == "one<|end_of_text|>"


def test_thinking_that_was_cut_is_not_closed_in_training() -> None:
    """A turn that ran out of tokens while thinking never wrote </think>."""
    steps = chat_steps([user("a"), assistant(None, reasoning="Let me think about")], finish="length")
    assert trained_text(steps, "qwen3_style") == ["<think>\nLet me think about"]


def test_emoji_are_trained_whole() -> None:
    """A character of several tokens is neither split nor replaced."""
    steps = chat_steps([user("a"), assistant("🙂👩‍👩‍👧")])
    assert len(tokenizer("smollm2").encode("🙂", add_special_tokens=False)) > 1
    assert trained_text(steps, "smollm2") == ["🙂👩‍👩‍👧<|im_end|>"]


def test_an_answer_of_another_role_is_refused() -> None:
    """An API that answers as the user is broken."""
    step = chat_steps([user("a"), assistant("b")])[0]
    wrong = ChatStep(
        prompt=step.prompt,
        tools=[],
        completion=user("b"),
        finish_reason="stop",
        prompt_tokens=0,
        completion_tokens=0,
    )
    with pytest.raises(TokenizationError, match="role 'user'"):
        tokenize_chat([wrong], renderer("smollm2"))


def test_each_stretch_of_a_long_chat_is_encoded_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tokenizer sees about as many characters as the conversation has, not turns times as many."""
    made = TemplateRenderer(tokenizer("smollm2"), name="fresh", vocab_size=49152)
    messages: list[Message] = []
    for turn in range(40):
        messages += [user(f"question {turn} " * 20), assistant(f"answer {turn} " * 20)]
    lengths: list[int] = []
    whole = TextEncoder.encode_whole

    def counting(self: TextEncoder, text: str) -> list[int]:
        lengths.append(len(text))
        return whole(self, text)

    monkeypatch.setattr(TextEncoder, "encode_whole", counting)
    steps = tokenize_chat(chat_steps(messages), made)
    assert len(steps) == 40
    assert sum(lengths) < 1.2 * sum(len(message["content"]) for message in messages)


def test_every_style_of_the_reference_is_a_different_format() -> None:
    """The parametrization would prove nothing if the templates were the same."""
    texts = {renderer(style).decode(renderer(style).render([user("x")], [])) for style in STYLES}
    assert len(texts) == len(STYLES)
