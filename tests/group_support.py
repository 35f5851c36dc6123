"""Builds realistic random scored groups for tests and benchmarks. The same seed gives the same group."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import fields, replace
from typing import Any

import numpy as np
import redis

from distaff.keys import RunKeys, job_id
from distaff.types import (
    EnvironmentRef,
    GroupStatistics,
    Message,
    Mode,
    PolicySpan,
    Rollout,
    RolloutFailure,
    SampleArrays,
    ScoredGroup,
    Tool,
    TrainingSample,
)
from distaff.wire import SCHEMA, encode_group

WORDS = [
    "the",
    "model",
    "weighs",
    "two",
    "apples",
    "against",
    "three",
    "pears",
    "and",
    "says",
    "that",
    "seven",
    "is",
    "prime",
    "\u2028",
    "été",
    "😀",
]
TOOLS: list[Tool] = [
    {
        "type": "function",
        "function": {
            "name": "calculate",
            "description": "Evaluate an expression.",
            "parameters": {"type": "object", "properties": {"expression": {"type": "string"}}},
        },
    }
]


def make_group(
    *,
    run: str = "run",
    seq: int = 0,
    mode: Mode = "rl",
    rollouts: int = 8,
    tokens: int = 96,
    branches: int = 1,
    turns: int = 2,
    messages: bool = True,
    failed: int = 0,
    vocab_size: int = 32_000,
    seed: int | None = None,
    **changes: Any,
) -> ScoredGroup:
    """A group of `rollouts` plays, each of `branches` samples of `tokens` tokens (none in eval mode).

    failed: so many of the last rollouts carry an error, no reward and no samples. seed: of the random numbers, `seq` unless
    given. changes: fields of ScoredGroup set to something else at the end.
    """
    rng = np.random.default_rng(seq if seed is None else seed)
    rewards = rng.choice([0.0, 0.5, 1.0], size=rollouts - failed)
    mean = float(rewards.mean()) if len(rewards) else 0.0
    plays = [
        _rollout(rng, i, float(rewards[i]) if i < len(rewards) else None, turns=turns, tokens=tokens, messages=messages)
        for i in range(rollouts)
    ]
    samples = [
        _sample(rng, i, branch, advantage=float(rewards[i]) - mean, tokens=tokens, mode=mode, vocab_size=vocab_size)
        for i in range(0 if mode == "eval" else len(rewards))
        for branch in range(branches)
    ]
    arrays = SampleArrays.concatenate(samples, with_logprobs=mode == "rl")
    group = ScoredGroup(
        schema=SCHEMA,
        run=run,
        seq=seq,
        group_id=job_id(run, seq),
        key=f"arithmetic/0.1.0/0123456789abcdef/train/{seq}",
        environment=EnvironmentRef(
            id="arithmetic", version="0.1.0", api="v1", split="train", args_hash="0123456789abcdef"
        ),
        mode=mode,
        model="small-model",
        tokenizer="small-tokenizer",
        vocab_size=vocab_size,
        temperature=1.0,
        policy=PolicySpan(start=3, end=4),
        epoch=0,
        seed=int(rng.integers(1 << 31)),
        task={"question": "What is 2 + 2?", "answer": "4", "info": {"level": 3}} if messages else {},
        verdict="kept",
        rollouts=plays,
        samples=arrays,
        statistics=_statistics(rewards, rollouts, arrays),
        execution=f"{seq:032x}",
        worker="host-1",
        attempt=1,
        created=1_790_000_000.25 + seq,
    )
    return replace(group, **changes)


def assert_same_group(one: ScoredGroup, other: ScoredGroup) -> None:
    """Fail unless the groups are equal, dtypes of the arrays included."""
    for name in (field.name for field in fields(ScoredGroup) if field.name != "samples"):
        assert getattr(one, name) == getattr(other, name), name
    for name in (field.name for field in fields(SampleArrays)):
        left, right = getattr(one.samples, name), getattr(other.samples, name)
        assert (left is None) == (right is None), name
        if left is not None:
            assert left.dtype == right.dtype, name
            np.testing.assert_array_equal(left, right, err_msg=name)


def as_read(entry: Mapping[Any, Any]) -> dict[bytes, bytes]:
    """The fields of `encode_group` as redis-py returns them."""
    return {
        str(key).encode(): value if isinstance(value, bytes) else str(value).encode() for key, value in entry.items()
    }


def append_groups(
    client: redis.Redis, groups: Iterable[ScoredGroup], *, close: bool = True, **options: Any
) -> list[str]:
    """Append to the run's stream and count in its state as workers do, and close the run; the entry ids."""
    ids = []
    for group in groups:
        keys = RunKeys(group.run)
        entry_id = client.xadd(keys.groups, encode_group(group, **options))
        ids.append(entry_id.decode() if isinstance(entry_id, bytes) else str(entry_id))
        client.hincrby(keys.state, "admitted", 1)
        client.hincrby(keys.state, "emitted", 1)
        client.hsetnx(keys.state, "opened", "1790000000.0")
    client.hset(keys.state, "status", "closed" if close else "open")
    return ids


