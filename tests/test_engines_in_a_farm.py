"""Each kind of engine through the whole worker: what is in the stream is what the engine said, and what it did not say is flagged."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import redis

from distaff.alignment import LOGPROB_FLOOR
from distaff_worker.attempt import FLOORED
from tests.farm_support import groups_of, make_worker, play_to_the_end, produce, run_config, says
from tests.scripted_engine import Answer, Ask, ScriptedEngine
from tests.worker_support import check_oracle

GENERATE = "/inference/v1/generate"
KINDS = [("vllm", {}), ("vllm", {GENERATE: 403}), ("sglang", {}), ("llamacpp", {})]
NAMES = ["vllm", "vllm on /v1/completions", "sglang", "llamacpp"]


def speaks(ask: Ask) -> Answer:
    """A number that follows from the prompt, with log-probabilities of its own."""
    return says(f"number {sum(ask.prompt_ids) % 97}", logprob=-(sum(ask.prompt_ids) % 1024 + 1) / 1024)


@pytest.mark.parametrize(("kind", "refused"), KINDS, ids=NAMES)
async def test_a_sample_is_what_the_engine_saw_and_sampled(
    redis_url: str, client: redis.Redis, kind: str, refused: dict[str, int]
) -> None:
    """RL, several turns: every sampled span follows its prompt as the engine answered it, with the engine's log-probabilities."""
    async with ScriptedEngine(script=speaks, refused=refused) as engine:
        config = run_config(
            engine.url, engine={"kind": kind}, environment={"args": {"rows": 2, "turns": 3}}, rollouts={"group_size": 2}
        )
        groups = await play_to_the_end(redis_url, config)
        said = {tuple(r.ask.prompt_ids): r.reply for r in engine.records if isinstance(r.reply, Answer)}
    assert len(groups) == 2
    for group in groups:
        for sample in group.samples:
            assert sample.logprobs is not None
            ids = sample.token_ids.tolist()
            edges = np.flatnonzero(np.diff(np.concatenate([[0], sample.loss_mask.astype(np.int8), [0]]))).tolist()
            spans = list(zip(edges[::2], edges[1::2], strict=True))
            assert len(spans) == 3
            for start, end in spans:
                answer = said[tuple(ids[:start])]
                assert ids[start:end] == answer.token_ids
                assert sample.logprobs[start:end].tolist() == answer.logprobs
            assert FLOORED not in group.rollouts[sample.rollout].metrics
    check_oracle(client, "run-1")


@pytest.mark.parametrize("kind", ["vllm", "sglang"])
async def test_a_floored_logprob_is_flagged_on_its_rollout_and_counted_by_the_worker(
    redis_url: str, client: redis.Redis, kind: str
) -> None:
    """The token is in its place with the floor; the rollout says how many; the others say nothing."""

    def script(ask: Ask) -> Answer:
        answer = speaks(ask)
        if engine.count % 2 or answer.logprobs is None:
            return answer
        return dataclasses.replace(answer, logprobs=[None, *answer.logprobs[1:-1], -9999.0])  # type: ignore[list-item]

    async with ScriptedEngine(script=script) as engine:
        config = run_config(
            engine.url,
            engine={"kind": kind},
            environment={"args": {"rows": 2, "turns": 1}},
            rollouts={"group_size": 4},
        )
        await produce(redis_url, config)
        service, metrics = make_worker(redis_url, burst=True)
        await service.run()
    groups = groups_of(client, "run-1")
    flagged = 0.0
    for group in groups:
        for sample in group.samples:
            assert sample.logprobs is not None
            floored = np.flatnonzero(sample.logprobs <= LOGPROB_FLOOR)
            assert sample.logprobs[floored].tolist() == [LOGPROB_FLOOR] * len(floored)
            assert sample.loss_mask[floored].all()
            assert group.rollouts[sample.rollout].metrics.get(FLOORED, 0.0) == len(floored)
            flagged += len(floored)
    assert 0 < flagged < 2 * sum(len(group.samples) for group in groups)
    assert metrics.registry.get_sample_value("distaff_floored_logprobs_total") == flagged


@pytest.mark.parametrize("mode", ["sft", "eval"])
async def test_sglang_plays_sft_and_evaluation_by_its_chat_route(redis_url: str, mode: str) -> None:
    """As every kind does."""
    async with ScriptedEngine(script=lambda ask: says("number 4")) as engine:
        config = run_config(
            engine.url, run={"mode": mode}, engine={"kind": "sglang"}, rollouts={"group_size": 1, "min_rollouts": 1}
        )
        groups = await play_to_the_end(redis_url, config)
        assert {record.ask.path for record in engine.records} == {"/v1/chat/completions"}
    assert {rollout.reward for group in groups for rollout in group.rollouts} == {4.0}
    assert all(group.samples.logprobs is None for group in groups)
