"""SFT tokenization: linear cost in turns, by a fast path that is taken only where it is exact, and the three loss masks."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.utils import chat_template_utils

from distaff.config import LossMask, RunConfig
from distaff.environments.protocol import Episode, Play
from distaff.errors import TokenizationError
from distaff.types import Message, Tool
from distaff_worker.attempt import Attempt
from distaff_worker.chat_models import ApiChatModel
from distaff_worker.job import GroupPlayer
from distaff_worker.rendering.encoding import TextEncoder
from distaff_worker.rendering.segments import open_segmented
from distaff_worker.rendering.template_backend import TemplateRenderer
from distaff_worker.samples import steps_to_samples
from distaff_worker.sft import tokenize_chat
from distaff_worker.steps import ChatStep, TokenStep
from distaff_worker.warm import WarmRun
from tests.families_support import FAMILIES, renderer, tokenizer
from tests.tokens_support import ADD, assistant, chat_steps, tool_result, user

TEMPLATES = [name for name, family in FAMILIES.items() if not family.package]
LINEAR = ["SmolLM2/ChatML", "Qwen2.5", "Llama-3"]
"""Families whose template is proven to write what was said whatever follows."""
WORDS = [
    "yes",
    " no",
    "\n",
    "\n\n",
    "  ",
    "1234",
    "é",
    "🙂",
    "<|im_",
    "end|>",
    "<|im_end|>",
    "<|eot_id|>",
    "</think>",
    ".\n",
]
TEXTS = st.lists(st.sampled_from(WORDS), min_size=1, max_size=5).map("".join)
MASKS: list[LossMask] = ["each_turn", "last_turn", "all_turns"]


def long_chat(turns: int, *, words: int = 20) -> list[Message]:
    messages: list[Message] = []
    for turn in range(turns):
        messages += [user(f"question {turn} " * words), assistant(f"answer {turn} " * words)]
    return messages


def one_by_one(steps: list[ChatStep], name: str) -> list[TokenStep]:
    """Each turn rendered on its own, which is what the fast path must equal."""
    return [tokenize_chat([step], renderer(name))[0] for step in steps]


def in_tokens(steps: list[TokenStep]) -> list[tuple[list[int], list[int]]]:
    return [(step.prompt_ids, step.completion_ids) for step in steps]


def trained_text(steps: list[ChatStep], name: str, loss_mask: LossMask) -> list[str]:
    """The trained tokens of each sample."""
    samples = steps_to_samples(tokenize_chat(steps, renderer(name), loss_mask=loss_mask))
    return [renderer(name).decode(sample.token_ids[sample.loss_mask].tolist()) for sample in samples]


class _Counted:
    """Characters that templates wrote and the tokenizer read."""

    def __init__(self) -> None:
        self.rendered = 0
        self.encoded = 0


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> _Counted:
    made = _Counted()
    apply, whole, render = TemplateRenderer._apply, TextEncoder.encode_whole, _segmented_render()

    def applying(self: Any, *args: Any, **options: Any) -> str:
        text = apply(self, *args, **options)
        made.rendered += len(text)
        return text

    def encoding(self: Any, text: str) -> list[int]:
        made.encoded += len(text)
        return whole(self, text)

    def rendering(self: Any, *args: Any) -> Any:
        found = render(self, *args)
        made.rendered += len(found.text) if found else 0
        return found

    monkeypatch.setattr(TemplateRenderer, "_apply", applying)
    monkeypatch.setattr(TextEncoder, "encode_whole", encoding)
    monkeypatch.setattr("distaff_worker.rendering.segments.SegmentedTemplate.render", rendering)
    return made


def _segmented_render() -> Any:
    from distaff_worker.rendering.segments import SegmentedTemplate

    return SegmentedTemplate.render


@pytest.mark.parametrize("name", LINEAR)
def test_a_chat_of_40_turns_is_rendered_and_encoded_a_few_times_not_80(name: str, counted: _Counted) -> None:
    """Characters through the template and the tokenizer, against those of the whole chat; rendering every prefix is 40 times as many."""
    made = tokenizer(name)
    fresh = TemplateRenderer(made, name=name, vocab_size=len(made))
    counted.rendered = counted.encoded = 0
    messages = long_chat(40)
    steps = tokenize_chat(chat_steps(messages), fresh)
    size = len(fresh.decode([*steps[-1].prompt_ids, *steps[-1].completion_ids]))
    assert len(steps) == 40
    assert counted.rendered < 4 * size
    assert counted.encoded < 1.2 * size


@pytest.mark.parametrize("name", LINEAR)
def test_twice_the_turns_are_twice_the_characters(name: str, counted: _Counted) -> None:
    """Linear: nothing is rendered once more for each turn."""
    sizes = []
    for turns in (20, 40):
        counted.rendered = 0
        tokenize_chat(chat_steps(long_chat(turns)), renderer(name))
        sizes.append(counted.rendered)
    assert sizes[1] < 2.2 * sizes[0]


@pytest.mark.parametrize("name", TEMPLATES)
@given(data=st.data())
@settings(max_examples=15, deadline=None)
def test_turns_from_one_rendering_equal_turns_rendered_alone(name: str, data: st.DataObject) -> None:
    """Whatever the template does with what follows: merges, tools, reasoning, cut turns, special tokens in texts."""
    family = FAMILIES[name]
    messages: list[Message] = []
    with_tools = family.calls != "none" and data.draw(st.booleans())
    if data.draw(st.booleans()):
        messages.append({"role": "system", "content": data.draw(TEXTS)})
    for turn in range(data.draw(st.integers(2, 4))):
        messages.append(user(data.draw(TEXTS)))
        if with_tools and data.draw(st.booleans()):
            call = ("add", json.dumps({"a": turn}))
            messages += [assistant(None, calls=[call], turn=turn), tool_result(data.draw(TEXTS), turn=turn)]
        reasoning = data.draw(st.sampled_from(["", "", "think"]))
        messages.append(assistant(data.draw(TEXTS), reasoning=reasoning, turn=turn))
    tools: list[Tool] = [ADD] if with_tools else []
    steps = chat_steps(messages, tools, finish=data.draw(st.sampled_from(["stop", "length"])))
    assert in_tokens(tokenize_chat(steps, renderer(name))) == in_tokens(one_by_one(steps, name))


@pytest.mark.parametrize("name", [*LINEAR, "Qwen3", "gpt-oss"])
def test_the_fast_path_is_taken_where_it_is_proven(name: str) -> None:
    """Plain chats of causal templates; never where a template looks ahead (Qwen3's last query, gpt-oss's last answer)."""
    found = renderer(name).prefixes(long_chat(3, words=1), [])
    assert sorted(found) == ([1, 3, 5] if name in LINEAR else [])


def test_a_template_that_looks_ahead_is_found_out() -> None:
    """The last message's sign, the number of messages, a closing made of what was said: no place is proven."""
    plain = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}SIGN<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\nEND{% endif %}"
    cases = {
        ("", ""): True,
        ("{{ messages[loop.index0 - 1].role if loop.index0 else '' }}", ""): True,
        ("{{ loop.last }}", ""): False,
        ("{{ messages | length }}", ""): False,
        ("{{ messages[-1].content }}", ""): False,
        ("{{ messages[loop.index0 + 1] is defined }}", ""): False,
        ("{{ loop.nextitem is defined }}", ""): False,
        ("{{ add_generation_prompt }}", ""): False,
        ("", "{{ messages[0].content }}"): False,
    }
    chat = [user("a"), assistant("b"), user("c"), assistant("d")]
    for (sign, end), proven in cases.items():
        made = open_segmented(plain.replace("SIGN", sign).replace("END", end))
        assert made is not None
        found = made.render(chat, {"tools": None})
        assert found is not None
        assert any(found.proven[:3]) == proven, (sign, end)
        assert found.text[: found.ends[0]] == found.text.partition("<|im_start|>assistant")[0]


