"""Faults of Redis and of operators while workers play: nothing is lost, doubled or played in vain."""

from __future__ import annotations

import asyncio

import pytest
import redis

from distaff.types import RolloutItem
from distaff_worker.leases import Lease
from distaff_worker.outcome import Outcome
from tests.test_service import RUN, make_service, working
from tests.worker_support import ScriptedPlayer, check_oracle, emit_of, enqueue, open_run, until


async def test_a_full_redis_costs_no_lease_and_no_result(redis_url: str, client: redis.Redis) -> None:
    """P8: full for three leases while items are played and settled: each is played once, and emitted when there is room."""
    keys = open_run(client, RUN)
    enqueue(client, RUN, 4)
    client.set("ballast", "x" * 1_000_000)
    full = asyncio.Event()

    async def play(lease: Lease, item: RolloutItem) -> Outcome:
        await full.wait()
        return emit_of(item)

    one, two = (ScriptedPlayer(play) for _ in range(2))
    async with working(make_service(redis_url, one, name="w1")), working(make_service(redis_url, two, name="w2")):
        await until(lambda: len(one.played) + len(two.played) == 4)
        client.config_set("maxmemory", 900_000)
        try:
            with pytest.raises(redis.exceptions.OutOfMemoryError):
                client.set("one", "more")
            full.set()
            await asyncio.sleep(3)
            assert client.xlen(keys.groups) == 0
        finally:
            client.config_set("maxmemory", 0)
        await until(lambda: client.xlen(keys.groups) == 4)
    check_oracle(client, RUN)
    assert sorted(one.played + two.played) == [0, 1, 2, 3]
    assert client.hget(keys.state, "lost") is None
