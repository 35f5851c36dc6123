"""A run for the rollout benchmarks: its configuration, and the wait until it is played."""

from __future__ import annotations

import asyncio
import time

import redis
from tests.farm_support import produce, run_config

from distaff.config import RunConfig
from distaff.keys import RunKeys

RUN = "run-1"


def admit(url: str, engine_url: str, *, groups: int, max_tokens: int) -> RunConfig:
    """A closed RL run of so many groups of 8."""
    config = run_config(
        engine_url,
        name=RUN,
        environment={"id": "benchmarks.roles.short_env"},
        engine={"start_timeout_s": 30, "request_timeout_s": 120},
        sampling={"max_tokens": max_tokens, "seed": 1},
        rollouts={"group_size": 8, "timeout_s": 300, "group_timeout_s": 600, "score_timeout_s": 60},
        producer={"shuffle": False, "epochs": -(-groups // 64), "limit": groups, "window": groups + 1},
    )
    asyncio.run(produce(url, config))
    return config


def wait_until_emitted(client: redis.Redis, count: int, *, seconds: float) -> None:
    """Raises TimeoutError, and RuntimeError as soon as an item has become a dead letter."""
    deadline = time.monotonic() + seconds
    while True:
        emitted, dead = (int(value or 0) for value in client.hmget(RunKeys(RUN).state, ["emitted", "dead"]))
        if dead:
            raise RuntimeError(f"dead letters: {client.hvals(RunKeys(RUN).dead)[:1]!r:.1000}")
        if emitted >= count:
            return
        if time.monotonic() > deadline:
            raise TimeoutError(f"{emitted} of {count} groups in {seconds:.0f} s")
        time.sleep(0.05)
