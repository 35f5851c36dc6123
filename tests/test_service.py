"""The worker's life on a real Redis: claim, beat, settle, sweep, drain, and RQ's own tools beside it."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
import redis
from rq.command import send_shutdown_command, send_stop_job_command
from rq.job import Job
from rq.registry import FailedJobRegistry, FinishedJobRegistry
from rq.serializers import JSONSerializer
from rq.suspension import resume, suspend

from distaff.clients import connect
from distaff.keys import RunKeys
from distaff.types import DeadLetter, RolloutItem
from distaff_worker import service as service_module
from distaff_worker.claim import Claimer
from distaff_worker.leases import Lease
from distaff_worker.metrics import Metrics
from distaff_worker.outcome import Bury, Outcome, Retry
from distaff_worker.rq_schema import JSONQueue, PoolKeys
from distaff_worker.service import Service
from distaff_worker.service_options import ServiceOptions
from distaff_worker.settle import Settler
from tests.worker_support import POOL, ScriptedPlayer, check_oracle, emit_of, enqueue, open_run, until

Play = Callable[[Lease, RolloutItem], Awaitable[Outcome]]
RUN = "run-1"


def make_service(url: str, player: ScriptedPlayer, *, name: str = "w1", **options: object) -> Service:
    settings = {"pool": POOL, "name": name, "slots": 8, "lease_s": 1.0, "beat_s": 0.2, "drain_s": 5.0, **options}
    return Service(connect(url), options=ServiceOptions(**settings), player=player, metrics=Metrics())  # type: ignore[arg-type]


@asynccontextmanager
async def working(service: Service) -> AsyncIterator[asyncio.Task[None]]:
    """The service at work; stopped gently at the end."""
    task = asyncio.create_task(service.run())
    try:
        yield task
        if not task.done():
            service._stop("test")
        await asyncio.wait_for(task, 60)  # a claim on a connection that went silent ends after 30 s
    finally:
        if not task.done():
            task.cancel()
            await asyncio.wait({task}, timeout=5)


def rq_info(url: str) -> str:
    command = [
        sys.executable,
        "-m",
        "rq.cli",
        "info",
        "-u",
        url,
        "-r",
        "--queue-class",
        "distaff_worker.rq_schema.JSONQueue",
    ]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def letter(item: RolloutItem, kind: str = "dropped") -> DeadLetter:
    return DeadLetter(item=item, kind=kind, boundary="group", message="m", attempts=1, first=1.0, last=2.0, worker="w1")  # type: ignore[arg-type]


async def test_every_item_ends_in_the_stream_exactly_once(redis_url: str, client: redis.Redis) -> None:
    """P1: Fifty items through eight slots: fifty entries, counters that agree, nothing left behind."""
    keys = open_run(client, RUN)
    enqueue(client, RUN, 50)
    async with working(make_service(redis_url, ScriptedPlayer())):
        await until(lambda: client.xlen(keys.groups) == 50)
    check_oracle(client, RUN)
    state = client.hgetall(keys.state)
    assert (state[b"rollouts"], state[b"tokens"], float(state[b"reward_sum"])) == (b"50", b"500", 25.0)
    assert FinishedJobRegistry(queue=JSONQueue(POOL, connection=client)).count == 50


async def test_items_of_a_killed_worker_are_played_by_another_within_two_leases(
    redis_url: str, client: redis.Redis
) -> None:
    """P4: a lease that nobody extends is swept, and the item is emitted once."""
    keys = open_run(client, RUN)
    enqueue(client, RUN, 1)
    dead = Claimer(client, pool=POOL, worker="dead", worker_key="rq:worker:dead", lease_s=1.0)
    assert len(dead.claim(1)) == 1
    started = time.monotonic()
    async with working(make_service(redis_url, ScriptedPlayer())):
        await until(lambda: client.xlen(keys.groups) == 1)
        assert time.monotonic() - started < 2.0
    check_oracle(client, RUN)
    assert client.hget(keys.state, "lost") == b"1"


async def test_a_worker_that_lost_its_lease_cannot_write(redis_url: str, client: redis.Redis) -> None:
    """P3: the zombie's commit is refused and what the second worker wrote stays alone."""
    keys = open_run(client, RUN)
    enqueue(client, RUN, 1)
    zombie = Claimer(client, pool=POOL, worker="zombie", worker_key="rq:worker:zombie", lease_s=0.2)
    [lease] = zombie.claim(1)
    async with working(make_service(redis_url, ScriptedPlayer())):
        await until(lambda: client.xlen(keys.groups) == 1)
    outcome = emit_of(RolloutItem(run=RUN, seq=0, key="", epoch=0, split="train", task={}, seed=0), by="zombie")
    settler = Settler(client, pool=POOL, worker="zombie", worker_key="rq:worker:zombie")
    assert settler.emit(lease, outcome.fields, outcome.counts) == "settled"
    assert settler.release(lease, "retried") == "lost"
    check_oracle(client, RUN)


