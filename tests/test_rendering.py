"""Messages to exact tokens and back: templates, bridges, parsing, and tokenizers that are refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from distaff.config import TokenizerSection
from distaff.errors import ConfigurationError, TokenizationError
from distaff.types import Message
from distaff_worker.rendering.completions import read_json_call, split_tool_calls
from distaff_worker.rendering.decoding import open_decoder
from distaff_worker.rendering.encoding import TextEncoder
from distaff_worker.rendering.harmony import split_harmony
from distaff_worker.rendering.loading import open_renderer
from distaff_worker.steps import TokenStep
from tests import families_support as families
from tests.tokens_support import (
    ADD,
    ENDS,
    STYLES,
    TEMPLATES,
    assistant,
    renderer,
    smollm2_folder,
    tokenizer,
    tool_result,
    user,
)

WITH_TOOLS = ["qwen3_style", "llama3_style"]
PIECES = [
    "a",
    " b",
    "\n",
    "\n\n",
    "  ",
    "12",
    "é",
    "🙂",
    "<|im_end|>",
    "<|im_",
    "<think>",
    "<|eot_id|>",
    "\u2028",
    "\ud800",
]


def sampled(style: str, prompt: list[int], text: str, *, finish: str = "stop") -> TokenStep:
    """A turn as a model would sample it: its own tokens, and the stop token unless it was cut."""
    ids = tokenizer(style).encode(text, add_special_tokens=False)
    end = [] if finish == "length" else [tokenizer(style).convert_tokens_to_ids(ENDS[style])]
    return TokenStep(prompt_ids=prompt, completion_ids=[*ids, *end], logprobs=None, finish_reason=finish)  # type: ignore[arg-type]


# -- render


@pytest.mark.parametrize("style", STYLES)
@given(st.lists(st.sampled_from(PIECES), max_size=8).map("".join))
@settings(max_examples=40, deadline=None)
def test_encoding_stretches_equals_encoding_the_whole(style: str, text: str) -> None:
    """Cutting at special tokens changes no id, whatever stands beside them."""
    encoder = TextEncoder(tokenizer(style))
    assert encoder.cuts_at_special_tokens
    whole = text.replace("\ud800", "\ufffd")
    assert encoder.encode(text) == tokenizer(style).encode(whole, add_special_tokens=False)


def test_a_tokenizer_that_marks_the_beginning_of_a_text_is_not_cut() -> None:
    """A space prepended to the first word only: its stretches are not independent, so the text is encoded whole."""
    from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {"<unk>": 0, "▁": 1, "a": 2, "▁a": 3}
    plain = Tokenizer(models.BPE(vocab=vocabulary, merges=[("▁", "a")], unk_token="<unk>"))
    plain.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    plain.add_special_tokens([AddedToken("<end>", special=True, normalized=False)])
    made = PreTrainedTokenizerFast(tokenizer_object=plain, unk_token="<unk>")
    encoder = TextEncoder(made)
    assert not encoder.cuts_at_special_tokens
    assert encoder.encode("a<end>a") == made.encode("a<end>a", add_special_tokens=False)


def test_ids_equal_the_library_s_own_rendering() -> None:
    """Plain ids come out (not the names of a BatchEncoding's fields), with the generation prompt."""
    chat = [user("Hi 🙂"), assistant("Hello"), user("again")]
    expected = tokenizer("smollm2").apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
    assert renderer("smollm2").render(chat, []) == expected
    assert renderer("smollm2").decode(expected).endswith("<|im_start|>assistant\n")


def test_a_truncating_tokenizer_truncates_nothing(tmp_path: Path) -> None:
    """A tokenizer.json that was saved with truncation on gives whole conversations all the same."""
    folder = Path(shutil.copytree(smollm2_folder(), tmp_path / "t"))
    saved = json.loads((folder / "tokenizer.json").read_text())
    saved["truncation"] = {"direction": "Left", "max_length": 5, "strategy": "LongestFirst", "stride": 0}
    (folder / "tokenizer.json").write_text(json.dumps(saved))
    chat = [user("one two three four five six seven eight nine ten")]
    opened = open_renderer(TokenizerSection(name=str(folder)), "")
    assert opened.render(chat, []) == renderer("smollm2").render(chat, [])


def test_argument_text_and_argument_objects_render_alike() -> None:
    """Environments keep arguments as JSON text, templates want objects."""
    text = assistant("", calls=[("add", '{"a":1}')])
    parsed = json.loads(json.dumps(text))
    parsed["tool_calls"][0]["function"]["arguments"] = {"a": 1}
    chat = [tool_result("1"), user("go")]
    one, other = (renderer("llama3_style").render([user("x"), call, *chat], [ADD]) for call in (text, parsed))
    assert one == other
    assert '"parameters": {"a": 1}' in renderer("llama3_style").decode(one)


def test_tools_a_template_cannot_show_are_refused() -> None:
    """Silently dropping them would train a model that was never told of its tools."""
    with pytest.raises(TokenizationError, match="no place for them"):
        renderer("smollm2").render([user("x")], [ADD])


def test_a_conversation_the_template_refuses_is_an_error_with_the_reason() -> None:
    """The template's own words and the roles are in the message."""
    two = assistant("", calls=[("add", "{}"), ("add", "{}")])
    with pytest.raises(TokenizationError, match=r"one tool call a turn.*roles are: user, assistant"):
        renderer("llama3_style").render([user("x"), two], [ADD])


def test_images_are_refused_and_text_parts_joined() -> None:
    """Text tokenization cannot hold an image; parts of text are text."""
    parts: Message = {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}
    assert renderer("smollm2").render([parts], []) == renderer("smollm2").render([user("ab")], [])
    with pytest.raises(TokenizationError, match="text conversations only"):
        renderer("smollm2").render([{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}], [])


# -- bridge


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("finish", ["stop", "length"])
def test_a_bridge_extends_the_sampled_tokens_and_has_one_stop_token(style: str, finish: str) -> None:
    """Sampled: kept and not doubled. Cut by length: put in once, by us."""
    chosen = renderer(style)
    prompt = chosen.render([user("Hi")], [])
    step = sampled(style, prompt, "Hel lo 🙂", finish=finish)
    answer = chosen.parse(step.completion_ids, [], prompt_ids=prompt)
    bridged = chosen.bridge(step, [user("Hi"), answer], [user("again")], [])
    assert bridged is not None
    before = step.prompt_ids + step.completion_ids
    assert bridged[: len(before)] == before
    end = tokenizer(style).convert_tokens_to_ids(ENDS[style])
    after = bridged[len(prompt) :]
    assert after[: len(step.completion_ids) + 1].count(end) == 1
    assert chosen.decode(bridged).count(ENDS[style] * 2) == 0
    assert bridged == [*before, *([] if finish == "stop" else [end]), *bridged[len(before) + (finish != "stop") :]]


@pytest.mark.parametrize("style", STYLES)
def test_a_bridge_reads_as_a_fresh_render_where_the_model_wrote_what_the_template_writes(style: str) -> None:
    """Separators, headers and the generation prompt are the template's own, and encoded as the template's would be."""
    chosen = renderer(style)
    prompt = chosen.render([user("Hi")], [])
    if style == "r1_style":
        prompt = tokenizer(style).encode("<|user|>Hi<|assistant|>", add_special_tokens=False)
    step = sampled(style, prompt, "Hello")
    conversation = [user("Hi"), assistant("Hello"), user("a\n\n"), user("b")]
    bridged, fresh = chosen.bridge(step, conversation[:2], conversation[2:], []), chosen.render(conversation, [])
    assert bridged is not None
    assert chosen.decode(bridged) == chosen.decode(fresh)
    added = len(bridged) - len(step.prompt_ids) - len(step.completion_ids)
    assert bridged[-added:] == fresh[-added:]


@pytest.mark.parametrize(
    ("style", "tail"),
    [
        ("qwen3_style", "\n<|im_start|>user\n<tool_response>\n3\n</tool_response><|im_end|>\n<|im_start|>assistant\n"),
        (
            "llama3_style",
            "<|start_header_id|>ipython<|end_header_id|>\n\n3<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n",
        ),
    ],
)
def test_a_bridge_over_a_tool_call_adds_what_is_behind_the_call(style: str, tail: str) -> None:
    """Also when the call's arguments contain the text of a stop token."""
    chosen = renderer(style)
    prompt = chosen.render([user("Hi")], [ADD])
    answer = assistant("", calls=[("add", json.dumps({"a": f"x{ENDS[style]}y"}))])
    step = sampled(style, prompt, "whatever the model wrote")
    bridged = chosen.bridge(step, [user("Hi"), answer], [tool_result("3")], [ADD])
    assert bridged is not None
    assert bridged == [*step.prompt_ids, *step.completion_ids, *tokenizer(style).encode(tail, add_special_tokens=False)]


def test_a_bridge_keeps_thinking_that_the_template_would_drop() -> None:
    """A new user turn makes Qwen3's template forget; the bridge keeps the tokens as they were sampled."""
    chosen = renderer("qwen3_style")
    prompt = chosen.render([user("Hi")], [])
    step = sampled("qwen3_style", prompt, "<think>\nhm\n</think>\n\nHello")
    answer = chosen.parse(step.completion_ids, [], prompt_ids=prompt)
    assert (answer["reasoning_content"], answer["content"]) == ("hm", "Hello")
    bridged = chosen.bridge(step, [user("Hi"), answer], [user("again")], [])
    assert bridged is not None
    assert "hm" in chosen.decode(bridged)
    assert "hm" not in chosen.decode(chosen.render([user("Hi"), answer, user("again")], []))


def test_a_bridge_survives_texts_that_look_like_its_mark() -> None:
    """The mark is one that no message contains."""
    chosen = renderer("smollm2")
    prompt = chosen.render([user("ENDOFTURN")], [])
    step = sampled("smollm2", prompt, "ENDOFTURNX")
    conversation = [user("ENDOFTURN"), assistant("ENDOFTURNX")]
    new = [user("ENDOFTURNXX<|im_end|>")]
    assert chosen.bridge(step, conversation, new, []) == chosen.render([*conversation, *new], [])


def test_a_template_without_an_end_of_turn_is_not_bridged(tmp_path: Path) -> None:
    """Without a stop token nobody knows where the turn ended: the caller renders anew."""
    template = "{% for m in messages %}{{ m.role + ': ' + m.content + '\n' }}{% endfor %}"
    section = TokenizerSection(name=smollm2_folder(), chat_template=template)
    chosen = open_renderer(section, "")
    step = TokenStep(prompt_ids=[5], completion_ids=[6], logprobs=None, finish_reason="stop")
    assert chosen.bridge(step, [user("a"), assistant("b")], [user("c")], []) is None


# -- parse


@pytest.mark.parametrize("style", WITH_TOOLS)
def test_what_a_template_writes_is_parsed_back(style: str) -> None:
    """Content, reasoning and calls come back as they were, arguments as JSON text, ids unique to the turn."""
    chosen = renderer(style)
    reasoning = "hm" if style == "qwen3_style" else ""
    answer = assistant("", reasoning=reasoning, calls=[("add", '{"a": 1, "b": "é🙂"}')], turn=7)
    prompt = chosen.render([user("x")], [ADD])
    completion = chosen.render_closed([user("x"), answer], [ADD])[len(prompt) :]
    assert chosen.parse(completion, [ADD], prompt_ids=prompt, turn=7) == answer


def test_parallel_calls_and_content_are_told_apart() -> None:
    """Two calls and the text before them."""
    content, calls = split_tool_calls(
        'Both:\n<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>\n'
        '<tool_call>{"name": "mul", "arguments": {}}</tool_call>',
        turn=0,
    )
    assert content == "Both:"
    assert [(call["id"], call["function"]["name"]) for call in calls] == [("call00000", "add"), ("call00001", "mul")]


@pytest.mark.parametrize(
    ("text", "name", "arguments"),
    [
        ('<tool_call>{"name": "add", "arguments": {"a": 1,}}</tool_call>', "add", '{"a": 1,}'),
        ('<tool_call>{"name": "add", "arguments": __import__("os").system("true")}</tool_call>', "add", None),
        ('<tool_call>{"name": "add"</tool_call>', "add", '{"name": "add"'),
        ('<tool_call>{"name": "add", "arguments": ' + "[" * 100_000 + "}</tool_call>", "add", "[" * 100_000),
        ('<tool_call>{"name": "add", "arguments": {"a": 1}}', "add", '{"a": 1}'),
    ],
)
def test_a_malformed_call_comes_back_with_its_raw_arguments(text: str, name: str, arguments: str | None) -> None:
    """The environment fails to parse them and tells the model; nothing is evaluated or dropped."""
    content, (call,) = split_tool_calls(text, turn=0)
    assert content == ""
    assert call["function"]["name"] == name
    if arguments is not None:
        assert call["function"]["arguments"] == arguments


@pytest.mark.parametrize(
    "text",
    [
        "<tool_call>add(1, 2)</tool_call>",
        '<tool_call>{"arguments": {}}</tool_call>',
        '<tool_call>{"name": 3}</tool_call>',
        '<tool_call>{"name": "add", "arguments": {"a"',
        "<tool_call>[]</tool_call>",
        "</tool_call>",
    ],
)
def test_a_block_without_a_function_stays_in_the_content(text: str) -> None:
    """It comes back to the model as what it wrote."""
    assert split_tool_calls(text, turn=0) == (text, [])


@pytest.mark.parametrize("family", ["Llama-3", "Llama-3 (renderers)"])
def test_a_malformed_json_call_is_answered_as_a_call(family: str) -> None:
    """The model is told that its arguments are broken; a cut call, another JSON object and a mere text stay what they are."""
    chosen, made = families.renderer(family), families.tokenizer(family)
    end = made.convert_tokens_to_ids("<|eot_id|>")

    def parse(text: str, *, cut: bool = False) -> Message:
        return chosen.parse([*made.encode(text, add_special_tokens=False), *([] if cut else [end])], [ADD])

    broken = '{"name": "add", "parameters": {"a": 1,}}'
    assert parse(broken)["tool_calls"][0]["function"] == {"name": "add", "arguments": '{"a": 1,}'}
    for text, cut in ((broken, True), ('{"name": "Bob", "age": 3,}', False), ('see {"name": "add"', False)):
        assert parse(text, cut=cut) == assistant(text)


WORDS = ["word1", "word2"]
CHANNELS = [
    "<|channel|>analysis",
    "<|channel|>final",
    "<|channel|>commentary",
    "<|message|>",
    "<|end|>",
    "<|start|>assistant",
]


@given(st.lists(st.sampled_from([*CHANNELS, " to=functions.add", *WORDS, '{"a": 1}']), max_size=12).map("".join))
@settings(max_examples=150, deadline=None)
def test_nothing_a_model_writes_on_any_channel_is_lost(text: str) -> None:
    """Whatever order it writes channels, messages and recipients in: each word ends up in reasoning, content or a call."""
    for closed in (True, False):
        content, reasoning, calls = split_harmony(text, turn=0, with_tools=True, closed=closed)
        functions = [part for call in calls for part in (call["function"]["name"], call["function"]["arguments"])]
        everything = "".join([content, reasoning or "", *functions])
        assert [everything.count(word) for word in WORDS] == [text.count(word) for word in WORDS]


@pytest.mark.parametrize(
    ("text", "closed", "message"),
    [
        (' to=functions.add<|channel|>commentary json<|message|>{"a": 1,}', True, ("", None, '{"a": 1,}')),
        ("<|channel|>commentary to=functions.add <|constrain|>json<|message|>{}", False, ("", None, "{}")),
        ('<|channel|>commentary to=functions.add json<|message|>{"a', False, ('to=functions.add {"a', None, None)),
        (
            "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>final<|message|>4",
            True,
            ("4", "hm", None),
        ),
        ("<|channel|>analysis<|message|>hm<|channel|>final<|message|>4", True, ("4", "hm", None)),
        ("<|channel|>analysis<|message|>cut whi", False, ("", "cut whi", None)),
        ("no channel at all", True, ("no channel at all", None, None)),
    ],
)
def test_gpt_oss_s_channels_are_told_apart(text: str, closed: bool, message: tuple[Any, ...]) -> None:
    """Analysis is reasoning, the final channel content, a recipient a call with its raw arguments; a cut call stays content."""
    content, reasoning, calls = split_harmony(text, turn=0, with_tools=True, closed=closed)
    assert (content, reasoning, calls[0]["function"]["arguments"] if calls else None) == message


def test_json_that_utf8_cannot_hold_is_made_holdable() -> None:
    r"""A lone surrogate from a \ud800 escape would break every encoder downstream."""
    _, (call,) = read_json_call('{"name": "add", "parameters": {"a": "\\ud800"}}', turn=0)
    assert call["function"]["arguments"].encode()


def test_a_completion_ends_at_its_stop_token() -> None:
    """The stop token is no text; other special tokens stay visible; half a character is a replacement character."""
    chosen = renderer("smollm2")
    ids = tokenizer("smollm2").encode("a<|im_start|>b🙂", add_special_tokens=False)
    assert chosen.parse([*ids, 2], [])["content"] == "a<|im_start|>b🙂"
    assert chosen.parse(ids[:-1], [])["content"].endswith("\ufffd")


def test_thinking_opened_by_the_prompt_and_never_closed_is_reasoning() -> None:
    """A turn cut while it thinks has no content."""
    template = (
        (TEMPLATES / "qwen3_style.jinja")
        .read_text()
        .replace("assistant\\n' -}}{%- endif -%}\n", "assistant\\n<think>\\n' -}}{%- endif -%}\n")
    )
    made: Any = tokenizer("qwen3_style")
    original = made.chat_template
    from distaff_worker.rendering.template_backend import TemplateRenderer

    try:
        made.chat_template = template
        chosen = TemplateRenderer(made, name="opens", vocab_size=len(made))
        prompt = chosen.render([user("x")], [])
        assert chosen.decode(prompt).endswith("<think>\n")
        ids = made.encode("still going", add_special_tokens=False)
        cut = chosen.parse(ids, [], prompt_ids=prompt)
        assert (cut["reasoning_content"], cut["content"]) == ("still going", "")
    finally:
        made.chat_template = original


def test_calls_in_a_form_nobody_reads_are_refused() -> None:
    """A template with tools whose calls cannot be read back: the environment would never hear of them."""
    template = (
        "{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
        "{% for c in m.tool_calls or [] %}[CALL]{{ c.function.name }}[ARGS]{{ c.function.arguments | tojson }}{% endfor %}"
        "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    chosen = open_renderer(TokenizerSection(name=smollm2_folder(), chat_template=template), "")
    assert chosen.parse([5, 2], [])["role"] == "assistant"
    with pytest.raises(TokenizationError, match=r"cannot be read back: set tokenizer\.renderer"):
        chosen.parse([5, 2], [ADD])


# -- open


def test_a_folder_is_opened_with_its_vocabulary_and_ends() -> None:
    """The model's own name is the tokenizer's where none is given."""
    opened = open_renderer(TokenizerSection(), smollm2_folder())
    assert (opened.kind, opened.vocab_size, opened.stop_ids) == ("template", 49152, frozenset({0, 2}))


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("", "no tokenizer"),
        ("/nowhere/at-all", "does not exist"),
        ("{empty}", "holds no tokenizer"),
        ("{broken}", "cannot be loaded"),
        ("{bare}", "has no chat template"),
        ("{padded}", "do not belong together"),
    ],
)
def test_a_tokenizer_that_cannot_serve_is_refused_with_the_mend(tmp_path: Path, name: str, problem: str) -> None:
    """What, where, and what to set."""
    for kind in ("empty", "broken", "bare", "padded"):
        (tmp_path / kind).mkdir()
    (tmp_path / "broken" / "tokenizer.json").write_text("{")
    for kind in ("bare", "padded"):
        shutil.copytree(smollm2_folder(), tmp_path / kind, dirs_exist_ok=True)
    (tmp_path / "bare" / "chat_template.jinja").unlink()
    (tmp_path / "padded" / "config.json").write_text('{"vocab_size": 100, "model_type": "llama"}')
    where = name.format(**{kind: tmp_path / kind for kind in ("empty", "broken", "bare", "padded")}) if name else ""
    with pytest.raises(ConfigurationError, match=problem) as caught:
        open_renderer(TokenizerSection(name=where), "")
    assert where in str(caught.value)
    assert "tokenizer" in str(caught.value)


