"""Whole rollouts on the real vLLM: what is in the stream is what the engine said, and what a re-score of the same ids says."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest
import redis
from transformers import AutoTokenizer

from distaff.keys import RunKeys
from distaff.policy import publish_policy_version
from distaff.types import ScoredGroup
from tests.farm_support import groups_of, play_to_the_end, settled, working_on
from tests.real_vllm.support import TOLERANCE, Server, spans, torch_rescore, vllm_run
from tests.recording_proxy import RecordingProxy
from tests.worker_support import check_oracle, until

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]

ENVIRONMENTS: dict[str, dict[str, Any]] = {
    "single-turn": {"id": "examples.grpo_cpu.sums", "args": {"largest": 2}},
    "multi-turn": {"id": "tests.real_vllm.talk_env"},
    "tools": {"id": "tests.real_vllm.adder_env"},
}
Said = dict[tuple[tuple[int, ...], tuple[int, ...]], list[list[float]]]


@pytest.mark.parametrize("kind", ENVIRONMENTS)
async def test_stored_ids_and_logprobs_are_the_engines_and_those_of_a_rescore(
    redis_url: str, client: redis.Redis, vllm: Server, kind: str
) -> None:
    """Each trained span is one answer of the engine, bit for bit; vLLM and torch, given the ids, agree within TOLERANCE."""
    async with RecordingProxy(vllm.url) as proxy:
        config = vllm_run(proxy.url, vllm.folder, environment=ENVIRONMENTS[kind])
        groups = await play_to_the_end(redis_url, config, seconds=120)
        said = _said(proxy)
    check_oracle(client, "run-1")
    _spans_are_answers(groups, said)
    _prompts_extend_each_other(groups, kind)
    worst = await asyncio.to_thread(_worst_difference, vllm, groups)
    print(f"{kind}: {sum(len(group.samples) for group in groups)} samples, worst difference {worst}")
    assert max(worst.values()) < TOLERANCE


def _said(proxy: RecordingProxy) -> Said:
    """(prompt, completion) -> log-probabilities, as float32, of every answer but the probe's."""
    answers: Said = {}
    for exchange in proxy.exchanges:
        if exchange.path == "/inference/v1/generate" and exchange.request["sampling_params"]["max_tokens"] > 1:
            choice = exchange.events()[0]["choices"][0]
            logprobs = [entry["logprob"] for entry in choice["logprobs"]["content"]]
            key = (tuple(exchange.request["token_ids"]), tuple(choice["token_ids"]))
            answers.setdefault(key, []).append(np.array(logprobs, np.float32).tolist())
    return answers


def _spans_are_answers(groups: list[ScoredGroup], said: Said) -> None:
    for group in groups:
        for sample in group.samples:
            ids, logprobs = sample.token_ids.tolist(), sample.logprobs
            assert logprobs is not None
            assert not logprobs[~sample.loss_mask].any()
            for start, end in spans(sample.loss_mask):
                assert logprobs[start:end].tolist() in said[tuple(ids[:start]), tuple(ids[start:end])]


def _prompts_extend_each_other(groups: list[ScoredGroup], kind: str) -> None:
    """One sample for each rollout, with as many trained spans as turns; the tool was called and its result is in the context."""
    turns = 0
    for group in groups:
        for sample in group.samples:
            rollout = group.rollouts[sample.rollout]
            assert len(spans(sample.loss_mask)) == rollout.turns
            turns = max(turns, rollout.turns)
        assert len(group.samples) == len(group.rollouts)
    assert turns == {"single-turn": 1, "multi-turn": 3, "tools": turns}[kind]
    if kind == "tools":
        used = [m for group in groups for r in group.rollouts for m in r.messages if m["role"] == "tool"]
        assert used
        assert all(str(message["content"]).isdigit() for message in used[:1])


def _worst_difference(server: Server, groups: list[ScoredGroup]) -> dict[str, float]:
    samples = [sample for group in groups for sample in group.samples]
    sequences = [sample.token_ids.tolist() for sample in samples]
    worst = {}
    for name, scores in (("vllm", server.rescore(sequences)), ("torch", torch_rescore(server.folder, sequences))):
        gaps = []
        for sample, again in zip(samples, scores, strict=True):
            trained = sample.loss_mask[1:]
            assert sample.logprobs is not None
            gaps.append(np.abs(sample.logprobs[1:] - np.array(again))[trained].max())
        worst[name] = float(max(gaps))
    return worst


async def test_a_policy_published_while_a_group_is_played_is_in_its_span(
    redis_url: str, client: redis.Redis, vllm: Server
) -> None:
    """Weights exchanged and published between two turns of a group: the group says from which version to which."""
    config = vllm_run(
        vllm.url,
        vllm.folder,
        environment={"id": "tests.real_vllm.talk_env", "args": {"rows": 1, "turns": 16, "between_s": 0.5}},
    )
    before = vllm.metric("vllm:generation_tokens_total")
    async with working_on(redis_url, config):
        await _until_sampling(vllm, before)
        await asyncio.to_thread(_publish, vllm, client)
        await until(lambda: settled(client, "run-1"), seconds=60)
    (group,) = groups_of(client, "run-1")
    assert (group.policy.start, group.policy.end) == (0, 3)


def _publish(server: Server, client: redis.Redis) -> None:
    with server.control.new_weights(server.folder, version=3):
        publish_policy_version(client, "run-1", 3)


async def _until_sampling(server: Server, before: float) -> None:
    """Return when more tokens were sampled than the worker's check asks for."""
    end = asyncio.get_running_loop().time() + 120
    while await asyncio.to_thread(server.metric, "vllm:generation_tokens_total") < before + 4:
        assert asyncio.get_running_loop().time() < end, "nothing reached the engine"


async def test_a_rollout_that_fills_the_context_is_truncated_and_kept(
    redis_url: str, client: redis.Redis, vllm: Server
) -> None:
    """prompt + completion ends at the engine's context; no dead letter, no error."""
    config = vllm_run(
        vllm.url,
        vllm.folder,
        environment={"id": "tests.real_vllm.talk_env", "args": {"rows": 2, "turns": 20}},
        sampling={"max_tokens": 200, "extra": {"ignore_eos": True}},
    )
    groups = await play_to_the_end(redis_url, config, seconds=120)
    assert len(groups) == 2
    for group in groups:
        assert {rollout.verdict for rollout in group.rollouts} == {"truncated"}
        assert all(len(sample.token_ids) <= 512 for sample in group.samples)
    assert not client.exists(RunKeys("run-1").dead)


async def test_sft_through_the_chat_route_trains_what_was_said(redis_url: str, vllm: Server) -> None:
    """The trained text of each sample is the assistant's, and its end."""
    config = vllm_run(
        vllm.url, vllm.folder, run={"mode": "sft"}, environment={"id": "tests.real_vllm.talk_env", "args": {"rows": 2}}
    )
    tokenizer = AutoTokenizer.from_pretrained(str(vllm.folder))
    groups = await play_to_the_end(redis_url, config, seconds=120)
    assert len(groups) == 2
    for group in groups:
        assert group.samples.logprobs is None
        for sample in group.samples:
            rollout = group.rollouts[sample.rollout]
            spoken = [m["content"] for m in rollout.messages if m["role"] == "assistant"]
            trained = [tokenizer.decode(sample.token_ids[a:b].tolist()) for a, b in spans(sample.loss_mask)]
            assert trained == [f"{text}<|im_end|>" for text in spoken]