async def test_a_settlement_sent_twice_writes_once(client: redis.Redis) -> None:
    """P5: a lost reply is resolved by sending the script again."""
    keys = open_run(client, RUN)
    enqueue(client, RUN, 2)
    first, second = Claimer(client, pool=POOL, worker="w", worker_key="rq:worker:w", lease_s=5).claim(2)
    settler = Settler(client, pool=POOL, worker="w", worker_key="rq:worker:w")
    item = RolloutItem(run=RUN, seq=0, key="", epoch=0, split="train", task={}, seed=0)
    outcome = emit_of(item)
    assert [settler.emit(first, outcome.fields, outcome.counts) for _ in range(2)] == ["emitted", "already"]
    assert [settler.bury(second, json.dumps({"kind": "lost"}), text="x") for _ in range(2)] == ["buried", "already"]
    assert client.xlen(keys.groups) == 1
    assert client.hget(keys.state, "dead") == b"1"


async def test_a_failed_attempt_is_counted_and_repeated(redis_url: str, client: redis.Redis) -> None:
    """Two retries, then success: the third attempt says so."""
    keys = open_run(client, RUN)
    enqueue(client, RUN, 1)
    attempts: list[int] = []

    async def play(lease: Lease, item: RolloutItem) -> Outcome:
        attempts.append(lease.attempts)
        return emit_of(item) if lease.attempts == 2 else Retry(kind="engine_error", boundary="engine", message="x")

    async with working(make_service(redis_url, ScriptedPlayer(play))):
        await until(lambda: client.xlen(keys.groups) == 1)
    assert attempts == [0, 1, 2]
    check_oracle(client, RUN)


async def test_a_dead_letter_is_a_failed_job_that_rq_requeue_brings_back(redis_url: str, client: redis.Redis) -> None:
    """`rq requeue` plays a dead letter again; settled once more, it is in the stream and no longer a dead letter."""
    keys = open_run(client, RUN)
    [name] = enqueue(client, RUN, 1)
    verdicts = [True, False]

    async def play(lease: Lease, item: RolloutItem) -> Outcome:
        return Bury(letter=letter(item), dropped=True) if verdicts.pop(0) else emit_of(item)

    async with working(make_service(redis_url, ScriptedPlayer(play))):
        await until(lambda: client.hexists(keys.dead, "0"))
        queue = JSONQueue(POOL, connection=client)
        assert FailedJobRegistry(queue=queue).get_job_ids() == [name]
        job = Job.fetch(name, connection=client, serializer=JSONSerializer)
        result = job.latest_result()
        assert result is not None
        assert "dropped in group: m" in (result.exc_string or "")
        check_oracle(client, RUN)
        command = [sys.executable, "-m", "rq.cli", "requeue", "-u", redis_url, "--queue", POOL, name]
        subprocess.run(command, check=True, capture_output=True)
        await until(lambda: client.xlen(keys.groups) == 1)
    check_oracle(client, RUN)
    assert client.hget(keys.state, "dropped") == b"0"


async def test_stop_job_ends_one_of_many(redis_url: str, client: redis.Redis) -> None:
    """`send_stop_job_command` makes a dead letter of that item; the others go on."""
    keys = open_run(client, RUN)
    names = enqueue(client, RUN, 3)
    release = asyncio.Event()

    async def play(lease: Lease, item: RolloutItem) -> Outcome:
        await release.wait()
        return emit_of(item)

    player = ScriptedPlayer(play)
    async with working(make_service(redis_url, player)):
        await until(lambda: len(player.played) == 3)
        send_stop_job_command(client, names[1], serializer=JSONSerializer)
        await until(lambda: client.hexists(keys.dead, "1"))
        assert json.loads(client.hget(keys.dead, "1") or b"")["kind"] == "stopped"
        release.set()
        await until(lambda: client.xlen(keys.groups) == 2)
    assert Job.fetch(names[1], connection=client, serializer=JSONSerializer).is_stopped
    check_oracle(client, RUN)


async def test_shutdown_command_drains(redis_url: str, client: redis.Redis) -> None:
    """`send_shutdown_command` lets what runs finish and ends the worker."""
    keys = open_run(client, RUN)
    enqueue(client, RUN, 2)

    async def play(lease: Lease, item: RolloutItem) -> Outcome:
        await asyncio.sleep(0.3)
        return emit_of(item)

    player = ScriptedPlayer(play)
    async with working(make_service(redis_url, player)) as task:
        await until(lambda: len(player.played) == 2)
        send_shutdown_command(client, "w1")
        await asyncio.wait_for(asyncio.shield(task), 10)
    assert client.xlen(keys.groups) == 2
    assert client.smembers("rq:workers") == set()


