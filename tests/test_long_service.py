"""A worker that serves for long: memory, outages. The long forms are left out unless asked for (`pytest -m exhaustive`)."""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from distaff import GroupConsumer
from distaff.clients import connect
from distaff.keys import RunKeys
from distaff.types import RolloutItem
from distaff.wire import encode_group
from distaff_producer.produce import Producer
from distaff_worker.leases import Lease
from distaff_worker.metrics import Metrics
from distaff_worker.outcome import Outcome
from tests.farm_support import produce, run_config, says, settled
from tests.group_support import make_group
from tests.harness.oracle import check_settled
from tests.harness.processes import fds, rss_bytes, start
from tests.harness.servers import RedisServer
from tests.producer_support import Numbers, config
from tests.scripted_engine import ScriptedEngine
from tests.test_bounds import BUSY_POOL, KEYS, RUN, worker
from tests.worker_support import ScriptedPlayer, emit_of, until

GROUP = 8
SLOTS = 8
WARM_SHARE = 0.3
"""Of the run, after which memory is to stay where it is."""


async def small_group(lease: Lease, item: RolloutItem) -> Outcome:
    await asyncio.sleep(0.02)
    group = make_group(run=RUN, seq=item.seq, rollouts=2, tokens=64)
    fields: dict[str, Any] = {str(name): value for name, value in encode_group(group).items()}
    return emit_of(item, **fields)


@asynccontextmanager
async def draining(url: str, run: str) -> AsyncIterator[list[int]]:
    """A trainer on a thread that reads the run to its end."""
    seqs: list[int] = []

    def read() -> None:
        with GroupConsumer(run, url, block_s=0.2) as consumer:
            for delivery in consumer:
                seqs.append(delivery.group.seq)
                consumer.ack(delivery)

    reader = threading.Thread(target=read)
    reader.start()
    try:
        yield seqs
        await asyncio.to_thread(reader.join, 60)
    finally:
        assert not reader.is_alive(), "the trainer did not see the end of the run"


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("rollouts", [800, pytest.param(10_000, marks=pytest.mark.exhaustive)])
async def test_memory_and_descriptors_of_a_worker_are_flat(redis_url: str, rollouts: int) -> None:
    """P16; prime-rl#2527, #2373, #1964: a real worker process, 10,000 rollouts in the whole enumeration: no growth after it is warm."""
    items = rollouts // GROUP
    command = [sys.executable, "-m", "distaff", "work", "--redis-url", redis_url, "--worker.exit-when-done", "true"]
    with connect(redis_url) as client:
        async with ScriptedEngine(script=lambda ask: says(f"number {ask.number % 7}"), keep_records=False) as engine:
            limits = {"group_size": GROUP}
            args = {"rows": items, "turns": 2}
            settings = run_config(engine.url, environment={"args": args}, rollouts=limits, producer={"window": items})
            await produce(redis_url, settings)
            seen: list[tuple[int, int, int]] = []
            async with draining(redis_url, "run-1"):
                with start([*command, "--worker.slots", str(SLOTS), "--log.level", "error"]) as child:
                    while child.code is None:
                        done = int(client.hget(RunKeys("run-1").state, "emitted") or 0)
                        try:
                            seen.append((done, rss_bytes(child.pid), fds(child.pid)))
                        except (OSError, IndexError):
                            break
                        await asyncio.sleep(0.1)
                    assert await asyncio.to_thread(child.wait, 60) == 0, child.log[-3000:]
        assert settled(client, "run-1")
    warm = [(rss, files) for done, rss, files in seen if WARM_SHARE * items < done < items]
    assert len(warm) > 4, "it went too fast to be measured"
    half = len(warm) // 2
    before, after = (max(rss for rss, _ in part) for part in (warm[:half], warm[half:]))
    print(
        f"{rollouts} rollouts: {before >> 20} MiB, then {after >> 20} MiB; descriptors {warm[0][1]}, then {warm[-1][1]}"
    )
    assert after < before + (16 << 20)
    # Every rollout in play may have a connection to the engine; how many have one at a time is no growth.
    connections = SLOTS * GROUP
    assert max(files for _, files in warm[half:]) <= max(files for _, files in warm[:half]) + 8 + connections
    assert warm[-1][1] < 40 + connections


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("seconds", [5, pytest.param(60, marks=pytest.mark.exhaustive)])
async def test_an_outage_of_redis_ends_nobody(tmp_path: Path, seconds: int) -> None:
    """P7; rq#998, #966, #1836: killed for 60 s in the whole enumeration, in the middle of a run: producer, worker and trainer go on."""
    items = 300
    stop = threading.Event()
    with RedisServer(tmp_path, aof=True, config={"appendfsync": "always"}) as server, connect(server.url) as client:
        producer = Producer(config(window=40), server.url, Numbers(rows=items), stop=stop, outage_budget_s=600)
        service = worker(server.url, metrics=Metrics(), lease_s=3.0)
        service._player = service._executions._player = ScriptedPlayer(small_group)
        task = asyncio.create_task(service.run())
        admitting = asyncio.create_task(asyncio.to_thread(producer.run))
        try:
            await until(lambda: client.exists(KEYS.state))
            async with draining(server.url, RUN) as seqs:
                await until(lambda: len(seqs) > 50, seconds=30)
                server.kill()
                await asyncio.sleep(seconds)
                assert not task.done()
                assert not admitting.done()
                server.start()
                await asyncio.wait_for(admitting, 60)
                await until(lambda: settled(client, RUN), seconds=60)
        finally:
            stop.set()
            service._stop("test")
            await asyncio.wait_for(task, 30)
        assert sorted(set(seqs)) == list(range(items))
        assert len(seqs) - items <= 16, "more came twice than a trainer had in its hands"
        check_settled(client, RUN, pool=BUSY_POOL, emitted=set(seqs))
