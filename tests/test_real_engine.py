"""RL on a real engine with a real small model: what is in the stream is what the engine said, token for token."""

from __future__ import annotations

import json
import math
import re
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import redis

from distaff.types import ScoredGroup
from distaff_consumer.records import group_to_record
from tests.farm_support import play_to_the_end, run_config, tokenizer
from tests.recording_proxy import RecordingProxy
from tests.worker_support import check_oracle

pytestmark = pytest.mark.engine


@pytest.fixture(scope="module")
def engine_url() -> Iterator[str]:
    """llama.cpp's server with SmolLM2-135M, as the demo starts it."""
    command = [sys.executable, "-m", "distaff_worker.demo_engine", "--port", "0", "--parallel", "8"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    try:
        if process.stdout is None:
            raise RuntimeError("no pipe")
        yield str(json.loads(process.stdout.readline())["url"])
    finally:
        process.terminate()
        process.wait(10)


async def play(redis_url: str, url: str, **sections: Any) -> list[ScoredGroup]:
    config = run_config(
        url,
        environment={"id": "guess-number", "args": {"max_turns": 2}},
        engine={"kind": "llamacpp", "start_timeout_s": 20},
        sampling={"max_tokens": 8, "seed": 5},
        rollouts={"group_size": 4, "timeout_s": 100, "group_timeout_s": 110},
        producer={"limit": 2},
        **sections,
    )
    return await play_to_the_end(redis_url, config, seconds=110)


async def test_rl_samples_are_the_engines_own_ids_and_logprobs(
    redis_url: str, client: redis.Redis, engine_url: str
) -> None:
    """Ids decode to the conversation; each sampled token has the log-probability of the engine's raw answer; masks cover exactly what was sampled."""
    async with RecordingProxy(engine_url) as proxy:
        groups = await play(redis_url, proxy.url)
        exchanges = [e for e in proxy.exchanges if e.path == "/completion" and e.request["n_predict"] > 1]
    check_oracle(client, "run-1")
    said = [(e.request["prompt"], *_tokens(e.events())) for e in exchanges]
    assert len(groups) == 2
    multi_turn = 0
    for group in groups:
        for sample in group.samples:
            rollout = group.rollouts[sample.rollout]
            ids, mask, logprobs = sample.token_ids.tolist(), sample.loss_mask, sample.logprobs
            assert logprobs is not None
            for start, end in _spans(mask):
                answers = [
                    logprob for prompt, tokens, logprob in said if (prompt, tokens) == (ids[:start], ids[start:end])
                ]
                assert logprobs[start:end].tolist() in [np.array(answer, np.float32).tolist() for answer in answers]
            assert not logprobs[~mask].any()
            spoken = [m["content"] for m in rollout.messages if m["role"] == "assistant"]
            trained = [tokenizer().decode(ids[start:end], skip_special_tokens=True) for start, end in _spans(mask)]
            assert trained == spoken[: len(trained)]
            multi_turn += len(trained) > 1
            rendered = tokenizer().apply_chat_template(rollout.messages, tokenize=False)
            assert rollout.truncated or rendered.startswith(tokenizer().decode(ids))
        assert len(group.samples) == 4
        _rewards_follow_from_the_messages(group)
    assert multi_turn > 0


def _tokens(events: list[dict[str, Any]]) -> tuple[list[int], list[float]]:
    tokens = [token for event in events for token in event.get("tokens", [])]
    logprobs = [entry["logprob"] for event in events for entry in event.get("completion_probabilities", [])]
    assert len(tokens) == len(logprobs)
    return tokens, logprobs


def _spans(mask: Any) -> list[tuple[int, int]]:
    edges = np.flatnonzero(np.diff(np.concatenate([[0], mask.astype(np.int8), [0]])))
    return [(int(a), int(b)) for a, b in zip(edges[::2], edges[1::2], strict=True)]


def _rewards_follow_from_the_messages(group: ScoredGroup) -> None:
    """The game's reward, computed anew from the archived conversation alone, is the stored one."""
    record = group_to_record(group)
    secret, bounds = int(record["task"]["answer"]), record["task"]["info"]
    for rollout in record["rollouts"]:
        replies = [m["content"] for m in rollout["messages"] if m["role"] == "assistant"]
        found = [re.search(r"-?\d+", reply) for reply in replies]
        guesses = [int(match[0]) if match else None for match in found]
        near = [abs(g - secret) for g in guesses if g is not None and bounds["low"] <= g <= bounds["high"]]
        closeness = 1 - min(near) / (bounds["high"] - bounds["low"]) if near else 0.0
        expected = 0.8 * closeness + 0.2 * (bool(guesses) and guesses[-1] == secret)
        assert math.isclose(rollout["reward"], expected, rel_tol=1e-9)


async def test_sft_on_the_real_engine_trains_what_it_said(redis_url: str, engine_url: str) -> None:
    """SFT through the engine's chat API: the trained text of each sample is the assistant's."""
    groups = await play(redis_url, engine_url, run={"name": "sft-1", "mode": "sft"})
    for group in groups:
        assert group.samples.logprobs is None
        for sample in group.samples:
            rollout = group.rollouts[sample.rollout]
            spoken = [m["content"] for m in rollout.messages if m["role"] == "assistant"]
            text = tokenizer().decode(sample.token_ids[sample.loss_mask].tolist(), skip_special_tokens=True)
            assert text == "".join(spoken)
