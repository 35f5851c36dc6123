"""P21: huge groups are whole or refused, and neither stalls the worker's loop: its leases, its other rollouts."""

from __future__ import annotations

import asyncio
import json
import os
import re
import sys
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import redis

from distaff import GroupConsumer
from distaff.keys import RunKeys
from distaff_worker.command import SWITCH_INTERVAL_S
from tests.farm_support import make_worker, produce, run_config, settled
from tests.harness.oracle import check_whole
from tests.harness.processes import rss_bytes, start
from tests.worker_support import check_oracle, until

TOKENS = 131_072
CONTEXT = 200_000
TICK_S = 0.05
LAG_S = 0.1
"""What is promised of the 99th percentile."""
BASE_BYTES, ROLLOUT_BYTES = 400 << 20, 32 << 20
"""Memory a group may take: three times the JSON of an answer, for each rollout, and what the libraries take."""
LIMIT_BYTES = 1 << 20


@pytest.fixture(scope="module")
def engine() -> Iterator[str]:
    """URL of an engine in a process of its own, whose every answer has TOKENS tokens: ten megabytes of JSON."""
    command = [sys.executable, "-m", "tests.scripted_engine", "--tokens", str(TOKENS), "--context", str(CONTEXT)]
    with start(command) as child:
        child.wait_for('"url"')
        yield str(json.loads(re.findall(r"\{.*\}", child.log)[0])["url"])


@pytest.fixture(autouse=True)
def _as_in_a_worker() -> Iterator[None]:
    """Threads that compute let go of the interpreter as often as they do in a worker process."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    yield
    sys.setswitchinterval(before)


class Lag:
    """How late the loop is, without what other processes of this machine take: never more than the processor time this one used."""

    def __init__(self) -> None:
        self.seen: list[float] = []
        self.rss: list[int] = []

    async def watch(self) -> None:
        while True:
            wall, cpu = time.monotonic(), time.process_time()
            await asyncio.sleep(TICK_S)
            late = max(0.0, time.monotonic() - wall - TICK_S)
            self.seen.append(min(late, time.process_time() - cpu))
            self.rss.append(rss_bytes(os.getpid()))

    @property
    def p99(self) -> float:
        return sorted(self.seen)[int(0.99 * (len(self.seen) - 1))]


async def play(url: str, client: redis.Redis, engine: str, *, size: int, max_bytes: int) -> Lag:
    """Play one item of `size` rollouts; what the loop went through while it was played."""
    config = run_config(
        engine,
        environment={"args": {"rows": 1, "turns": 1}},
        engine={"request_timeout_s": 300, "retry_budget_s": 300},
        sampling={"max_tokens": TOKENS},
        rollouts={
            "group_size": size,
            "timeout_s": 300,
            "group_timeout_s": 400,
            "score_timeout_s": 100,
            "max_attempts": 1,
        },
        wire={"max_group_bytes": max_bytes},
    )
    await produce(url, config)
    service, _ = make_worker(url, slots=1, lease_s=30.0)
    task = asyncio.create_task(service.run())
    lag = Lag()
    warm = lambda: any(entry.load.done() for entry in service._player._runs._entries.values())  # type: ignore[attr-defined]  # noqa: E731
    await until(warm, seconds=60, what="the run was not loaded")
    watching = asyncio.create_task(lag.watch())
    end = time.monotonic() + 250
    while not await asyncio.to_thread(settled, client, "run-1"):
        assert time.monotonic() < end, "the group was not settled"
        await asyncio.sleep(0.2)
    watching.cancel()
    service._stop("test")
    await asyncio.wait_for(task, 60)
    return lag


def check_lag(lag: Lag, *, size: int) -> None:
    grown = max(lag.rss) - lag.rss[0]
    print(
        f"{size} x {TOKENS}: loop late by {1000 * lag.p99:.0f} ms (p99), {1000 * max(lag.seen):.0f} ms at most, {grown >> 20} MiB more"
    )
    assert lag.p99 < LAG_S
    assert grown < BASE_BYTES + size * ROLLOUT_BYTES


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("size", [16, pytest.param(64, marks=pytest.mark.exhaustive)])
async def test_a_huge_group_is_emitted_whole_and_does_not_stall_the_loop(
    redis_url: str, client: redis.Redis, engine: str, size: int
) -> None:
    """P21: 131,072 tokens a rollout, 64 of them in the whole enumeration: every token arrives, and the loop is late by less than 100 ms."""
    lag = await play(redis_url, client, engine, size=size, max_bytes=256 << 20)
    check_oracle(client, "run-1")
    with GroupConsumer("run-1", client, max_bytes=256 << 20) as consumer:
        [delivery] = list(consumer)
        group = delivery.group
        consumer.ack(delivery)
    check_whole(group)
    assert len(group.samples) == len(group.rollouts) == size
    said = np.array([5 + n % 1000 for n in range(TOKENS - 1)] + [2], np.int32)
    for sample in group.samples:
        assert sample.logprobs is not None
        assert np.array_equal(sample.token_ids[sample.loss_mask], said)
        assert (sample.logprobs[sample.loss_mask] == -0.25).all()
    check_lag(lag, size=size)


@pytest.mark.slow
@pytest.mark.timeout(400)
async def test_a_huge_group_beyond_the_limit_is_a_dead_letter_and_does_not_stall_the_loop(
    redis_url: str, client: redis.Redis, engine: str
) -> None:
    """P21: `wire.max_group_bytes` refuses it before anything is written, with the settings to change."""
    lag = await play(redis_url, client, engine, size=8, max_bytes=LIMIT_BYTES)
    letters: Any = client.hvals(RunKeys("run-1").dead)
    [letter] = [json.loads(text) for text in letters]
    assert (letter["kind"], letter["boundary"]) == ("too_large", "wire")
    assert "raise wire.max_group_bytes" in letter["message"]
    assert client.xlen(RunKeys("run-1").groups) == 0
    check_oracle(client, "run-1")
    check_lag(lag, size=8)
