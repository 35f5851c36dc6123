"""P2, P17: the whole `distaff work` command, killed at some of its Redis commands, and told to stop: what it held is elsewhere at once."""

from __future__ import annotations

import asyncio
import secrets
import signal
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any, Literal

import pytest
import redis

from distaff.keys import RunKeys, job_id
from distaff.runs import RunState, read_state
from distaff_worker.rq_schema import JOB_PREFIX
from tests.crash_processes import RUN
from tests.crash_support import Farm, Place
from tests.farm_support import make_worker, produce, run_config, says, settled
from tests.harness import oracle
from tests.harness.processes import ROOT, Child, start
from tests.harness.resp_proxy import RespProxy
from tests.process_support import leftovers
from tests.scripted_engine import Ask, Reply, ScriptedEngine
from tests.worker_support import until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]
ROWS, SIZE = 4, 2
PATIENCE_S = 120.0
"""For a process that has verifiers to import on a machine that has other things to do."""
LEASE_S = 2.0


@pytest.fixture(scope="module")
def farm() -> Iterator[Farm]:
    """Servers, each empty when a place is taken."""
    with Farm() as opened:
        yield opened


def work(url: str, mark: str, *flags: str) -> Child:
    """`distaff work` in a group of its own; `mark` is in its environment, and in that of all it starts."""
    argv = [sys.executable, "-m", "distaff", "work", "--redis-url", url, *flags]
    return start(argv, env={"PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1", "CRASH_TEST_MARK": mark})


class Gate:
    """An engine's script: probes are answered, everything else is counted and waits until the gate is open."""

    def __init__(self, *, open_: bool = False) -> None:
        self.waiting = 0
        self.open = asyncio.Event()
        if open_:
            self.open.set()

    async def __call__(self, ask: Ask) -> Reply:
        if ask.sampling.get("max_tokens") != 1:
            self.waiting += 1
            await self.open.wait()
        return says(f"number {ask.number}")


async def admit(url: str, engine: ScriptedEngine, rows: int) -> None:
    sections: dict[str, Any] = {"environment": {"args": {"rows": rows, "turns": 1}}, "rollouts": {"group_size": SIZE}}
    await produce(url, run_config(engine.url, name=RUN, **sections))


def state_of(client: redis.Redis) -> RunState:
    state = read_state(client, RUN)
    assert state is not None
    return state


async def no_process_is_left(mark: str) -> None:
    """Children that must notice the end of their worker get a moment to do so."""
    await until(lambda: not leftovers(mark), seconds=20, what=f"left: {leftovers(mark)}")


async def play_the_rest(place: Place) -> None:
    """A worker named "second", here, until everything is settled."""
    if settled(place.client, RUN):
        return
    service, _ = make_worker(place.url, name="second", lease_s=30)
    work = asyncio.create_task(service.run())
    await until(lambda: settled(place.client, RUN), seconds=PATIENCE_S, what="the rest was not settled")
    service._stop("test")
    await asyncio.wait_for(work, 30)


async def play(farm: Farm, when: Literal["before", "after"], word: str, n: int) -> None:
    """A run played by `distaff work`, killed at the n-th such command, and by another worker to the end."""
    mark = secrets.token_hex(8)
    flags = ["--worker.slots", "2", "--worker.lease-s", str(LEASE_S), "--worker.beat-s", "0.2"]
    with farm.place() as place:
        async with ScriptedEngine(script=Gate(open_=True), latency_s=0.3) as engine:
            await admit(place.url, engine, ROWS)
            with RespProxy(place.url) as proxy, work(proxy.url, mark, *flags) as victim:
                struck = proxy.at_word(word, n, victim.kill, when=when)
                assert await asyncio.to_thread(struck.wait, PATIENCE_S), victim.log
                assert victim.code == -signal.SIGKILL
                print(f"killed {when} {word} {n}, command {proxy.count}")
                await no_process_is_left(mark)
            await play_the_rest(place)
        oracle.check(place.client, RUN)