@pytest.mark.parametrize(
    "body",
    [
        "{% if m.content == 'b' %}{% continue %}{% endif %}{{ m.content }};",
        "{{ m.content }};{% set m = messages[0] %}",
        "{% if m.content == 'c' %}{% break %}{% endif %}{{ m.content }};",
    ],
    ids=["passed-over", "renamed", "broken-off"],
)
def test_rounds_that_are_not_the_messages_give_no_segments(body: str) -> None:
    """A message that is passed over would shift the ends of those before it."""
    made = open_segmented(f"{{% for m in messages %}}{body}{{% endfor %}}")
    assert made is not None
    assert made.render([user("a"), assistant("b"), user("c"), assistant("d")], {}) is None


def test_a_template_of_another_shape_has_no_segments() -> None:
    """Without a loop on the top level, or one that cannot be compiled: nothing is guessed."""
    assert open_segmented("{% macro all() %}{% for m in messages %}x{% endfor %}{% endmacro %}{{ all() }}") is None
    assert open_segmented("{% for m in messages %}") is None


def test_only_the_last_turn_is_trained() -> None:
    """last_turn: one sample, whose context is the whole chat before."""
    steps = chat_steps([user("a"), assistant("one"), user("b"), assistant("two")])
    assert trained_text(steps, "SmolLM2/ChatML", "last_turn") == ["two<|im_end|>"]
    (sample,) = steps_to_samples(tokenize_chat(steps, renderer("SmolLM2/ChatML"), loss_mask="last_turn"))
    assert "one" in renderer("SmolLM2/ChatML").decode(sample.token_ids.tolist())


