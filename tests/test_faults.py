"""Faults of Redis and of operators while workers play: nothing is lost, doubled or played in vain."""

from __future__ import annotations

import asyncio
import json
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import redis
from rq import Queue
from rq.command import send_shutdown_command
from rq.job import Job

from distaff.config import RunConfig
from distaff.errors import FatalRun
from distaff.keys import RunKeys, swept_key
from distaff.runs import delete_run
from distaff.types import RolloutItem
from distaff_worker.beat import Beater
from distaff_worker.claim import Claimer
from distaff_worker.leases import Lease
from distaff_worker.outcome import Outcome
from distaff_worker.settle import Settler
from distaff_worker.sweep import Sweeper
from distaff_worker.warm import WarmRuns
from tests.farm_support import groups_of, make_worker, produce, run_config, says, settled, working_on
from tests.harness.servers import RedisServer
from tests.scripted_engine import Ask, Reply, ScriptedEngine
from tests.test_service import RUN, make_service, working
from tests.worker_support import POOL, ScriptedPlayer, check_oracle, emit_of, enqueue, make_item, open_run, until


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


async def test_a_lease_that_was_wiped_from_the_registry_is_written_again(redis_url: str, client: redis.Redis) -> None:
    """Stock `rq info` empties the registry of running jobs up to the operator's clock; a fast clock takes live leases along."""
    keys = open_run(client, RUN)
    enqueue(client, RUN, 1)
    go = asyncio.Event()

    async def play(lease: Lease, item: RolloutItem) -> Outcome:
        await go.wait()
        return emit_of(item)

    async with working(make_service(redis_url, ScriptedPlayer(play))):
        await until(lambda: client.zcard("rq:wip:default") == 1)
        client.delete("rq:wip:default")
        await until(lambda: client.zcard("rq:wip:default") == 1, what="the lease did not come back")
        go.set()
        await until(lambda: client.xlen(keys.groups) == 1)
    check_oracle(client, RUN)


async def number_one(ask: Ask) -> Reply:
    return says("number 1")


async def number_two(ask: Ask) -> Reply:
    return says("number 2")


def small(url: str, *, rows: int = 2, name: str = "run-1", size: int = 2, **sections: dict[str, Any]) -> RunConfig:
    limits = {"group_size": size}
    return run_config(url, name=name, environment={"args": {"rows": rows, "turns": 1}}, rollouts=limits, **sections)


async def test_a_run_opened_anew_under_its_name_is_played_as_it_is_now(redis_url: str, client: redis.Redis) -> None:
    """A worker that had the deleted run warm plays the new one with its own engine and group size."""
    async with ScriptedEngine(script=number_one) as old, ScriptedEngine(script=number_two) as new:
        async with working_on(redis_url, small(old.url)):
            await until(lambda: settled(client, "run-1"), seconds=30)
            delete_run(client, "run-1")
            await produce(redis_url, small(new.url, size=3))
            await until(lambda: settled(client, "run-1"), seconds=30)
        groups = groups_of(client, "run-1")
    assert [(len(group.rollouts), group.statistics.reward_mean) for group in groups] == [(3, 2.0), (3, 2.0)]


async def test_a_run_that_cannot_be_played_does_not_stop_the_others_of_its_pool(
    redis_url: str, client: redis.Redis
) -> None:
    """Its items wait for another worker while this one plays the rest; then it ends with the mend."""
    await produce(redis_url, small("http://127.0.0.1:9", name="bad", rows=3, engine={"start_timeout_s": 0.2}))
    async with ScriptedEngine(script=number_one) as engine:
        await produce(redis_url, small(engine.url, name="good", rows=6))
        service, _ = make_worker(redis_url, slots=2)
        with pytest.raises(FatalRun, match="run 'bad' cannot be played by this worker"):
            await asyncio.wait_for(service.run(), 30)
    assert settled(client, "good")
    state = client.hgetall(RunKeys("bad").state)
    assert (state.get(b"dead", b"0"), client.llen("rq:queue:default"), client.zcard("rq:wip:default")) == (b"0", 3, 0)