async def test_a_worker_is_announced_whole_when_it_appears(redis_url: str, client: redis.Redis) -> None:
    """Not with the first beat: for seconds it would be shown as not ready and with another number of slots."""
    service = make_service(redis_url, ScriptedPlayer(), beat_s=60)
    service._metrics.count_turns(turns=5, bridged=3, breaks=["tools_changed"])
    async with working(service):
        await until(lambda: client.hget("rq:worker:w1", "ready") == b"1")
        assert client.hget("rq:worker:w1", "prefix_share") == b"0.75"
        assert client.hget("rq:worker:w1", "pool") == POOL.encode()


async def test_suspend_holds_and_resume_goes_on(redis_url: str, client: redis.Redis) -> None:
    """`rq suspend` stops claims, `rq resume` continues them."""
    keys = open_run(client, RUN)
    async with working(make_service(redis_url, ScriptedPlayer())):
        suspend(client)
        await until(lambda: client.hget("rq:worker:w1", "state") == b"suspended")
        enqueue(client, RUN, 3)
        await asyncio.sleep(0.5)
        assert client.xlen(keys.groups) == 0
        resume(client)
        await until(lambda: client.xlen(keys.groups) == 3)


async def test_a_stop_past_the_grace_hands_items_back_at_the_front(redis_url: str, client: redis.Redis) -> None:
    """P17: handed-back items wait for nobody's lease."""
    open_run(client, RUN)
    names = enqueue(client, RUN, 2)

    async def play(lease: Lease, item: RolloutItem) -> Outcome:
        await asyncio.sleep(60)
        return emit_of(item)

    player = ScriptedPlayer(play)
    async with working(make_service(redis_url, player, drain_s=0.2)):
        await until(lambda: len(player.played) == 2)
    assert set(client.lrange(PoolKeys.of(POOL).queue, 0, -1)) == {name.encode() for name in names}
    assert client.zcard(PoolKeys.of(POOL).wip) == 0
    assert client.hget(RunKeys(RUN).state, "handed_back") == b"2"


async def test_sixty_four_groups_in_flight_show_as_executing_in_rq_info(redis_url: str, client: redis.Redis) -> None:
    """Stock `rq info` counts every concurrent item of one worker, and the loop stays responsive."""
    keys = open_run(client, RUN)
    enqueue(client, RUN, 100)
    release = asyncio.Event()

    async def play(lease: Lease, item: RolloutItem) -> Outcome:
        await release.wait()
        return emit_of(item)

    player = ScriptedPlayer(play)
    service = make_service(redis_url, player, slots=64, lease_s=10.0)
    async with working(service):
        await until(lambda: len(player.played) == 64)
        text = await asyncio.to_thread(rq_info, redis_url)
        release.set()
        await until(lambda: client.xlen(keys.groups) == 100)
    assert "64 executing" in text
    assert "36" in text
    check_oracle(client, RUN)


async def test_a_foreign_job_is_rejected_without_being_run(redis_url: str, client: redis.Redis) -> None:
    """P26: a job that `distaff produce` did not make fails with a reason; nothing it names is imported or unpickled."""
    open_run(client, RUN)
    bomb = b"cos\nsystem\n(S'touch /tmp/distaff-bomb'\ntR."
    enqueue(client, RUN, 1, data=bomb)
    queue = JSONQueue(POOL, connection=client)
    stranger = queue.enqueue("os.getcwd")
    player = ScriptedPlayer()
    async with working(make_service(redis_url, player)):
        await until(lambda: FailedJobRegistry(queue=queue).count == 2)
    assert player.played == []
    assert json.loads(client.hget(RunKeys(RUN).dead, "0") or b"")["kind"] == "rejected"
    assert stranger.get_status(refresh=True) == "failed"
    check_oracle(client, RUN)


async def test_a_duplicate_id_in_the_list_is_played_once(redis_url: str, client: redis.Redis) -> None:
    """Two cleaners that both put a job back make one group."""
    keys = open_run(client, RUN)
    [name] = enqueue(client, RUN, 1)
    client.rpush(PoolKeys.of(POOL).queue, name, name)
    player = ScriptedPlayer()
    async with working(make_service(redis_url, player)):
        await until(lambda: client.llen(PoolKeys.of(POOL).queue) == 0 and client.xlen(keys.groups) == 1)
    assert player.played == [0]
    check_oracle(client, RUN)


