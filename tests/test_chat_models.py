"""What the engine was sent and sampled is what the rollout's steps hold; limits, seeds and sampling parameters."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from distaff.config import EngineSection, RolloutSection, SamplingSection
from distaff.errors import ContextOverflow, EngineAnswerError, TurnLimit
from distaff.types import Message, Tool
from distaff_worker.chat_models import ApiChatModel, TokenChatModel
from distaff_worker.engines import open_chat_engine, open_token_engine
from distaff_worker.engines.protocol import Generation
from distaff_worker.samples import steps_to_samples
from distaff_worker.sampling import Limits, derive_seed, turn_sampling
from distaff_worker.sft import tokenize_chat
from tests.scripted_engine import Answer, Script, ScriptedEngine
from tests.tokens_support import ADD, ENDS, STYLES, assistant, renderer, tokenizer, tool_result, user

END = 2
"""<|im_end|> of SmolLM2."""


@pytest.fixture
def executor() -> Iterator[Executor]:
    with ThreadPoolExecutor(1) as made:
        yield made


@asynccontextmanager
async def token_model(
    script: Script, executor: Executor, *, style: str = "smollm2", max_model_len: int = 4096, **options: Any
) -> AsyncIterator[tuple[TokenChatModel, ScriptedEngine]]:
    async with ScriptedEngine(script=script, max_model_len=max_model_len) as server:
        section = EngineSection(kind="vllm", base_urls=[server.url], model="scripted")
        engine = open_token_engine(section, vocab_size=renderer(style).vocab_size)
        try:
            yield make_model(engine, style, executor, **options), server
        finally:
            await engine.close()


def make_model(engine: Any, style: str, executor: Executor, **options: Any) -> TokenChatModel:
    settings_: dict[str, Any] = {"sampling": SamplingSection(), "rollout_seed": None, "limits": Limits(), **options}
    return TokenChatModel(engine, renderer(style), session="s", executor=executor, **settings_)


def says(text: str, *, style: str = "smollm2", end: bool = True, finish: str = "stop") -> Answer:
    ids = tokenizer(style).encode(text, add_special_tokens=False)
    ids += [tokenizer(style).convert_tokens_to_ids(ENDS[style])] if end else []
    return Answer(token_ids=ids, logprobs=[-0.001 * (n + 1) for n in range(len(ids))], finish_reason=finish)


# -- tokens


async def test_a_conversation_is_bridged_and_captured_exactly(executor: Executor) -> None:
    """Three turns, one of them cut by length, are one sample: what the server saw and sampled, in order."""
    answers = [says("One."), says("Two, but", end=False, finish="length"), says("Three 🙂")]
    async with token_model(lambda ask: answers[ask.number], executor) as (model, server):
        messages: list[Message] = [user("a")]
        for text in ("b", "c", ""):
            turn = await model.complete(messages, [], {})
            messages += [turn.message, user(text)]
        assert [step.prompt_ids for step in model.steps] == server.prompts
        assert [step.completion_ids for step in model.steps] == [answer.token_ids for answer in answers]
        assert [step.logprobs for step in model.steps] == [answer.logprobs for answer in answers]
    assert [step.bridged for step in model.steps] == [False, True, True]
    assert model.bridged_turns == 2
    (sample,) = steps_to_samples(model.steps)
    assert sample.token_ids.tolist() == server.prompts[-1] + answers[-1].token_ids
    text = renderer("smollm2").decode(sample.token_ids.tolist())
    assert "<|im_end|><|im_end|>" not in text
    assert "Two, but<|im_end|>\n<|im_start|>user\nc<|im_end|>" in text
    cut = sample.token_ids.tolist().index(END, len(server.prompts[1]))
    assert not sample.loss_mask[cut]
    assert int(sample.loss_mask.sum()) == sum(len(answer.token_ids) for answer in answers)
    assert model.prompt_tokens == sum(map(len, server.prompts))
    assert model.finish_reason == "stop"
    assert model.engine_s > 0
    assert model.tokenize_s > 0


async def test_tokens_that_no_encoder_would_give_are_kept(executor: Executor) -> None:
    """The model spells a word letter by letter; re-encoding its text would give other ids."""
    spelled = [tokenizer("smollm2").convert_tokens_to_ids(letter) for letter in "hello"]
    assert tokenizer("smollm2").encode("hello", add_special_tokens=False) != spelled
    answers = [Answer(token_ids=[*spelled, END]), says("x")]
    async with token_model(lambda ask: answers[ask.number], executor) as (model, server):
        turn = await model.complete([user("a")], [], {})
        assert turn.message["content"] == "hello"
        await model.complete([user("a"), turn.message, user("b")], [], {})
        assert server.prompts[1][len(server.prompts[0]) :][:6] == [*spelled, END]
    assert len(steps_to_samples(model.steps)) == 1


async def test_a_rewritten_history_is_rendered_anew(executor: Executor) -> None:
    """An environment that changes what was said gets what it asks for, and the old turn keeps its own sample."""
    async with token_model(lambda ask: says("yes"), executor) as (model, server):
        await model.complete([user("a")], [], {})
        changed = [user("a"), assistant("no"), user("b")]
        await model.complete(changed, [], {})
        assert server.prompts[1] == renderer("smollm2").render(changed, [])
    assert model.bridged_turns == 0
    assert len(steps_to_samples(model.steps)) == 2


async def test_nothing_said_in_other_words_is_still_bridged(executor: Executor) -> None:
    """Environments write None for "", drop reasoning, strip texts and add fields of their own."""
    said = says("<think>\nhm\n</think>\n\n OK ", style="qwen3_style")
    async with token_model(lambda ask: said, executor, style="qwen3_style") as (model, _):
        await model.complete([user("a")], [], {})
        returned: Message = {"role": "assistant", "content": "OK", "tool_calls": None, "refusal": None}
        await model.complete([user("a"), returned, user("b")], [], {})
    assert model.bridged_turns == 1


async def test_branches_are_continued_from_the_turn_they_belong_to(executor: Executor) -> None:
    """Two continuations of one conversation, begun at once: each extends its own tokens."""
    async with token_model(lambda ask: says(f"answer {ask.number}"), executor) as (model, _):
        first = await model.complete([user("a")], [], {})
        base = [user("a"), first.message]
        left, right = await asyncio.gather(
            model.complete([*base, user("left")], [], {}), model.complete([*base, user("right")], [], {})
        )
        await model.complete([*base, user("right"), right.message, user("more")], [], {})
        await model.complete([*base, user("left"), left.message, user("more")], [], {})
    assert model.bridged_turns == 4
    assert len(steps_to_samples(model.steps)) == 2


async def test_a_mutated_conversation_is_not_taken_for_the_old_one(executor: Executor) -> None:
    """The model keeps its own copy of what it was asked."""
    async with token_model(lambda ask: says("yes"), executor) as (model, server):
        messages: list[Message] = [user("a")]
        turn = await model.complete(messages, [], {})
        messages[0]["content"] = "changed"
        messages += [turn.message, user("b")]
        await model.complete(messages, [], {})
        assert server.prompts[1] == renderer("smollm2").render(messages, [])


@pytest.mark.parametrize("style", ["qwen3_style", "llama3_style"])
async def test_tool_calls_are_parsed_answered_and_bridged(executor: Executor, style: str) -> None:
    """The finish reason says so, the ids of calls differ between turns, and the whole rollout is one sample."""
    call = {
        "qwen3_style": '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>',
        "llama3_style": '{"name": "add", "parameters": {"a": 1, "b": 2}}',
    }[style]
    answers = [says(call, style=style), says(call, style=style), says("3", style=style)]
    async with token_model(lambda ask: answers[ask.number], executor, style=style) as (model, _):
        messages: list[Message] = [user("1 + 2?")]
        for number in range(2):
            turn = await model.complete(messages, [ADD], {})
            assert turn.finish_reason == "tool_calls"
            (made,) = turn.message["tool_calls"]
            assert made["function"] == {"name": "add", "arguments": '{"a": 1, "b": 2}'}
            assert made["id"] == f"call{number:03d}00"
            messages += [turn.message, tool_result("3", turn=number)]
        await model.complete(messages, [ADD], {})
    assert model.bridged_turns == 2
    assert [step.finish_reason for step in model.steps] == ["stop", "stop", "stop"]
    assert len(steps_to_samples(model.steps)) == 1


class _Server:
    """One scripted engine for all examples of a property, on a thread of its own."""

    def __init__(self) -> None:
        self.answers: list[Answer] = []
        self.engine = ScriptedEngine(script=lambda ask: self.answers.pop(0), max_model_len=100_000)


@pytest.fixture(scope="module")
def server() -> Iterator[_Server]:
    made = _Server()
    with made.engine:
        yield made


@given(st.data())
@settings(max_examples=40, deadline=None)
def test_samples_are_what_the_engine_saw_and_sampled(server: _Server, data: st.DataObject) -> None:
    """Random conversations of random tokens (emoji halves, special tokens, cuts, tools) in every format: every sampled token is
    trained once with its own logprob, behind exactly the prompt the server was sent."""
    style = data.draw(st.sampled_from(sorted(STYLES)))
    chance = random.Random(data.draw(st.integers(0, 2**32)))
    tools = [ADD] if style in ("qwen3_style", "llama3_style") and data.draw(st.booleans()) else []
    turns = data.draw(st.integers(1, 5))
    answers = [_random_answer(style, chance) for _ in range(turns)]
    server.answers = list(answers)
    server.engine.records.clear()
    model = asyncio.run(_converse(server.engine.url, style, tools, turns, chance))

    prompts = server.engine.prompts
    samples = steps_to_samples(model.steps)
    found = []
    for sample in samples:
        ids = sample.token_ids.tolist()
        assert sample.logprobs is not None
        found += [(ids[:at], ids[at], float(sample.logprobs[at])) for at in np.flatnonzero(sample.loss_mask).tolist()]
    expected = [
        (prompt + answer.token_ids[:n], answer.token_ids[n], float(np.float32((answer.logprobs or [])[n])))
        for prompt, answer in zip(prompts, answers, strict=True)
        for n in range(len(answer.token_ids))
    ]
    assert sorted(found) == sorted(expected)
    assert model.bridged_turns == turns - 1
    assert len(samples) == 1


def _random_answer(style: str, chance: random.Random) -> Answer:
    stop = renderer(style).stop_ids
    allowed = [token for token in (chance.randrange(len(tokenizer(style))) for _ in range(12)) if token not in stop]
    special = [tokenizer(style).convert_tokens_to_ids(token) for token in STYLES[style] if token != ENDS[style]]
    if special and chance.random() < 0.3:
        allowed.insert(chance.randrange(len(allowed)), chance.choice(special))
    cut = chance.random() < 0.3
    ids = allowed + ([] if cut else [tokenizer(style).convert_tokens_to_ids(ENDS[style])])
    return Answer(token_ids=ids, logprobs=[-chance.random() for _ in ids], finish_reason="length" if cut else "stop")


async def _converse(url: str, style: str, tools: list[Tool], turns: int, chance: random.Random) -> TokenChatModel:
    engine = open_token_engine(
        EngineSection(kind="vllm", base_urls=[url], model="scripted"), vocab_size=renderer(style).vocab_size
    )
    with ThreadPoolExecutor(1) as executor:
        model = make_model(engine, style, executor)
        messages: list[Message] = [user("begin")]
        for _ in range(turns):
            turn = await model.complete(messages, tools, {})
            texts = ["", "\n", " ok 🙂", "<|im_end|>", "1234\n\n"]
            messages += [turn.message, user(chance.choice(texts)), user(chance.choice(texts))]
        await engine.close()
    return model


# -- limits


async def test_prompt_and_max_tokens_never_exceed_the_context(executor: Executor) -> None:
    """max_tokens is clipped to the room that is left; without room the rollout ends before anything is sent."""
    size = len(renderer("smollm2").render([user("a")], []))
    limits = Limits(max_context_tokens=size + 10)
    options: dict[str, Any] = {"limits": limits, "sampling": SamplingSection(max_tokens=25)}
    async with token_model(lambda ask: says("word " * 5), executor, **options) as (model, server):
        first = await model.complete([user("a")], [], {})
        assert server.records[0].ask.sampling["max_tokens"] == 10
        with pytest.raises(ContextOverflow, match="no room"):
            await model.complete([user("a"), first.message, user("b " * 40)], [], {})
        assert len(server.records) == 1
    assert len(model.steps) == 1


async def test_the_turn_limit_is_a_clean_end(executor: Executor) -> None:
    """The turns so far stay; the engine is not asked again."""
    async with token_model(lambda ask: says("x"), executor, limits=Limits(max_turns=1)) as (model, server):
        await model.complete([user("a")], [], {})
        with pytest.raises(TurnLimit, match="max_turns"):
            await model.complete([user("a"), assistant("x"), user("b")], [], {})
        assert len(server.records) == 1
    assert len(model.steps) == 1


async def test_the_token_budget_of_a_rollout_is_never_exceeded(executor: Executor) -> None:
    """The last turn is cut to what is left; then the rollout ends cleanly, before anything is sent."""
    limits = Limits(max_total_completion_tokens=10)
    options: dict[str, Any] = {"limits": limits, "sampling": SamplingSection(max_tokens=7)}
    answers = [says("a b c d"), says("a b c d", end=False, finish="length")]
    assert [len(answer.token_ids) for answer in answers] == [5, 4]
    async with token_model(lambda ask: answers[min(ask.number, 1)], executor, **options) as (model, server):
        messages: list[Message] = [user("a")]
        for _ in range(3):
            messages += [(await model.complete(messages, [], {})).message, user("on")]
        assert [record.ask.sampling["max_tokens"] for record in server.records] == [7, 5, 1]
        with pytest.raises(ContextOverflow, match="max_total_completion_tokens"):
            await model.complete(messages, [], {})
        assert len(server.records) == 3


class _Gathering:
    """An engine that answers nobody before two have asked."""

    def __init__(self) -> None:
        self.asked: list[int] = []
        self._both = asyncio.Event()

    async def generate(self, prompt_ids: list[int], *, max_tokens: int, **_: Any) -> Generation:
        self.asked.append(max_tokens)
        if len(self.asked) == 2:
            self._both.set()
        await self._both.wait()
        return Generation(token_ids=[5, END], logprobs=[-0.1, -0.1], finish_reason="stop")


async def test_turns_at_once_share_the_token_budget(executor: Executor) -> None:
    """Two branches of one rollout may not both take what is left."""
    engine = _Gathering()
    limits, sampling = Limits(max_total_completion_tokens=10), SamplingSection(max_tokens=7)
    model = make_model(engine, "smollm2", executor, limits=limits, sampling=sampling)
    await asyncio.gather(model.complete([user("a")], [], {}), model.complete([user("b")], [], {}))
    assert sorted(engine.asked) == [3, 7]


def test_the_tighter_context_counts() -> None:
    """The run's bound, the engine's, or none."""
    section = RolloutSection(max_context_tokens=100, max_turns=3)
    assert Limits.of(section, engine_context_tokens=50) == Limits(max_turns=3, max_context_tokens=50)
    assert Limits.of(section, engine_context_tokens=None) == Limits(max_turns=3, max_context_tokens=100)
    assert Limits.of(RolloutSection(), engine_context_tokens=None) == Limits()


async def test_a_token_outside_the_tokenizer_is_an_error(executor: Executor) -> None:
    """The tokenizer is not the served model's; nothing is captured."""
    async with ScriptedEngine(script=lambda ask: Answer(token_ids=[60_000])) as server:
        engine = open_token_engine(EngineSection(kind="vllm", base_urls=[server.url]), vocab_size=None)
        model = make_model(engine, "smollm2", executor)
        with pytest.raises(EngineAnswerError, match=r"tokenizer\.name"):
            await model.complete([user("a")], [], {})
        await engine.close()
    assert model.steps == []