async def test_an_engine_that_goes_away_uses_up_no_item(redis_url: str, client: redis.Redis) -> None:
    """The worker waits for it as at the start, then hands everything back and says which engine is gone."""
    engine = ScriptedEngine(script=number_one)
    await engine.__aenter__()
    impatient = {"start_timeout_s": 1.0, "max_retries": 0}
    await produce(redis_url, small(engine.url, rows=40, engine=impatient))
    service, _ = make_worker(redis_url, slots=2)
    task = asyncio.create_task(service.run())
    await until(lambda: client.xlen(RunKeys("run-1").groups) >= 2, seconds=30)
    await engine.__aexit__(None, None, None)
    with pytest.raises(FatalRun, match=f"(?s)engine at {engine.url}.*Start the server"):
        await asyncio.wait_for(task, 30)
    state = client.hgetall(RunKeys("run-1").state)
    assert client.llen("rq:queue:default") + int(state[b"emitted"]) == 40
    assert state.get(b"dead", b"0") == b"0"


async def test_runs_that_nobody_plays_any_more_are_closed(redis_url: str, client: redis.Redis) -> None:
    """A worker keeps the last few runs warm, not every run it has ever seen."""
    closed: list[str] = []

    class Played:
        def __init__(self, run: str) -> None:
            self.run = run

        async def close(self) -> None:
            closed.append(self.run)

    async def load(run: str) -> Any:
        return Played(run)

    async def no_environment(config: RunConfig) -> Any:
        raise NotImplementedError

    with ThreadPoolExecutor(1) as tokenizing:
        runs = WarmRuns(lambda run: None, tokenizing=tokenizing, open_environment=no_environment)
        runs._load = load  # type: ignore[method-assign]
        async with runs.using("kept", "1"):
            for number in range(6):
                async with runs.using(f"run-{number}", "1"):
                    pass
            await until(lambda: closed == ["run-0", "run-1", "run-2"])
        await runs.close()


@pytest.mark.parametrize("closed", [True, False])
async def test_items_that_somebody_took_off_the_queue_are_put_back(
    redis_url: str, client: redis.Redis, closed: bool
) -> None:
    """`rq empty` deletes jobs and queue; `distaff produce` again finds what was lost, once, and the run comes to its end."""
    async with ScriptedEngine(script=number_one) as engine:
        config = small(engine.url, rows=5)
        await produce(redis_url, config)
        if not closed:
            client.hset(RunKeys("run-1").state, "status", "open")
        Queue("default", connection=client, serializer="json").empty()  # type: ignore[no-untyped-call]
        report = await produce(redis_url, config)
        assert (report.restored, report.admitted, report.was_closed) == (5, 0, closed)
        assert (await produce(redis_url, config)).restored == 0
        async with working_on(redis_url, config):
            await until(lambda: settled(client, "run-1"), seconds=30)
    check_oracle(client, "run-1")


async def test_rewards_that_cannot_be_added_up_are_failures_of_the_rubric(redis_url: str, client: redis.Redis) -> None:
    """A finite reward whose sum or advantage is not finite never reaches the stream or the counters."""

    async def script(ask: Ask) -> Reply:
        return says("number 15" + 307 * "0")

    async with ScriptedEngine(script=script) as engine:
        config = run_config(
            engine.url,
            environment={"args": {"rows": 2, "turns": 1}},
            rollouts={"group_size": 2, "max_attempts": 1},
            sampling={"max_tokens": 1000},
        )
        async with working_on(redis_url, config):
            await until(lambda: settled(client, "run-1"), seconds=30)
    check_oracle(client, "run-1")
    letters: Any = client.hvals(RunKeys("run-1").dead)
    assert [json.loads(letter)["kind"] for letter in letters] == ["scoring_error"] * 2
    assert "beyond 1e+30" in letters[0].decode()


def test_a_sum_out_of_range_does_not_end_a_settlement_half_way(client: redis.Redis) -> None:
    """The group is appended and everything else about the item is settled with it."""
    keys = open_run(client, RUN)
    enqueue(client, RUN, 1)
    [lease] = Claimer(client, pool=POOL, worker="w", worker_key="rq:worker:w", lease_s=5).claim(1)
    counts = replace(emit_of(make_item(RUN, 0)).counts, reward_sum=float("inf"))
    settler = Settler(client, pool=POOL, worker="w", worker_key="rq:worker:w")
    assert settler.emit(lease, {"seq": 0}, counts) == "emitted"
    check_oracle(client, RUN)
    assert client.hget(keys.state, "reward_count") == b"1"


