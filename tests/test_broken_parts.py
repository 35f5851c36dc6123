"""No worker is alive but dead: whichever thread or task of it fails, it hands back what it holds and ends with a code that says so."""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import redis

from distaff.errors import WorkerBroken
from distaff.types import RolloutItem
from distaff_worker.leases import Lease
from distaff_worker.outcome import Outcome
from distaff_worker.rq_schema import PoolKeys
from tests.broken_worker import PARTS, breaking
from tests.farm_support import produce, run_config, says, settled
from tests.harness.oracle import check, check_settled
from tests.harness.processes import start
from tests.scripted_engine import Ask, Reply, ScriptedEngine
from tests.test_service import RUN, make_service, working
from tests.worker_support import POOL, ScriptedPlayer, emit_of, enqueue, open_run, until

ITEMS = 6
SECONDS = 8.0
"""Within which a broken worker has to be gone: it beats every 0.2 s, claims and sweeps every second."""
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")


async def hold(lease: Lease, item: RolloutItem) -> Outcome:
    await asyncio.sleep(600)
    return emit_of(item)


@contextmanager
def quiet_threads() -> Iterator[None]:
    """Without the hook that prints a thread's exception."""
    hook, threading.excepthook = threading.excepthook, lambda args: None
    yield
    threading.excepthook = hook


def check_handed_back(client: redis.Redis, items: int = ITEMS) -> None:
    """Everything is on the queue again, and not because a lease ran out."""
    assert client.llen(PoolKeys.of(POOL).queue) == items
    assert client.zcard(PoolKeys.of(POOL).wip) == 0
    assert client.hget("distaff:run:run-1:state", "lost") is None
    assert client.smembers("rq:workers") == set()


@pytest.mark.parametrize("part", PARTS)
async def test_a_part_that_fails_ends_the_worker_and_hands_back(
    redis_url: str, client: redis.Redis, monkeypatch: pytest.MonkeyPatch, part: str
) -> None:
    """P2, P4: an unexpected exception in beat, claim or sweep; the items wait for no lease, and another worker plays them."""
    open_run(client, RUN)
    enqueue(client, RUN, ITEMS)
    player = ScriptedPlayer(hold)
    service = make_service(redis_url, player, lease_s=4.0, beat_s=0.2)
    owner, name = PARTS[part]
    monkeypatch.setattr(owner, name, breaking(getattr(owner, name), lambda: len(player.played) == ITEMS))
    with quiet_threads():
        with pytest.raises(WorkerBroken, match="start it again"):
            await asyncio.wait_for(service.run(), SECONDS)
        monkeypatch.undo()
    check_handed_back(client)
    async with working(make_service(redis_url, ScriptedPlayer(), name="w2")):
        await until(lambda: client.xlen("distaff:run:run-1:groups") == ITEMS)
    check_settled(client, RUN)


@pytest.mark.parametrize("denied", ["xadd", "evalsha"])
async def test_a_worker_that_may_not_settle_any_more_ends_instead_of_wearing_items_out(
    redis_url: str, client: redis.Redis, denied: str
) -> None:
    """P27: an ACL that is narrowed under a worker refuses one result, not each item again and again until it is given up."""
    user, rules = "narrow", {"enabled": True, "passwords": ["+canary"], "keys": ["*"], "channels": ["*"]}
    client.acl_setuser(user, categories=["+@all"], **rules)  # type: ignore[arg-type]
    try:
        open_run(client, RUN)
        enqueue(client, RUN, ITEMS)
        go = asyncio.Event()

        async def play(lease: Lease, item: RolloutItem) -> Outcome:
            await go.wait()
            return emit_of(item)

        player = ScriptedPlayer(play)
        url = redis_url.replace("unix://", f"unix://{user}:canary@")
        task = asyncio.create_task(make_service(url, player, lease_s=2.0, beat_s=0.2).run())
        await until(lambda: len(player.played) == ITEMS)
        client.acl_setuser(user, categories=["+@all"], commands=[f"-{denied}"], **rules)  # type: ignore[arg-type]
        go.set()
        with quiet_threads(), pytest.raises(WorkerBroken, match=r"does not let user 'narrow' do this.*handed back"):
            await asyncio.wait_for(task, SECONDS)
    finally:
        client.acl_deluser(user)
    async with working(make_service(redis_url, ScriptedPlayer(), name="w2")):
        await until(lambda: client.xlen("distaff:run:run-1:groups") == ITEMS, seconds=20)
    check_settled(client, RUN)


@pytest.mark.slow
async def test_a_worker_process_with_a_broken_part_exits_with_code_1(redis_url: str, client: redis.Redis) -> None:
    """P2, P4: the real command with four requests in the air: code 1 within seconds, one message, the item back on the queue."""
    go = asyncio.Event()

    async def script(ask: Ask) -> Reply:
        if ask.sampling.get("max_tokens") != 1:
            await go.wait()
        return says("number 1")

    async with ScriptedEngine(script=script) as engine:
        await produce(redis_url, run_config(engine.url, environment={"args": {"rows": 1, "turns": 1}}))
        command = [sys.executable, "-m", "tests.broken_worker", "beat", "work", "--redis-url", redis_url]
        with start([*command, "--worker.lease-s", "4", "--worker.beat-s", "0.5"]) as worker:
            code = await asyncio.to_thread(worker.wait, 60)
            assert code == 1, worker.log
            assert "worker.broke" in worker.log
            assert "distaff work: a part of the worker failed" in worker.log
        check_handed_back(client, 1)
        go.set()
        with start([*command[:1], "-m", "distaff", *command[4:], "--worker.exit-when-done", "true"]) as worker:
            assert await asyncio.to_thread(worker.wait, 60) == 0, worker.log
    assert settled(client, "run-1")
    check(client, "run-1")


@pytest.mark.slow
async def test_a_worker_whose_loop_stands_still_writes_its_stacks_and_ends(redis_url: str, client: redis.Redis) -> None:
    """P15: after four lease times the process is gone by itself, with the place where it stood, and another plays the item."""
    async with ScriptedEngine(script=lambda ask: says("number 1")) as engine:
        await produce(redis_url, run_config(engine.url, environment={"args": {"rows": 1, "turns": 1}}))
        command = [sys.executable, "-m", "tests.broken_worker", "loop", "work", "--redis-url", redis_url]
        with start([*command, "--worker.lease-s", "1"]) as worker:
            code = await asyncio.to_thread(worker.wait, 60)
            assert code == 1, worker.log
            assert "Timeout (0:00:04)!" in worker.log
            assert "in stand_still" in worker.log
        with start([*command[:1], "-m", "distaff", *command[4:], "--worker.exit-when-done", "true"]) as worker:
            assert await asyncio.to_thread(worker.wait, 60) == 0, worker.log
    assert settled(client, "run-1")
    check(client, "run-1")
