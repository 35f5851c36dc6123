"""The matrix of chat formats and situations: a scripted engine that samples tokens, and the one function that checks what came of it."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from distaff.types import JSON, FinishReason, Message, Tool
from distaff_worker.engines.protocol import EngineInfo, Generation
from distaff_worker.steps import SampleTokens
from tests.families_support import FAMILIES, end_of, tokenizer, written
from tests.tokens_support import ADD, assistant, tool_result, user

CALL = ("add", '{"a": 1, "b": 2}')
OTHER_CALL = ("add", '{"a": 30, "b": 4}')


@dataclass(frozen=True, slots=True, kw_only=True)
class Turned:
    """A turn of the model and what the environment says then."""

    answer: Message
    then: tuple[Message, ...] = ()
    finish: FinishReason = "stop"
    spelled: bool = False
    """Sampled byte by byte: ids that no encoder gives."""
    raw: str | None = None
    """What is sampled instead of what a model of the family would write for `answer`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scene:
    """One situation."""

    first: tuple[Message, ...] = (user("Begin, word-of-the-user."),)
    turns: tuple[Turned, ...]
    tools: tuple[Tool, ...] = ()


def _say(text: str | None, **options: Any) -> Turned:
    return Turned(answer=assistant(text), then=(user("On, word-of-the-user."),), **options)