def _rollout(
    rng: np.random.Generator, index: int, reward: float | None, *, turns: int, tokens: int, messages: bool
) -> Rollout:
    failed = reward is None
    return Rollout(
        index=index,
        verdict="environment_error" if failed else "ok",
        reward=reward,
        metrics={} if reward is None else {"correct": reward, "format": float(rng.random())},
        turns=turns,
        finish_reason="none" if failed else "stop",
        stop_condition="" if failed else "max_turns_reached",
        truncated=False,
        error=RolloutFailure(kind="environment_error", boundary="tool:calculate", message="ZeroDivisionError: 1 / 0")
        if failed
        else None,
        timings={"setup": 0.01, "engine": float(rng.exponential(2)), "score": 0.002, "total": 3.25},
        prompt_tokens=int(rng.integers(10, 1000)),
        completion_tokens=tokens // 2,
        messages=_conversation(rng, turns) if messages else [],
        tools=TOOLS if messages else [],
        answer=None if failed else "4",
    )


def _conversation(rng: np.random.Generator, turns: int) -> list[Message]:
    def text() -> str:
        return " ".join(rng.choice(WORDS, size=12))

    conversation: list[Message] = [{"role": "system", "content": "You are a careful calculator."}]
    for turn in range(turns):
        call = {"id": f"call_{turn}", "type": "function", "function": {"name": "calculate", "arguments": '{"x": 1}'}}
        conversation += [
            {"role": "user", "content": text()},
            {"role": "assistant", "content": None, "reasoning_content": text(), "tool_calls": [call]},
            {"role": "tool", "tool_call_id": f"call_{turn}", "content": text()},
        ]
    return [*conversation, {"role": "assistant", "content": text()}]


def _sample(
    rng: np.random.Generator,
    rollout: int,
    branch: int,
    *,
    advantage: float,
    tokens: int,
    mode: Mode,
    vocab_size: int,
) -> TrainingSample:
    mask = np.zeros(tokens, np.bool_)
    mask[tokens // 4 : tokens // 2] = True
    mask[tokens * 3 // 4 :] = True
    logprobs = np.where(mask, -rng.exponential(0.4, tokens), 0.0).astype(np.float32)
    return TrainingSample(
        token_ids=(rng.zipf(1.2, tokens) % vocab_size).astype(np.int32),
        loss_mask=mask,
        logprobs=logprobs if mode == "rl" else None,
        advantage=advantage if mode == "rl" else 0.0,
        rollout=rollout,
        branch=branch,
    )


def _statistics(rewards: np.ndarray[Any, Any], rollouts: int, samples: SampleArrays) -> GroupStatistics:
    known = rewards if len(rewards) else np.zeros(1)
    return GroupStatistics(
        rollouts=rollouts,
        scored=len(rewards),
        reward_mean=float(known.mean()),
        reward_std=float(known.std()),
        reward_min=float(known.min()),
        reward_max=float(known.max()),
        tokens=len(samples.token_ids),
        trained_tokens=int(samples.loss_mask.sum()),
        seconds=3.5,
    )