# -- sampling


def test_the_run_s_sampling_wins_over_the_environment_s() -> None:
    """Extras pass from both, the run's on top; what the run or the engine client decides is not the environment's to set."""
    environment: dict[str, Any] = {
        "temperature": 0.1,
        "n": 4,
        "max_tokens": 9,
        "seed": 1,
        "presence_penalty": 1.0,
        "min_p": 0.2,
    }
    environment |= {"extra_body": {"top_k": 5, "logprobs": True, "return_token_ids": True}, "stop": None}
    run = SamplingSection(temperature=0.7, extra={"top_k": 20})
    assert turn_sampling(environment, run, rollout_seed=None, turn=0) == {
        "temperature": 0.7,
        "top_p": 1.0,
        "top_k": 20,
        "presence_penalty": 1.0,
        "min_p": 0.2,
    }


async def test_seeds_differ_by_turn_and_repeat_with_the_rollout_s_seed(executor: Executor) -> None:
    """The same rollout again sends the same seeds; without a seed none is sent. The stop tokens always are."""

    async def seeds(rollout_seed: int | None) -> list[Any]:
        async with token_model(lambda ask: says("x"), executor, rollout_seed=rollout_seed) as (model, server):
            await model.complete([user("a")], [], {"seed": 99})
            await model.complete([user("a"), assistant("x"), user("b")], [], {})
            assert all(record.ask.sampling["stop_token_ids"] == [0, 2] for record in server.records)
            return [record.ask.sampling.get("seed") for record in server.records]

    assert await seeds(5) == await seeds(5) == [derive_seed(5, 0), derive_seed(5, 1)]
    assert derive_seed(5, 0) != derive_seed(5, 1)
    assert await seeds(None) == [None, None]


