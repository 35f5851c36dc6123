"""P3: a worker process that was stopped until others had its item wakes up, is told, writes nothing, and goes on serving."""

from __future__ import annotations

import asyncio
import sys
import time
from typing import Any

import pytest
import redis

from distaff.keys import RunKeys
from distaff.types import RolloutItem
from distaff.wire import encode_group
from distaff_worker.leases import Lease
from distaff_worker.outcome import Outcome
from tests.farm_support import produce, run_config, says, settled
from tests.harness.oracle import check
from tests.harness.processes import start
from tests.scripted_engine import Ask, Reply, ScriptedEngine
from tests.test_oracle import whole_group
from tests.test_service import make_service, working
from tests.worker_support import ScriptedPlayer, emit_of, until

LEASE_S = 3.0
"""A worker that was stopped for longer than four of these ends when it wakes up (`STUCK_LEASES`): its watchdog cannot tell that from a
loop that stands still."""


@pytest.mark.slow
@pytest.mark.timeout(300)
async def test_a_stopped_worker_wakes_up_to_a_settled_item_and_goes_on_serving(
    redis_url: str, client: redis.Redis
) -> None:
    """P3: SIGSTOP with the answers in the air, another worker settles, SIGCONT: one entry, `execution.fenced`, and the next run is its own."""
    asked: list[Ask] = []
    released = asyncio.Event()

    async def script(ask: Ask) -> Reply:
        if ask.sampling.get("max_tokens") != 1:
            asked.append(ask)
            await released.wait()
        return says(f"number {ask.number % 7}")

    async def play(lease: Lease, item: RolloutItem) -> Outcome:
        return emit_of(item, **{str(k): v for k, v in encode_group(whole_group(item.seq)).items()})

    command = [sys.executable, "-m", "distaff", "work", "--redis-url", redis_url, "--worker.lease-s", str(LEASE_S)]
    small: dict[str, Any] = {
        "environment": {"args": {"rows": 1, "turns": 1}},
        "rollouts": {"group_size": 2, "max_attempts": 1},
    }
    groups = RunKeys("run-1").groups
    async with ScriptedEngine(script=script) as engine:
        await produce(redis_url, run_config(engine.url, **small))
        with start([*command, "--log.format", "json"]) as zombie:
            await until(lambda: len(asked) == 2, seconds=120, what="the first worker did not begin")
            zombie.stop()
            stopped = time.monotonic()
            released.set()
            second = ScriptedPlayer(play)
            async with working(make_service(redis_url, second, name="second", lease_s=LEASE_S)):
                await until(lambda: settled(client, "run-1"), seconds=60)
            assert second.played == [0]
            stopped_s = time.monotonic() - stopped
            entries: Any = client.xrange(groups)
            zombie.cont()
            await until(
                lambda: "execution.fenced" in zombie.log or zombie.code is not None, seconds=60, what="it was not told"
            )
            assert zombie.code is None, f"stopped for {stopped_s:.1f} s: {zombie.log[-2000:]}"
            assert client.xrange(groups) == entries, "the zombie wrote"
            await produce(redis_url, run_config(engine.url, name="run-2", **small))
            await until(lambda: settled(client, "run-2"), seconds=90, what="it does not serve any more")
            assert zombie.code is None
    assert len(entries) == 1
    assert client.hget(RunKeys("run-1").state, "lost") == b"1"
    check(client, "run-1")
    check(client, "run-2")
