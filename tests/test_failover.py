"""P11: a rollout whose server dies in the middle goes on at the other one, and every token stays with its own log-probability."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest

from distaff.errors import ContextOverflow
from distaff_worker.engines import open_chat_engine, open_token_engine
from distaff_worker.engines.endpoints import Endpoints
from distaff_worker.engines.protocol import TokenEngine
from tests.engines_support import TOKEN_KINDS, section
from tests.engines_support import short_backoff as short_backoff
from tests.scripted_engine import Answer, Ask, Fault, Reply, ScriptedEngine

pytestmark = pytest.mark.usefixtures("short_backoff")

TURNS = 4
SESSIONS = 12
GENERATE = "/inference/v1/generate"
TOKENS: list[tuple[str, dict[str, int]]] = [(kind, {}) for kind in TOKEN_KINDS] + [("vllm", {GENERATE: 404})]


def answer_to(prompt: list[int], where: int) -> Answer:
    """Two tokens that follow from the prompt alone, with log-probabilities that name prompt and server."""
    first = 10 + sum(prompt) % 80
    return Answer(token_ids=[first, 2], logprobs=[-float(sum(prompt)) - where / 4, -float(len(prompt)) - where / 4])


class Pair:
    """Two servers. One dies at its `dies_at`th request: it cuts that answer in the middle, and does not come back."""

    def __init__(self, dies_at: int, refused: dict[str, int]) -> None:
        self.dies_at = dies_at
        self.asked = 0
        self.died = asyncio.Event()
        self.mortal = ScriptedEngine(script=self._mortal, refused=refused)
        self.other = ScriptedEngine(script=lambda ask: self._answer(ask, 1), refused=refused)

    def _answer(self, ask: Ask, where: int) -> Reply:
        return answer_to(ask.prompt_ids, where) if len(ask.prompt_ids) > 1 else Answer(token_ids=[5])

    def _mortal(self, ask: Ask) -> Reply:
        if len(ask.prompt_ids) == 1:
            return self._answer(ask, 0)
        self.asked += 1
        if self.asked < self.dies_at:
            return self._answer(ask, 0)
        self.died.set()
        return Fault(hang="cut", body=b'data: {"tokens": [7]' if ask.path == "/completion" else b'{"choices": [{"tok')


def sessions(mortal: str, other: str) -> list[str]:
    """Names of sessions, half of which belong to each server."""
    endpoints = Endpoints([mortal, other], clock=lambda: 0.0, rng=random.Random(0))
    of: dict[str, list[str]] = {mortal: [], other: []}
    for n in range(1000):
        of[endpoints.choose(f"s{n}").url].append(f"s{n}")
    return of[mortal][: SESSIONS // 2] + of[other][: SESSIONS // 2]


async def play(engine: TokenEngine, session: str) -> tuple[list[list[int]], list[Any]]:
    """A rollout of several turns, each prompt the last one's tokens and one more."""
    prompt, prompts, answers = [3, 50 + int(session[1:])], [], []
    for turn in range(TURNS):
        got = await engine.generate(prompt, max_tokens=8, sampling={}, session=session)
        prompts.append(prompt)
        answers.append(got)
        prompt = [*prompt, *got.token_ids, turn]
    return prompts, answers


@pytest.mark.parametrize(("kind", "refused"), TOKENS, ids=["vllm", "sglang", "llamacpp", "vllm on /v1/completions"])
async def test_rollouts_go_on_at_the_other_server_with_their_own_tokens(kind: str, refused: dict[str, int]) -> None:
    """Every turn's ids and log-probabilities are the answer of one server to exactly that turn's prompt."""
    pair = Pair(dies_at=8, refused=refused)
    async with pair.mortal, pair.other:
        engine = open_token_engine(section(pair.mortal, pair.other, kind=kind), vocab_size=100)
        await engine.check()
        names = sessions(pair.mortal.url, pair.other.url)
        played = await asyncio.gather(*(play(engine, name) for name in names))
        await engine.close()
    assert pair.died.is_set()
    served = set()
    moved = 0
    for prompts, answers in played:
        places = []
        for prompt, got in zip(prompts, answers, strict=True):
            place = next(w for w in (0, 1) if got.logprobs == answer_to(prompt, w).logprobs)
            assert got.token_ids == answer_to(prompt, place).token_ids
            places.append(place)
        served |= set(places)
        moved += places[0] == 0 and places[-1] == 1
        assert places == sorted(places), "a session came back to a server that is dead"
    assert served == {0, 1}
    assert moved


async def test_a_chat_goes_on_at_the_other_server() -> None:
    """The same for SFT and evaluation: each reply belongs to the messages that were sent."""
    dead = False

    def reply(ask: Ask) -> Reply:
        return Answer(text="re: " + str(ask.messages[-1]["content"]))

    def mortal(ask: Ask) -> Reply:
        return Fault(hang="cut", body=b'{"choices": [') if dead else reply(ask)

    async with ScriptedEngine(script=mortal) as first, ScriptedEngine(script=reply) as second:
        engine = open_chat_engine(section(first, second, kind="sglang", model="scripted"))
        for turn in range(3):
            dead = turn > 0
            names = sessions(first.url, second.url)
            texts = [f"{name} {turn}" for name in names]
            got = await asyncio.gather(
                *(
                    engine.chat([{"role": "user", "content": text}], tools=[], max_tokens=8, sampling={}, session=name)
                    for name, text in zip(names, texts, strict=True)
                )
            )
            assert [one.message["content"] for one in got] == [f"re: {text}" for text in texts]
        assert first.count
        assert second.count
        await engine.close()


@pytest.mark.parametrize(("kind", "refused"), TOKENS, ids=["vllm", "sglang", "llamacpp", "vllm on /v1/completions"])
async def test_the_smallest_context_of_all_servers_counts(kind: str, refused: dict[str, int]) -> None:
    """A rollout that moves must fit where it goes."""
    async with (
        ScriptedEngine(max_model_len=100, refused=refused) as large,
        ScriptedEngine(max_model_len=8, refused=refused) as small,
    ):
        engine = open_token_engine(section(large, small, kind=kind), vocab_size=100)
        assert (await engine.check()).max_context_tokens == 8
        with pytest.raises(ContextOverflow):
            await engine.generate([1] * 8, max_tokens=1, sampling={}, session="s")
        await engine.close()