@pytest.mark.parametrize("name", [name for name in TEMPLATES if not FAMILIES[name].thinks])
@pytest.mark.parametrize("finish", ["stop", "length"])
def test_all_turns_in_one_rendering_are_each_turn_where_the_template_forgets_nothing(name: str, finish: str) -> None:
    """The same ids and the same mask, by another way."""
    steps = chat_steps(
        [user("a\n"), assistant("one 🙂"), user("b"), assistant("  two"), user("c"), assistant("3")], finish=finish
    )
    each, all_ = (
        steps_to_samples(tokenize_chat(steps, renderer(name), loss_mask=mask)) for mask in ("each_turn", "all_turns")
    )
    assert len(each) == len(all_) == 1
    assert each[0].token_ids.tolist() == all_[0].token_ids.tolist()
    assert each[0].loss_mask.tolist() == all_[0].loss_mask.tolist()


def test_all_turns_of_a_template_that_forgets_reasoning_are_one_sample() -> None:
    """Qwen3: the earlier turn is trained as the rendering shows it, without its thinking; the last one with."""
    steps = chat_steps([user("a"), assistant("one", reasoning="why"), user("b"), assistant("two", reasoning="so")])
    assert trained_text(steps, "Qwen3", "all_turns") == ["one<|im_end|><think>\nso\n</think>\n\ntwo<|im_end|>"]
    assert len(trained_text(steps, "Qwen3", "each_turn")) == 2


def test_the_run_s_mask_is_the_one_that_is_taken() -> None:
    """sft.loss_mask reaches the worker's tokenization."""
    model = ApiChatModel.__new__(ApiChatModel)
    model.steps = chat_steps([user("a"), assistant("one"), user("b"), assistant("two")])
    play = Play(seat="", messages=[], tools=[], turns=2, stop_condition="", truncated=False, error=None)
    trained = {}
    for mask in MASKS:
        config = RunConfig.model_validate({"sft": {"loss_mask": mask}})
        run = cast(WarmRun, SimpleNamespace(renderer=renderer("SmolLM2/ChatML"), config=config))
        attempt = Attempt(0, Episode(plays=[play]), {"": model}, 1.0)
        GroupPlayer._tokenize_one(run, attempt)
        (sample,) = attempt.samples[""]
        trained[mask] = renderer("SmolLM2/ChatML").decode(sample.token_ids[sample.loss_mask].tolist())
    both = "one<|im_end|>two<|im_end|>"
    assert trained == {"each_turn": both, "all_turns": both, "last_turn": "two<|im_end|>"}


