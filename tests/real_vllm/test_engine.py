"""distaff's engine against the real vLLM: who it is, its limits, cancelled requests, exchanged weights."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
from examples.grpo_cpu.vllm_server import CONTEXT_TOKENS, MODEL_NAME

from distaff.errors import ContextOverflow, EngineRefused
from distaff_worker.engines import open_token_engine
from distaff_worker.engines.protocol import Generation, TokenEngine
from tests.engines_support import section
from tests.farm_support import tokenizer_dir
from tests.real_vllm.support import Server

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]
PROMPT = [1, 50, 51, 52]
LONG = 400


@pytest.fixture
async def engine(vllm: Server) -> AsyncIterator[TokenEngine]:
    opened = open_token_engine(section(vllm.url, start_timeout_s=20.0), vocab_size=None)
    await opened.check()
    yield opened
    await opened.close()


async def running(server: Server) -> bool:
    return await asyncio.to_thread(server.running) > 0


def long_answer(engine: TokenEngine, name: str = "long") -> asyncio.Task[Generation]:
    """A request that does not stop by itself for a second or more."""
    sampling = {"ignore_eos": True}
    return asyncio.create_task(engine.generate(PROMPT, max_tokens=LONG, sampling=sampling, session=name))


async def test_the_check_names_version_model_and_context(vllm: Server) -> None:
    """And the tokenizer is compared with the server's own."""
    from transformers import AutoTokenizer

    mine = AutoTokenizer.from_pretrained(str(vllm.folder))
    engine = open_token_engine(
        section(vllm.url), vocab_size=len(mine), encode=lambda text: mine(text, add_special_tokens=False).input_ids
    )
    info = await engine.check()
    await engine.close()
    assert (info.kind, info.model, info.max_context_tokens) == ("vllm", MODEL_NAME, CONTEXT_TOKENS)
    assert info.version.startswith("0.32")


async def test_a_tokenizer_of_another_model_is_refused(vllm: Server) -> None:
    """SmolLM2's tokenizer does not fit a byte model."""
    from transformers import AutoTokenizer

    other = AutoTokenizer.from_pretrained(tokenizer_dir())
    engine = open_token_engine(
        section(vllm.url), vocab_size=None, encode=lambda text: other(text, add_special_tokens=False).input_ids
    )
    with pytest.raises(EngineRefused, match="tokenizer"):
        await engine.check()
    await engine.close()


async def test_a_seed_gives_the_same_tokens_again(engine: TokenEngine) -> None:
    """Ids and log-probabilities, on a server that is doing nothing else."""
    first, second = [await engine.generate(PROMPT, max_tokens=40, sampling={"seed": 11}, session="s") for _ in range(2)]
    assert (first.token_ids, first.logprobs) == (second.token_ids, second.logprobs)


async def test_what_does_not_fit_the_context_is_cut_or_refused(engine: TokenEngine) -> None:
    """prompt + completion never exceeds it, and a prompt without room is an overflow."""
    prompt = [1, *[50] * (CONTEXT_TOKENS - 6)]
    answer = await engine.generate(prompt, max_tokens=64, sampling={"ignore_eos": True}, session="s")
    assert (len(answer.token_ids), answer.finish_reason) == (5, "length")
    with pytest.raises(ContextOverflow):
        await engine.generate([1, *[50] * CONTEXT_TOKENS], max_tokens=4, sampling={}, session="s")


async def test_a_cancelled_request_frees_its_slot(vllm: Server, engine: TokenEngine) -> None:
    """The server stops sampling: of 16 long answers most tokens are never made."""
    before = vllm.metric("vllm:generation_tokens_total")
    tasks = [long_answer(engine, f"c{n}") for n in range(16)]
    while not await running(vllm):
        assert not any(task.done() for task in tasks)
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)
    end = asyncio.get_running_loop().time() + 10
    while await running(vllm):
        assert asyncio.get_running_loop().time() < end, "the server goes on"
    assert vllm.metric("vllm:generation_tokens_total") - before < 16 * LONG / 2


async def test_weights_exchanged_in_flight_are_named_in_the_answer(vllm: Server, engine: TokenEngine) -> None:
    """An answer that began with one version and ended with another says both; the next one says the new one."""
    with vllm.control.new_weights(vllm.folder, version=6):
        pass
    task = long_answer(engine)
    while not await running(vllm):
        assert not task.done()
    await asyncio.to_thread(_exchange, vllm)
    answer = await task
    assert answer.policy_version == "6>7"
    assert len(answer.token_ids) == len(answer.logprobs) == LONG
    after = await engine.generate(PROMPT, max_tokens=4, sampling={}, session="s")
    assert after.policy_version == "7"


def _exchange(server: Server) -> None:
    with server.control.new_weights(server.folder, version=7):
        assert server.running() > 0
