"""P20: cancelling a Redis call, at whatever moment, gives no reply to another call and loses nothing."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Iterator

import pytest
import redis
import redis.asyncio

from distaff import AsyncGroupConsumer, Delivery
from distaff.clients import connect_async
from distaff.keys import RunKeys
from distaff.types import RolloutItem
from distaff_worker.leases import Lease
from distaff_worker.outcome import Outcome
from tests.group_support import append_groups, make_group
from tests.harness.resp_proxy import RespProxy
from tests.harness.seeds import seeded
from tests.test_service import RUN, make_service, working
from tests.worker_support import ScriptedPlayer, check_oracle, emit_of, enqueue, open_run, until

CANCELLATIONS = 200
DELAY_S = 0.002
CALLERS = 8


@pytest.fixture
def proxy(redis_url: str) -> Iterator[RespProxy]:
    """Every reply comes a little later than it was given."""
    with RespProxy(redis_url) as slow:
        slow.delay(DELAY_S)
        yield slow


async def cut_short(call: asyncio.Task[object], rng: random.Random) -> bool:
    """Cancel `call` at a random moment of its life; True when that came in time. Raises what the call raised."""
    done, _ = await asyncio.wait({call}, timeout=rng.uniform(0, 8 * DELAY_S))
    if done:
        call.result()
        return False
    call.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await call
    return call.cancelled()


async def ask(client: redis.asyncio.Redis, number: int, kind: int) -> None:
    """One call of four kinds; its reply is nobody else's, or this fails."""
    key = f"key-{number}"
    match kind:
        case 0:
            assert await client.get(key) == key.encode()
        case 1:
            assert await client.mget(key, f"key-{number + 1}") == [key.encode(), f"key-{number + 1}".encode()]
        case 2:
            async with client.pipeline(transaction=True) as pipeline:
                pipeline.get(key)
                pipeline.echo(key)
                assert await pipeline.execute() == [key.encode(), key.encode()]
        case _:
            assert await client.eval("return {KEYS[1], ARGV[1]}", 1, key, number) == [key.encode(), b"%d" % number]


@pytest.mark.parametrize("connections", [1, CALLERS])
async def test_no_reply_goes_to_another_call(
    proxy: RespProxy, client: redis.Redis, request: pytest.FixtureRequest, connections: int
) -> None:
    """P20: 200 calls (100 on one connection) cancelled at random; every other call, on the same connections, gets the reply that is its own."""
    count, wanted = 1000, CANCELLATIONS if connections > 1 else CANCELLATIONS // 2
    client.mset({f"key-{n}": f"key-{n}" for n in range(count + 1)})
    with seeded(request) as seed:
        rng = random.Random(seed)
        mine = connect_async(proxy.url)
        mine.connection_pool.max_connections = connections
        cancelled = answered = 0

        async def call_again_and_again(rng: random.Random) -> None:
            nonlocal cancelled, answered
            while cancelled < wanted:
                call = asyncio.ensure_future(ask(mine, rng.randrange(count), rng.randrange(4)))
                if await cut_short(call, rng):
                    cancelled += 1
                await ask(mine, rng.randrange(count), rng.randrange(4))
                answered += 1

        async with mine:
            callers = CALLERS if connections > 1 else 1
            await asyncio.gather(*(call_again_and_again(random.Random(rng.random())) for _ in range(callers)))
    assert answered >= cancelled >= wanted


async def test_reads_and_acknowledgements_cut_short_lose_no_group(
    proxy: RespProxy, client: redis.Redis, request: pytest.FixtureRequest
) -> None:
    """P20: AsyncGroupConsumer with reads and acknowledgements cancelled at random, up to 200 of them: every group once, in order, and all freed."""
    sent = 140
    append_groups(client, (make_group(run=RUN, seq=seq, rollouts=2, tokens=8) for seq in range(sent)))
    with seeded(request) as seed:
        rng = random.Random(seed)
        got: list[Delivery] = []
        acknowledged: set[str] = set()
        cancelled = 0
        async with AsyncGroupConsumer(RUN, proxy.url, batch=3, block_s=0.02, max_deliveries=10_000) as consumer:

            async def read() -> None:
                got.append(await anext(consumer))

            async def acknowledge(delivery: Delivery) -> None:
                assert await consumer.ack(delivery) in (0, 1)
                acknowledged.add(delivery.entry_id)

            while len(acknowledged) < sent or cancelled < CANCELLATIONS:
                unread = len(got) < sent
                waiting = [delivery for delivery in got if delivery.entry_id not in acknowledged]
                if not waiting and not unread:
                    break
                job = read() if unread and (not waiting or rng.random() < 0.5) else acknowledge(rng.choice(waiting))
                cancelled += await cut_short(asyncio.ensure_future(job), rng)
            with pytest.raises(StopAsyncIteration):
                await asyncio.wait_for(anext(consumer), 20)
    assert [delivery.group.seq for delivery in got] == list(range(sent))
    # How many meet their end before the answer comes is a matter of the machine's speed.
    assert cancelled >= CANCELLATIONS // 3, "too few were cancelled to prove anything"
    assert client.xlen(RunKeys(RUN).groups) == 0
    assert client.exists(RunKeys(RUN).parked("trainer")) == 0


async def test_executions_cut_short_settle_every_item_once(
    proxy: RespProxy, client: redis.Redis, request: pytest.FixtureRequest
) -> None:
    """P20: a worker whose items are handed back 200 times, at random moments of claim, play and settlement."""
    items = 250
    keys = open_run(client, RUN)
    enqueue(client, RUN, items)
    with seeded(request) as seed:
        rng = random.Random(seed)

        async def play(lease: Lease, item: RolloutItem) -> Outcome:
            await asyncio.sleep(rng.uniform(0, 0.03))
            return emit_of(item)

        service = make_service(proxy.url, ScriptedPlayer(play), lease_s=5.0)
        async with working(service):
            interrupted = 0
            while interrupted < CANCELLATIONS:
                for lease in service._executions.leases():
                    if rng.random() < 0.6:
                        service._executions.interrupt(lease.execution_id, "hand_back")
                        interrupted += 1
                await asyncio.sleep(rng.uniform(0, 0.02))
            await until(lambda: client.xlen(keys.groups) == items, seconds=30)
    check_oracle(client, RUN)
    assert interrupted >= CANCELLATIONS
