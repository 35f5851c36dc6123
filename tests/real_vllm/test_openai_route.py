"""vLLM's OpenAI route gives what its token route gives: the real server, asked on both."""

from __future__ import annotations

from collections.abc import AsyncIterator

import numpy as np
import pytest
from examples.grpo_cpu.vllm_server import CONTEXT_TOKENS

from distaff.errors import ContextOverflow
from distaff_worker.engines.http import HttpPool
from distaff_worker.engines.vllm import CompletionsWire, VllmEngine
from tests.engines_support import section
from tests.real_vllm.support import TOLERANCE, Server

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(240)]
PROMPT = [1, 50, 51, 52]


class OnlyOpenAI(VllmEngine):
    """As against a server without --enable-scale-out."""

    wires = (CompletionsWire(),)


@pytest.fixture
async def engines(vllm: Server) -> AsyncIterator[tuple[VllmEngine, OnlyOpenAI]]:
    config = section(vllm.url, start_timeout_s=20.0)
    both = VllmEngine(HttpPool(config), vocab_size=None), OnlyOpenAI(HttpPool(config), vocab_size=None)
    yield both
    for engine in both:
        await engine.close()


async def test_both_routes_sample_the_same_tokens_with_the_same_logprobs(
    vllm: Server, engines: tuple[VllmEngine, OnlyOpenAI]
) -> None:
    """One seed: equal ids, equal log-probabilities, equal reason; and they are those of a re-score of the ids."""
    checked = [await engine.check() for engine in engines]
    assert [info.route for info in checked] == ["/inference/v1/generate", "/v1/completions"]
    assert {info.logprobs for info in checked} <= {"model", "unknown"}
    for seed, temperature in ((11, 1.0), (12, 0.7)):
        sampling = {"seed": seed, "temperature": temperature}
        one, two = [await e.generate(PROMPT, max_tokens=40, sampling=sampling, session="s") for e in engines]
        assert (one.token_ids, one.logprobs, one.finish_reason) == (two.token_ids, two.logprobs, two.finish_reason)
        again = vllm.rescore([[*PROMPT, *two.token_ids]])[0][len(PROMPT) - 1 :]
        assert np.allclose(again, two.logprobs, atol=TOLERANCE)


async def test_the_stop_token_is_there_and_is_the_end(engines: tuple[VllmEngine, OnlyOpenAI]) -> None:
    """A stop token id that is sampled is the last id, with its log-probability."""
    _, engine = engines
    await engine.check()
    free = await engine.generate(PROMPT, max_tokens=30, sampling={"seed": 3, "ignore_eos": True}, session="s")
    stop = free.token_ids[9]
    first = free.token_ids.index(stop)
    sampling = {"seed": 3, "ignore_eos": True, "stop_token_ids": [stop]}
    got = await engine.generate(PROMPT, max_tokens=30, sampling=sampling, session="s")
    assert (got.token_ids, got.finish_reason) == (free.token_ids[: first + 1], "stop")
    assert got.logprobs == free.logprobs[: first + 1]


async def test_what_does_not_fit_is_an_overflow(engines: tuple[VllmEngine, OnlyOpenAI]) -> None:
    """Also where the client does not know the context and the server has to say it."""
    _, engine = engines
    with pytest.raises(ContextOverflow):
        await engine.generate([1, *[50] * CONTEXT_TOKENS], max_tokens=4, sampling={}, session="s")
