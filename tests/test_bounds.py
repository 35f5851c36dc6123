"""Bounded queues and a bounded Redis, with a real producer, a real worker and real consumers at once."""

from __future__ import annotations

import asyncio
import random
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import redis

from distaff import GroupConsumer
from distaff.clients import connect
from distaff.keys import RunKeys
from distaff.types import RolloutItem, ScoredGroup
from distaff.wire import encode_group
from distaff_producer.produce import Producer
from distaff_producer.window import read_standing
from distaff_worker.leases import Lease
from distaff_worker.metrics import Metrics
from distaff_worker.outcome import Outcome
from distaff_worker.rq_schema import JOB_PREFIX
from distaff_worker.service import Service
from distaff_worker.service_options import ServiceOptions
from tests.group_support import make_group
from tests.harness.oracle import check_settled
from tests.harness.seeds import seeded
from tests.producer_support import Numbers, config
from tests.worker_support import ScriptedPlayer, emit_of, until

RUN, BUSY_POOL = "r", "p"
WINDOW, ITEMS = 12, 150
KEYS = RunKeys(RUN)


def group_of(item: RolloutItem, *, tokens: int = 2048) -> ScoredGroup:
    return make_group(run=RUN, seq=item.seq, rollouts=4, tokens=tokens)


def size_bytes(group: ScoredGroup) -> int:
    return sum(len(value) for value in encode_group(group).values() if isinstance(value, bytes))


async def emitting(lease: Lease, item: RolloutItem) -> Outcome:
    fields: dict[str, Any] = {str(name): value for name, value in encode_group(group_of(item)).items()}
    return emit_of(item, **fields)


def in_flight(client: redis.Redis) -> int:
    """Queued, running or in the stream, read in one step."""
    standing = read_standing(client, RUN)
    return 0 if standing is None else standing.state.admitted - standing.state.settled + standing.unread


def used_bytes(client: redis.Redis) -> int:
    memory: Any = client.info("memory")
    return int(memory["used_memory"])


def worker(url: str, *, metrics: Metrics, **options: Any) -> Service:
    settings: dict[str, Any] = {"pool": BUSY_POOL, "name": "w1", "slots": 4, "lease_s": 5.0, "beat_s": 0.2, **options}
    return Service(connect(url), options=ServiceOptions(**settings), player=ScriptedPlayer(emitting), metrics=metrics)


def consume(url: str, name: str, got: list[int], *, pause: threading.Event | None, rng: random.Random) -> None:
    """All groups of the run, acknowledged in random order in batches; with `pause` one that waits before each batch."""
    with connect(url) as client, GroupConsumer(RUN, client, group=name, batch=5, block_s=0.05) as consumer:
        for batch in consumer.batches(5):
            if pause is not None:
                pause.wait(0.03)
            rng.shuffle(batch)
            for delivery in batch:
                got.append(delivery.group.seq)
                consumer.ack(delivery)


async def test_queue_and_stream_are_bounded_with_a_slow_and_a_fast_consumer(
    redis_url: str, client: redis.Redis, request: pytest.FixtureRequest
) -> None:
    """P9: without consumers everything stands at the window; with a slow and a fast group each gets all, and memory returns to its base."""
    highest = 0
    with seeded(request) as seed, ThreadPoolExecutor(3) as threads:
        base = used_bytes(client)
        stop = threading.Event()
        producer = Producer(config(window=WINDOW, shuffle=False), redis_url, Numbers(rows=ITEMS), stop=stop)
        task = asyncio.create_task((service := worker(redis_url, metrics=Metrics())).run())
        try:
            for name in ("slow", "fast"):
                GroupConsumer(RUN, client, group=name).join()
            admitting = threads.submit(producer.run)
            await until(lambda: client.xlen(KEYS.groups) == WINDOW)
            for _ in range(20):
                assert in_flight(client) == client.xlen(KEYS.groups) == WINDOW, "admitted or trimmed beyond the window"
                await asyncio.sleep(0.02)
            assert not admitting.done()
            assert int(client.hget(KEYS.state, "admitted") or 0) == WINDOW, (
                "slime#2238: taken in, and thrown away later"
            )
            got: dict[str, list[int]] = {"slow": [], "fast": []}
            pause = threading.Event()
            readers = [
                threads.submit(consume, redis_url, "slow", got["slow"], pause=pause, rng=random.Random(seed)),
                threads.submit(consume, redis_url, "fast", got["fast"], pause=None, rng=random.Random(seed + 1)),
            ]
            while not all(reader.done() for reader in readers):
                highest = max(highest, in_flight(client))
                await asyncio.sleep(0.005)
            for reader in readers:
                reader.result()
            admitting.result()
        finally:
            stop.set()
            service._stop("test")
            await asyncio.wait_for(task, 20)
    assert {name: sorted(seqs) for name, seqs in got.items()} == {name: list(range(ITEMS)) for name in got}
    assert highest <= WINDOW
    assert client.xlen(KEYS.groups) == 0
    check_settled(client, RUN, pool=BUSY_POOL, emitted=got["slow"])
    client.delete(*client.scan_iter(f"{JOB_PREFIX}{RUN}-*"))  # finished jobs, which live for ten minutes
    written = ITEMS * size_bytes(make_group(rollouts=4, tokens=2048))
    assert written > 10_000_000
    assert used_bytes(client) < base + written / 4, "redis#6941, #7059: acknowledged groups were kept"


@pytest.mark.slow
async def test_a_full_redis_makes_a_worker_unready_and_nothing_else(redis_url: str, client: redis.Redis) -> None:
    """P8: memory runs out in the middle of a run: worker and producer live, it says so, and all goes on by itself when there is room."""
    metrics, stop = Metrics(), threading.Event()
    producer = Producer(config(window=1000), redis_url, Numbers(rows=ITEMS), stop=stop)
    service = worker(redis_url, metrics=metrics)
    with ThreadPoolExecutor(1) as threads:
        task = asyncio.create_task(service.run())
        try:
            client.set("ballast", b"x" * 1_000_000)
            admitting = threads.submit(producer.run)
            await until(lambda: client.xlen(KEYS.groups) > 10)
            client.config_set("maxmemory", 900_000)
            await until(lambda: not service.ready, seconds=20, what="a worker that cannot write calls itself ready")
            held = client.xlen(KEYS.groups)
            await until(lambda: metrics.redis_errors._value.get() > 0 or len(service._executions) == 4, seconds=20)
            assert client.xlen(KEYS.groups) == held < ITEMS
            assert not task.done()
            client.config_set("maxmemory", 0)
            await until(lambda: service.ready, seconds=20)
            await until(lambda: client.xlen(KEYS.groups) == ITEMS, seconds=30)
            await asyncio.to_thread(admitting.result, 10)
        finally:
            client.config_set("maxmemory", 0)
            stop.set()
            service._stop("test")
            await asyncio.wait_for(task, 20)
    check_settled(client, RUN, pool=BUSY_POOL)
    assert client.hget(KEYS.state, "lost") is None