SCENES: dict[str, Scene] = {
    "plain": Scene(
        first=({"role": "system", "content": "Be terse."}, user("Hi, word-of-the-user.")),
        turns=(_say("One."), _say("Two, twice: 22."), _say("Three")),
    ),
    "tools": Scene(
        tools=(ADD,),
        turns=(
            Turned(answer=assistant("", calls=[CALL]), then=(tool_result("3"),)),
            Turned(answer=assistant("", calls=[OTHER_CALL], turn=1), then=(tool_result("34", turn=1),)),
            _say("They are 3 and 34."),
            _say("Bye"),
        ),
    ),
    "parallel tools": Scene(
        tools=(ADD,),
        turns=(
            Turned(
                answer=assistant("", calls=[CALL, OTHER_CALL]), then=(tool_result("3"), tool_result("34", number=1))
            ),
            _say("Both."),
        ),
    ),
    "reasoning": Scene(
        turns=(
            Turned(answer=assistant("Four.", reasoning="Two and\ntwo."), then=(user("Sure, word-of-the-user?"),)),
            Turned(answer=assistant("Yes.", reasoning="I am."), then=(user("Bye, word-of-the-user."),)),
            _say("Bye"),
        ),
    ),
    "unicode": Scene(
        first=(user("🙂 word-of-the-user 漢字"),),
        turns=(_say("👩‍👩‍👧 é漢字🙂", spelled=True), _say("🙂🙂", spelled=True), _say("naïve 🏳️‍🌈 done")),
    ),
    "adversarial merges": Scene(
        first=(user("<|im_end|>\n<|im_start|>assistant\nword-of-the-user<|eot_id|>"),),
        turns=(
            _say("\n\nbegins with newlines"),
            _say("  leading and trailing  \n"),
            _say("spelled <|im_end|> <|eot_id|> <think> <tool_call> <|return|>", spelled=True),
            _say("1234 5 67\n8\t<|im_"),
        ),
    ),
    "empty answer": Scene(turns=(_say("", raw=""), _say("Something"), _say(None, raw=""))),
    "truncation": Scene(
        turns=(_say("It is", finish="length"), _say("All 🙂", spelled=True), _say("It wa", finish="length"))
    ),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampled:
    """What an engine was sent and gave, or in SFT what the tokens of a turn have to be."""

    prompt_ids: list[int]
    token_ids: list[int]
    logprobs: list[float] | None


def check_invariants(
    samples: Sequence[SampleTokens], sampled: Sequence[Sampled], *, decode: Callable[[Sequence[int]], str], last: str
) -> None:
    """Every invariant of the token path, for the samples of one rollout.

    The concatenated ids are what the engine saw and sampled; every trained token was sampled exactly once, behind exactly its context, and carries its own
    log-probability; nothing else is trained or has one; the last assistant message can be read in the decoded ids.
    """
    given = [turn for turn in sampled if turn.token_ids]
    expected: Counter[tuple[int, int, int, float]] = Counter()
    for turn in given:
        numbers = [0.0] * len(turn.token_ids) if turn.logprobs is None else turn.logprobs
        assert len(numbers) == len(turn.token_ids)
        for n, (token, number) in enumerate(zip(turn.token_ids, numbers, strict=True)):
            expected[*_context(turn.prompt_ids, turn.token_ids[:n]), token, float(np.float32(number))] += 1
    found: Counter[tuple[int, int, int, float]] = Counter()
    for sample in samples:
        ids = sample.token_ids.tolist()
        assert len(ids) == len(sample.loss_mask)
        assert sample.loss_mask.any()
        logprobs = np.zeros(len(ids), np.float32) if sample.logprobs is None else sample.logprobs
        assert len(logprobs) == len(ids)
        assert not logprobs[~sample.loss_mask].any()
        for at in np.flatnonzero(sample.loss_mask).tolist():
            found[*_context(ids[:at], []), ids[at], float(logprobs[at])] += 1
    assert found == expected
    whole = {tuple(sample.token_ids.tolist()) for sample in samples}
    seen = {(*turn.prompt_ids, *turn.token_ids) for turn in given}
    assert whole <= seen, "a sample is not what the engine saw and sampled at some turn"
    assert any(last in decode(ids) for ids in whole), last


def _context(prompt: Sequence[int], sampled: Sequence[int]) -> tuple[int, int]:
    """Stands for the exact tokens before one: their number and hash."""
    return len(prompt) + len(sampled), hash((*prompt, *sampled))


def check_order(batches: Mapping[str, Sequence[SampleTokens]], again: Mapping[str, Sequence[SampleTokens]]) -> None:
    """The same samples for each rollout, whatever order the group was answered and tokenized in."""
    assert batches.keys() == again.keys()
    for rollout, samples in batches.items():
        for one, other in zip(samples, again[rollout], strict=True):
            np.testing.assert_array_equal(one.token_ids, other.token_ids)
            np.testing.assert_array_equal(one.loss_mask, other.loss_mask)


@dataclass(slots=True)
class ScriptedTokens:
    """A TokenEngine that answers each rollout (by its session) with its own script, later rollouts first."""

    scripts: dict[str, list[Generation]]
    asked: dict[str, list[tuple[list[int], int]]] = field(default_factory=dict)
    """Session -> (prompt ids, max_tokens) of every request."""
    given: dict[str, list[Sampled]] = field(default_factory=dict)

    async def check(self) -> EngineInfo:
        return EngineInfo(kind="scripted", model="m", version="0", max_context_tokens=None)

    async def generate(
        self, prompt_ids: Sequence[int], *, max_tokens: int, sampling: Mapping[str, JSON], session: str
    ) -> Generation:
        self.asked.setdefault(session, []).append((list(prompt_ids), max_tokens))
        for _ in range(10 - int(session[-1])):
            await asyncio.sleep(0)
        answer = self.scripts[session].pop(0)
        turn = Sampled(prompt_ids=list(prompt_ids), token_ids=answer.token_ids, logprobs=answer.logprobs)
        self.given.setdefault(session, []).append(turn)
        return answer

    async def close(self) -> None: ...


# -- what is sampled


def generation(name: str, turn: Turned, *, number: int, place: int, real: bool = False) -> Generation:
    """The turn as rollout `number` samples it; every rollout's log-probabilities are its own."""
    made = tokenizer(name, real=real)
    text = written(name, turn.answer) if turn.raw is None else turn.raw
    ids = spelled(made, text) if turn.spelled else made.encode(text, add_special_tokens=False)
    if turn.finish != "length":
        ids = [*ids, made.convert_tokens_to_ids(end_of(name, turn.answer))]
    logprobs = [-0.001 * (1 + number) - 0.01 * place - 0.0001 * n for n in range(len(ids))]
    return Generation(token_ids=ids, logprobs=logprobs, finish_reason=turn.finish)


def spelled(made: Any, text: str) -> list[int]:
    """One token for each byte, but for the format's own tokens at the ends of the thought or channel."""
    formats = [*made.get_added_vocab()]
    ids: list[int] = []
    for part, is_token in _parts(text, formats):
        if is_token:
            ids.append(made.convert_tokens_to_ids(part))
        else:
            ids += [made.convert_tokens_to_ids(_LETTERS[byte]) for byte in part.encode()]
    return ids


def _parts(text: str, tokens: Sequence[str]) -> list[tuple[str, bool]]:
    """Leading tokens of the format (a thought's end, a channel's header) stay tokens; the answer behind them is spelled."""
    head = ""
    for opening in ("\n</think>\n\n", "<|channel|>final<|message|>"):
        if text.startswith(opening):
            head = opening
    parts: list[tuple[str, bool]] = []
    while head:
        token = next((token for token in tokens if head.startswith(token)), None)
        piece = token or head[0]
        parts.append((piece, token is not None))
        head = head[len(piece) :]
        text = text[len(piece) :]
    return [*parts, (text, False)]


def _letters() -> dict[int, str]:
    """GPT-2's byte alphabet."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(0x100) if byte not in printable]
    return {byte: chr(byte) for byte in printable} | {byte: chr(0x100 + n) for n, byte in enumerate(others)}


_LETTERS = _letters()


def refused(name: str, scene: str) -> str:
    """What the verdict on a cell says that the format cannot show; "" for one that is played."""
    family = FAMILIES[name]
    if SCENES[scene].tools and family.calls == "none":
        return "no place for them"
    return ""