@pytest.mark.slow
async def test_workers_outlive_a_redis_that_stands_still_and_one_that_restarts(tmp_path: Path) -> None:
    """P5, P7: stopped for 12 s in the middle of emits, then restarted from its append-only file: every item once."""
    with RedisServer(tmp_path, aof=True) as server:
        client = server.client()
        keys = open_run(client, RUN)
        enqueue(client, RUN, 150)

        async def play(lease: Lease, item: RolloutItem) -> Outcome:
            await asyncio.sleep(0.05)
            return emit_of(item)

        one, two = (make_service(server.url, ScriptedPlayer(play), name=name, lease_s=3.0) for name in ("w1", "w2"))
        async with working(one), working(two):
            await until(lambda: client.xlen(keys.groups) > 20)
            server.pause()
            await asyncio.sleep(12)
            server.resume()
            await until(lambda: client.xlen(keys.groups) > 60, seconds=20)
            await asyncio.to_thread(server.restart)
            await until(lambda: client.xlen(keys.groups) == 150, seconds=30)
            await until(lambda: client.pubsub_numsub("rq:pubsub:w1")[0][1] == 1)
            send_shutdown_command(client, "w1")
            await until(lambda: one._stopping.is_set(), what="commands are not heard any more")
        check_oracle(client, RUN)
        assert client.hget(keys.state, "lost") is None, "an outage is charged to no item"


def test_leases_that_ran_out_in_an_outage_may_be_extended_before_they_are_swept(client: redis.Redis) -> None:
    """P5: nobody swept for long: the first sweep takes nothing and leaves time for beats; a lease that was not extended is swept then."""
    keys, lease_s = open_run(client, RUN), 60.0
    enqueue(client, RUN, 2)
    sweeper = Sweeper(client, pool=POOL, lease_s=lease_s)
    assert sweeper.sweep() == 0
    kept, dead = Claimer(client, pool=POOL, worker="w", worker_key="rq:worker:w", lease_s=lease_s).claim(2)
    ran_out = {f"{lease.job_id}:{lease.execution_id}": 1.0 for lease in (kept, dead)}
    client.zadd("rq:wip:default", ran_out)
    client.delete(*(f"rq:execution:{lease}" for lease in ran_out), "rq:worker:w:executions")
    client.set(swept_key(POOL), "1.0 0.0")
    assert sweeper.sweep() == 0
    assert sweeper.sweep() == 0
    beater = Beater(
        client,
        pool=POOL,
        worker="w",
        lease_s=lease_s,
        beat_s=1.0,
        leases=lambda: [kept],
        on_lost=lambda lease: None,
        on_end=lambda: None,
        announce=lambda: None,
        tick=time.monotonic,
    )
    beater.beat()
    seconds, _ = client.time()
    client.set(swept_key(POOL), f"{seconds}.0 {seconds}.0")
    assert sweeper.sweep() == 1
    assert client.lrange("rq:queue:default", 0, -1) == [dead.job_id.encode()]
    assert client.hget(keys.state, "lost") == b"1"
    [execution] = Job.fetch(kept.job_id, client, serializer="json").get_executions()
    assert (execution.id, execution.worker_name) == (kept.execution_id, "w"), "RQ reads what the beat wrote again"
    assert client.smembers("rq:worker:w:executions") == {execution.composite_key.encode()}


def test_jobs_of_others_do_not_keep_a_lease_from_being_swept(client: redis.Redis) -> None:
    """P4: more expired entries than one look takes, none of them ours to put back; ours behind them is."""
    open_run(client, RUN)
    enqueue(client, RUN, 1)
    [lease] = Claimer(client, pool=POOL, worker="w", worker_key="rq:worker:w", lease_s=60).claim(1)
    client.zadd("rq:wip:default", {f"{lease.job_id}:{lease.execution_id}": 2.0})
    with client.pipeline() as pipeline:
        for number in range(1200):
            pipeline.hset(f"rq:job:other-{number}", "status", "started")
            pipeline.zadd("rq:wip:default", {f"other-{number}:x": 1.0})
        pipeline.execute()
    assert Sweeper(client, pool=POOL).sweep() == 1
    assert client.lrange("rq:queue:default", 0, -1) == [lease.job_id.encode()]
    assert client.zcard("rq:wip:default") == 1200