def test_derived_seeds_are_the_same_for_ever() -> None:
    """Golden values: another derivation would break the repeatability of recorded runs. Parts are kept apart."""
    assert [derive_seed(0), derive_seed(1, 23), derive_seed(12, 3), derive_seed("run", 7)] == [
        1609362278,
        418128801,
        2139742318,
        294607790,
    ]


# -- chat APIs


@asynccontextmanager
async def api_model(
    script: Script, executor: Executor, *, style: str | None = "smollm2", **options: Any
) -> AsyncIterator[tuple[ApiChatModel, ScriptedEngine]]:
    async with ScriptedEngine(script=script) as server:
        engine = open_chat_engine(EngineSection(kind="openai", base_urls=[server.url], model="scripted"))
        settings_: dict[str, Any] = {"sampling": SamplingSection(), "rollout_seed": 3, "limits": Limits(), **options}
        chosen = renderer(style) if style else None
        try:
            yield ApiChatModel(engine, chosen, session="s", executor=executor, **settings_), server
        finally:
            await engine.close()


async def test_an_api_s_turns_are_captured_and_tokenized_later(executor: Executor) -> None:
    """Prompt, tools, answer with reasoning and calls, and usage; then the same turns in tokens."""
    calls = [{"id": "x", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}]
    answers = [Answer(text=None, reasoning="hm", tool_calls=calls, finish_reason="tool_calls"), Answer(text="1")]
    async with api_model(lambda ask: answers[ask.number], executor, style="qwen3_style") as (model, server):
        messages: list[Message] = [user("a")]
        first = await model.complete(messages, [ADD], {})
        messages += [first.message, {"role": "tool", "tool_call_id": "x", "content": "1"}]
        await model.complete(messages, [ADD], {})
        assert server.records[1].ask.messages[-1]["role"] == "tool"
    assert [step.completion.get("reasoning_content") for step in model.steps] == ["hm", None]
    assert model.steps[0].prompt == [user("a")]
    assert model.prompt_tokens == 20
    assert model.engine_s > 0
    steps = tokenize_chat(model.steps, renderer("qwen3_style"))
    texts = [renderer("qwen3_style").decode(step.completion_ids) for step in steps]
    assert texts[0].startswith("<think>\nhm\n</think>")
    assert '"arguments": {"a": 1}' in texts[0]


async def test_an_api_s_context_is_bounded_by_the_training_tokenizer(executor: Executor) -> None:
    """A run's max_context_tokens bounds what a trainer gets, whatever the API's own context is."""
    long = [user("word " * 100)]
    async with api_model(lambda ask: Answer(), executor, limits=Limits(max_context_tokens=50)) as (model, server):
        await model.complete([user("a")], [], {})
        sent = server.records[0].ask.body
        size = len(renderer("smollm2").render([user("a")], []))
        assert (sent.get("max_tokens") or sent.get("max_completion_tokens")) == 50 - size
        with pytest.raises(ContextOverflow):
            await model.complete(long, [], {})


async def test_without_a_tokenizer_the_last_usage_bounds_the_context(executor: Executor) -> None:
    """Evaluation has no tokenizer; a conversation cannot get shorter by going on."""
    async with api_model(
        lambda ask: Answer(prompt_tokens=60), executor, style=None, limits=Limits(max_context_tokens=50)
    ) as (model, _):
        await model.complete([user("a")], [], {})
        with pytest.raises(ContextOverflow):
            await model.complete([user("a"), assistant("ok"), user("b")], [], {})
