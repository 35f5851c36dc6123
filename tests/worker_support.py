"""Parts of a worker for tests: a player that plays nothing, runs opened and filled by hand, waiting for an event."""

from __future__ import annotations

import asyncio
import json
import time
import zlib
from collections.abc import Awaitable, Callable
from dataclasses import asdict
from typing import Any

import redis

from distaff.keys import RUNS, RunKeys, job_id
from distaff.types import RolloutItem
from distaff_worker.leases import Counts, Lease
from distaff_worker.outcome import Emit, Outcome
from distaff_worker.rq_schema import JOB_FUNCTION, JOB_PREFIX, PoolKeys
from tests.harness.oracle import POOL as POOL
from tests.harness.oracle import check_settled


def make_item(run: str, seq: int) -> RolloutItem:
    return RolloutItem(run=run, seq=seq, key=f"k{seq}", epoch=0, split="train", task={"n": seq}, seed=seq)


def open_run(client: redis.Redis, run: str) -> RunKeys:
    """A run as the producer opens it, without a configuration."""
    keys = RunKeys(run)
    client.sadd(RUNS, run)
    client.hset(keys.state, mapping={"status": "open", "admitted": 0})
    return keys


def enqueue(client: redis.Redis, run: str, count: int, *, pool: str = POOL, data: bytes | None = None) -> list[str]:
    """Admit `count` items by hand; returns their job ids."""
    first = int(client.hget(RunKeys(run).state, "admitted") or 0)
    names = []
    with client.pipeline() as pipeline:
        pipeline.sadd("rq:queues", f"rq:queue:{pool}")
        for seq in range(first, first + count):
            name = job_id(run, seq)
            payload: list[Any] = [JOB_FUNCTION, None, [], {"item": asdict(make_item(run, seq))}]
            body = data if data is not None else zlib.compress(json.dumps(payload).encode())
            fields: dict[Any, Any] = {
                "data": body,
                "status": "queued",
                "origin": pool,
                "description": f"distaff {run} {seq}",
                "created_at": "2026-01-01T00:00:00.000000Z",
                "enqueued_at": "2026-01-01T00:00:00.000000Z",
                "timeout": 600,
                "result_ttl": 600,
                "failure_ttl": 600,
                "retries_left": 1000000,
            }
            pipeline.hset(f"{JOB_PREFIX}{name}", mapping=fields)
            pipeline.rpush(PoolKeys.of(pool).queue, name)
            pipeline.hincrby(RunKeys(run).state, "admitted", 1)
            names.append(name)
        pipeline.execute()
    return names


def emit_of(item: RolloutItem, **fields: Any) -> Emit:
    counts = Counts(rollouts=1, samples=1, tokens=10, trained_tokens=4, reward_sum=0.5, reward_count=1)
    return Emit(fields={"run": item.run, "seq": item.seq, **fields}, counts=counts, size_bytes=10, reward_mean=0.5)


class ScriptedPlayer:
    """A Player whose `play` is a function of the item."""

    def __init__(self, play: Callable[[Lease, RolloutItem], Awaitable[Outcome]] | None = None) -> None:
        self._play = play
        self.played: list[int] = []

    async def open(self) -> None: ...

    async def play(self, lease: Lease, item: RolloutItem) -> Outcome:
        self.played.append(item.seq)
        if self._play is None:
            return emit_of(item)
        return await self._play(lease, item)

    async def close(self) -> None: ...


def wait_until(condition: Callable[[], Any], *, seconds: float = 10.0, what: str = "") -> None:
    """Return when `condition` holds; raise TimeoutError when it does not in time."""
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            raise TimeoutError(what or "the condition did not come true")
        time.sleep(0.01)


async def until(condition: Callable[[], Any], *, seconds: float = 10.0, what: str = "") -> None:
    """As `wait_until`, letting the loop turn."""
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            raise TimeoutError(what or "the condition did not come true")
        await asyncio.sleep(0.01)


def check_oracle(client: redis.Redis, run: str, *, pool: str = POOL) -> None:
    """Everything admitted is settled exactly once, and nothing is left behind; does not look into the groups (`oracle.check` does)."""
    check_settled(client, run, pool=pool)