def test_items_that_may_kill_workers_are_played_one_at_a_time(client: redis.Redis) -> None:
    """P13: of the items lost twice a worker holds one; the others wait at the back, and the innocent go on."""
    open_run(client, RUN)
    names = enqueue(client, RUN, 6)
    for name in names[:3]:
        client.hset(f"rq:job:{name}", "distaff_lost", 2)
    claimer = Claimer(client, pool=POOL, worker="w", worker_key="rq:worker:w", lease_s=5)
    first = claimer.claim(16)
    assert [lease.job_id for lease in first] == [names[0], *names[3:]]
    assert [lease.suspect for lease in first] == [True, False, False, False]
    assert claimer.claim(16, suspects=1) == []
    assert client.lrange(PoolKeys.of(POOL).queue, 0, -1) == [name.encode() for name in names[1:3]]
    assert [lease.job_id for lease in claimer.claim(16)] == [names[1]]


async def test_a_queue_of_nothing_but_waiting_suspects_is_drained_in_turn(redis_url: str, client: redis.Redis) -> None:
    """They end one after the other, without a worker that spins."""
    open_run(client, RUN)
    for name in enqueue(client, RUN, 3):
        client.hset(f"rq:job:{name}", "distaff_lost", 2)
    at_once: list[int] = []
    running = 0

    async def play(lease: Lease, item: RolloutItem) -> Outcome:
        nonlocal running
        running += 1
        at_once.append(running)
        await asyncio.sleep(0.2)
        running -= 1
        return emit_of(item)

    async with working(make_service(redis_url, ScriptedPlayer(play))):
        await until(lambda: client.xlen(RunKeys(RUN).groups) == 3)
    assert at_once == [1, 1, 1]
    check_oracle(client, RUN)


async def test_the_worker_ends_by_itself_in_burst_mode(redis_url: str, client: redis.Redis) -> None:
    """An empty queue ends a burst worker once nothing runs."""
    open_run(client, RUN)
    enqueue(client, RUN, 5)
    await asyncio.wait_for(make_service(redis_url, ScriptedPlayer(), burst=True).run(), 20)
    check_oracle(client, RUN)


async def test_a_burst_worker_does_not_take_an_outage_for_an_empty_queue(
    redis_url: str, client: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A claim that Redis did not answer says nothing about the queue."""
    open_run(client, RUN)
    enqueue(client, RUN, 3)
    service = make_service(redis_url, ScriptedPlayer(), burst=True)
    claim, failures = service._claimer.claim, [redis.exceptions.ConnectionError("cut")]

    def once_cut(*args: Any, **options: Any) -> list[Lease]:
        if failures:
            raise failures.pop()
        return claim(*args, **options)

    monkeypatch.setattr(service._claimer, "claim", once_cut)
    await asyncio.wait_for(service.run(), 20)
    check_oracle(client, RUN)


@pytest.mark.parametrize("groups", [1, 7])
async def test_the_worker_recycles_after_max_groups(redis_url: str, client: redis.Redis, groups: int) -> None:
    """P16: `max_groups` settles exactly so many and leaves the rest on the queue."""
    open_run(client, RUN)
    enqueue(client, RUN, 10)
    await asyncio.wait_for(make_service(redis_url, ScriptedPlayer(), max_groups=groups).run(), 20)
    assert client.xlen(RunKeys(RUN).groups) == groups
    assert client.llen(PoolKeys.of(POOL).queue) == 10 - groups


async def test_a_worker_that_has_grown_ends_and_leaves_the_rest(
    redis_url: str, client: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    """P16: `max_rss_bytes` lets what is played finish and leaves the rest on the queue."""
    open_run(client, RUN)
    enqueue(client, RUN, 20)
    used_bytes = iter([10, 20, *[30] * 100])
    monkeypatch.setattr(service_module, "rss_bytes", lambda: next(used_bytes))
    await asyncio.wait_for(make_service(redis_url, ScriptedPlayer(), slots=4, max_rss_bytes=30).run(), 20)
    assert client.xlen(RunKeys(RUN).groups) + client.llen(PoolKeys.of(POOL).queue) == 20
    assert 0 < client.xlen(RunKeys(RUN).groups) < 20
    assert client.zcard(PoolKeys.of(POOL).wip) == 0


def test_a_process_knows_its_memory() -> None:
    """Resident bytes, which grow with what is allocated; asked in a new process, which has no freed memory to use again."""
    code = (
        "from distaff_worker.memory import rss_bytes\n"
        "before = rss_bytes(); held = bytearray(b'x') * (64 << 20); print(rss_bytes() - before)"
    )
    grown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert 60 << 20 < int(grown.stdout) < 100 << 20