def test_an_unknown_renderer_is_refused_with_the_known_ones() -> None:
    """A misspelled format, and one that does not fit the vocabulary."""
    with pytest.raises(ConfigurationError, match=r"auto, template, or one of .*qwen3"):
        open_renderer(TokenizerSection(name=smollm2_folder(), renderer="qwen33"), "")
    with pytest.raises(ConfigurationError, match="does not fit the tokenizer"):
        open_renderer(TokenizerSection(name=smollm2_folder(), renderer="qwen3"), "")


def test_a_template_that_cannot_render_an_answer_is_refused() -> None:
    """Before anything is played."""
    section = TokenizerSection(name=smollm2_folder(), chat_template="{{ messages[0].nothing.there }}")
    with pytest.raises(ConfigurationError, match=r"give tokenizer\.chat_template"):
        open_renderer(section, "")


# -- the renderers package


@pytest.fixture(scope="module")
def qwen3(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The package's Qwen3 renderer on SmolLM2's vocabulary with Qwen3's special tokens."""
    folder = tmp_path_factory.mktemp("models") / "my-model"
    tokenizer("qwen3_style").save_pretrained(folder)
    return open_renderer(TokenizerSection(name=str(folder), renderer="qwen3"), "")


def test_the_package_renders_parses_and_bridges(qwen3: Any) -> None:
    """Thinking survives a user turn, stop tokens are never doubled, a cut turn is closed once."""
    assert qwen3.kind == "renderers:qwen3"
    prompt = qwen3.render([user("x")], [ADD])
    text = '<think>\nhm\n</think>\n\nOK\n<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
    for finish in ("stop", "length"):
        step = sampled("qwen3_style", prompt, text, finish=finish)
        answer = qwen3.parse(step.completion_ids, [ADD], prompt_ids=prompt, turn=2)
        assert answer == assistant("OK", reasoning="hm", calls=[("add", '{"a": 1}')], turn=2)
        bridged = qwen3.bridge(step, [user("x"), answer], [tool_result("1", turn=2), user("y")], [ADD])
        before = step.prompt_ids + step.completion_ids
        assert bridged[: len(before)] == before
        rest = qwen3.decode(bridged[len(before) :])
        assert rest.startswith("\n" if finish == "stop" else "<|im_end|>\n")
        assert rest.count("<|im_end|>") == (2 if finish == "stop" else 3)


def test_the_package_s_malformed_calls_are_kept(qwen3: Any) -> None:
    """With the raw arguments where a name is there, else as content; without tools everything is content."""

    def parse(text: str, tools: list[Any]) -> Message:
        message: Message = qwen3.parse(tokenizer("qwen3_style").encode(text, add_special_tokens=False), tools)
        return message

    broken = parse('<tool_call>\n{"name": "add", "arguments": {"a": }}\n</tool_call>', [ADD])
    assert broken["tool_calls"][0]["function"] == {"name": "add", "arguments": '{"a": }'}
    assert "what" in parse("<tool_call>\nwhat\n</tool_call>", [ADD])["content"]
    whole = '<tool_call>\n{"name": "add", "arguments": {}}\n</tool_call>'
    assert parse(whole, []) == assistant(whole)


def test_the_package_is_taken_only_where_it_equals_the_template(tmp_path: Path) -> None:
    """A folder called like a known model, with a template of its own: the template wins."""
    folder = tmp_path / "Qwen3-0.6B"
    tokenizer("qwen3_style").save_pretrained(folder)
    assert open_renderer(TokenizerSection(name=str(folder)), "").kind == "template"


def test_a_renderer_that_would_download_is_not_taken_by_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """gpt-oss's fetches a vocabulary: a worker without a network would wait for it, and the template is exact."""
    folder = tmp_path / "gpt-oss-20b"
    families.tokenizer("gpt-oss").save_pretrained(folder)

    def refuse(*_: object) -> None:
        raise AssertionError("the package was asked")

    monkeypatch.setattr("renderers.create_renderer", refuse)
    assert open_renderer(TokenizerSection(name=str(folder)), "openai/gpt-oss-20b").kind == "template"


# -- decoding by table


def test_decoding_by_table_is_the_tokenizers_own() -> None:
    """Any ids, broken characters and special tokens included."""
    own = tokenizer("qwen3_style")
    decode = open_decoder(own)
    assert decode.__name__ == "by_table"

    @given(numbers=st.lists(st.integers(0, len(own) - 1), max_size=40))
    @settings(max_examples=200, deadline=None)
    def check(numbers: list[int]) -> None:
        expected = own.decode(numbers, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        assert decode(numbers) == expected

    check()


def test_a_tokenizer_that_is_not_byte_level_decodes_for_itself() -> None:
    """Seen from its decoder, or from one trial that comes out differently."""

    class Odd:
        """A byte-level tokenizer whose wrapper changes the text."""

        backend_tokenizer = tokenizer("smollm2").backend_tokenizer

        def get_vocab(self) -> dict[str, int]:
            return dict(tokenizer("smollm2").get_vocab())

        def decode(self, ids: list[int], **_: Any) -> str:
            return str(tokenizer("smollm2").decode(ids)).upper()

    assert open_decoder(Odd())(tokenizer("smollm2").encode("hello")) == "HELLO"


def test_an_id_without_a_token_is_left_to_the_tokenizer() -> None:
    """Models with padded embeddings can sample one."""
    ids = [*tokenizer("smollm2").encode("hello"), 60_000]
    assert open_decoder(tokenizer("smollm2"))(ids) == "hello"