async def test_the_command_killed_at_its_redis_commands_loses_and_doubles_nothing(farm: Farm) -> None:
    """P2: at the first claim, at a beat, and at the first and the last group, before and after; no process of an environment survives it."""
    turns = asyncio.Semaphore(2)

    async def one(when: Literal["before", "after"], word: str, n: int) -> None:
        async with turns:
            await play(farm, when, word, n)

    # The first of each kind loads its script: Redis knows none.
    async with asyncio.TaskGroup() as group:
        group.create_task(one("after", "EVALSHA claim", 2))
        group.create_task(one("before", "EVALSHA beat", 3))
        group.create_task(one("after", "EVALSHA emit", 2))
        group.create_task(one("before", "EVALSHA emit", ROWS + 1))


@asynccontextmanager
async def draining(farm: Farm, *, drain_s: float, rows: int) -> AsyncIterator[tuple[Child, Gate, Place]]:
    """`distaff work` with two items in hand that wait for their engine, and SIGTERM sent; no lease is lost and no process left by it."""
    mark, gate = secrets.token_hex(8), Gate()
    flags = ["--worker.slots", "2", "--worker.lease-s", "30", "--worker.drain-s", str(drain_s)]
    with farm.place() as place:
        async with ScriptedEngine(script=gate) as engine:
            await admit(place.url, engine, rows)
            with work(place.url, mark, *flags) as worker:
                await until(
                    lambda: gate.waiting == 2 * SIZE or worker.code is not None, seconds=PATIENCE_S, what=worker.log
                )
                assert worker.code is None, worker.log
                worker.terminate()
                await asyncio.to_thread(worker.wait_for, "worker.stopping")
                yield worker, gate, place
                await no_process_is_left(mark)
            gate.open.set()
            await play_the_rest(place)
        assert state_of(place.client).lost == 0, "a lease was left to run out"
        oracle.check(place.client, RUN)


async def test_what_a_worker_cannot_finish_within_its_grace_starts_elsewhere_at_once(farm: Farm) -> None:
    """P17: grace 1 s, lease 30 s: the item is in other hands after the grace, not after the lease; exit code 0."""
    async with draining(farm, drain_s=1, rows=2) as (worker, gate, place):
        told = time.monotonic()
        second = asyncio.create_task(play_the_rest(place))
        for seq in range(2):
            job = f"{JOB_PREFIX}{job_id(RUN, seq)}"
            await until(lambda j=job: place.client.hget(j, "worker_name") == b"second", seconds=PATIENCE_S)  # type: ignore[misc]
        handed_s = time.monotonic() - told
        assert await asyncio.to_thread(worker.wait, PATIENCE_S) == 0, worker.log
        gate.open.set()
        await second
        assert state_of(place.client).handed_back == 2
        assert handed_s < 10, f"{handed_s} s with a grace of one"
    print(f"handed over {handed_s:.2f} s after SIGTERM with a grace of 1 s")


async def test_a_worker_finishes_what_it_can_within_its_grace_and_takes_nothing_new(farm: Farm) -> None:
    """P17: grace 30 s: both groups in hand are emitted, the third item stays on the queue; exit code 0."""
    async with draining(farm, drain_s=30, rows=3) as (worker, gate, place):
        gate.open.set()
        assert await asyncio.to_thread(worker.wait, PATIENCE_S) == 0, worker.log
        state = state_of(place.client)
        assert (state.emitted, state.handed_back) == (2, 0)
        assert place.client.llen("rq:queue:default") == 1


async def test_a_second_sigterm_ends_the_grace(farm: Farm) -> None:
    """P17: grace 30 s, told twice: both items are back on the queue, long before that; exit code 0."""
    async with draining(farm, drain_s=30, rows=3) as (worker, _, place):
        told = time.monotonic()
        worker.terminate()
        assert await asyncio.to_thread(worker.wait, PATIENCE_S) == 0, worker.log
        took_s = time.monotonic() - told
        assert took_s < 15, f"{took_s} s"
        assert state_of(place.client).handed_back == 2
        assert not place.client.exists(RunKeys(RUN).groups)
        queued: Any = place.client.lrange("rq:queue:default", 0, -1)
        assert sorted(queued) == [job_id(RUN, seq).encode() for seq in range(3)]
    print(f"ended {took_s:.2f} s after the second SIGTERM")