def test_the_examples_of_a_prompt_are_not_trained() -> None:
    """Assistant messages that the environment put in were not written by the model."""
    shots = [user("shot"), assistant("SHOT"), user("a")]
    steps = [
        ChatStep(
            prompt=shots,
            tools=[],
            completion=assistant("one"),
            finish_reason="stop",
            prompt_tokens=0,
            completion_tokens=0,
        )
    ]
    for mask in MASKS:
        assert trained_text(steps, "SmolLM2/ChatML", mask) == ["one<|im_end|>"]


@pytest.mark.parametrize("mask", MASKS)
def test_an_empty_thought_that_the_template_wrote_is_not_trained(mask: LossMask) -> None:
    """Qwen3 puts an empty block before an answer without reasoning; no model wrote it."""
    (text,) = trained_text(chat_steps([user("a"), assistant("one")]), "Qwen3", mask)
    assert "think" not in text
    assert text.endswith("one<|im_end|>")


@pytest.mark.parametrize("mask", MASKS)
def test_a_thought_that_the_template_forgets_when_it_knows_the_answer_is_context_not_training(mask: LossMask) -> None:
    """gpt-oss drops the analysis before a call once there is a final answer: the answer is trained behind the prompt that was sent."""
    messages = [
        user("1 + 2?"),
        assistant("", reasoning="Use the tool.", calls=[("add", '{"a": 1}')]),
        tool_result("the-result"),
        assistant("3", reasoning="Done."),
    ]
    samples = steps_to_samples(tokenize_chat(chat_steps(messages, [ADD]), renderer("gpt-oss"), loss_mask=mask))
    trained = "".join(renderer("gpt-oss").decode(one.token_ids[one.loss_mask].tolist()) for one in samples)
    assert "the-result" not in trained
    assert trained.endswith(
        "<|channel|>analysis<|message|>Done.<|end|><|start|>assistant<|channel|>final<|message|>3<|return|>"
    )
    if mask == "each_turn":
        assert len(samples) == 1
        assert "<|channel|>analysis<|message|>Use the tool.<|end|>" in trained


def test_a_date_that_changes_between_two_renderings_trains_no_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    """At midnight the same prompt has other tokens; the answer is trained behind the one that was rendered first."""
    made = tokenizer("gpt-oss")
    template = made.chat_template.replace('strftime_now("%Y-%m-%d")', "today()")
    assert template != made.chat_template
    monkeypatch.setattr(made, "chat_template", template)
    days = ["2026-12-01"]
    environment = chat_template_utils._compile_jinja_template(template).environment
    environment.globals["today"] = lambda: days.pop(0) if len(days) > 1 else days[0]
    chosen = TemplateRenderer(made, name="gpt-oss", vocab_size=len(made))
    days[:] = ["2026-12-01", "2026-12-02"]
    (sample,) = steps_to_samples(tokenize_chat(chat_steps([user("the-question"), assistant("yes")]), chosen))
    assert chosen.decode(sample.token_ids[sample.loss_mask].tolist()) == "<|channel|>final<|message|>yes<|return|>"
    assert "2026-12-01" in chosen.decode(sample.token_ids.tolist())


def test_turns_that_cannot_be_told_apart_are_refused() -> None:
    """all_turns on a renderer of the package, which has no text to look into."""
    with pytest.raises(TokenizationError, match=r"tokenizer\.renderer"):
        tokenize_chat(chat_steps([user("a"), assistant("b")]), renderer("Qwen3 (renderers)"), loss_mask="all_turns")


@pytest.mark.parametrize("name", ["SmolLM2/ChatML", "DeepSeek-R1 distilled", "gpt-oss"])
def test_calls_a_template_does_not_show_are_refused(name: str) -> None:
    """All of them, or the second of two: trained without them the model would learn to say nothing."""
    calls = [("add", "{}"), ("add", "{}")]
    messages = [user("a"), assistant("x", calls=calls)]
    with pytest.raises(TokenizationError, match="tool calls, but the chat template"):
        renderer(name).render_closed(messages, [ADD] if name == "gpt-oss" else [])
