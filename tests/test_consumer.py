"""Both consumers: everything once, in order, freed when done with, and an end."""

from __future__ import annotations

import asyncio
import random
import sys
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import redis
import redis.asyncio

from distaff import AsyncGroupConsumer, Delivery, GroupConsumer
from distaff.clients import connect_async
from distaff.errors import CodecMissing, ConfigurationError, GroupTooLarge, SchemaVersionError
from distaff.keys import RunKeys
from distaff.seen import SeenNumbers
from distaff.wire import decode_group, encode_group
from tests.group_support import append_groups, assert_same_group, make_group

KEYS = RunKeys("run")
FAST: dict[str, Any] = {"block_s": 0.05, "claim_idle_s": 0.2}


def _groups(count: int, **options: Any) -> Iterator[Any]:
    return (make_group(seq=seq, rollouts=2, tokens=8, **options) for seq in range(count))


def _seqs(deliveries: list[Delivery]) -> list[int]:
    return [delivery.group.seq for delivery in deliveries]


def _parked(client: redis.Redis) -> list[dict[bytes, bytes]]:
    entries: Any = client.xrange(KEYS.parked("trainer"))
    return [fields for _, fields in entries]


def _memory(client: redis.Redis) -> int:
    size: Any = client.memory_usage(KEYS.groups)
    return int(size)


class Sync:
    """The synchronous consumer behind the asyncio one's face, so that one test serves both."""

    def __init__(self, url: str, **options: Any) -> None:
        self.consumer = GroupConsumer("run", url, **{**FAST, **options})

    async def batches(self, n: int) -> list[list[Delivery]]:
        batches = []
        for batch in self.consumer.batches(n):
            batches.append(batch)
            self.consumer.ack(*batch)
        return batches

    async def rest(self) -> list[Delivery]:
        return list(self.consumer)

    async def some(self, count: int) -> list[Delivery]:
        return [next(self.consumer) for _ in range(count)]

    async def ack(self, *deliveries: Delivery) -> int:
        return self.consumer.ack(*deliveries)

    async def close(self) -> None:
        self.consumer.close()


class Async:
    """The asyncio consumer."""

    def __init__(self, url: str, **options: Any) -> None:
        self.consumer = AsyncGroupConsumer("run", url, **{**FAST, **options})

    async def batches(self, n: int) -> list[list[Delivery]]:
        batches = []
        async for batch in self.consumer.batches(n):
            batches.append(batch)
            await self.consumer.ack(*batch)
        return batches

    async def rest(self) -> list[Delivery]:
        return [delivery async for delivery in self.consumer]

    async def some(self, count: int) -> list[Delivery]:
        return [await anext(self.consumer) for _ in range(count)]

    async def ack(self, *deliveries: Delivery) -> int:
        return await self.consumer.ack(*deliveries)

    async def close(self) -> None:
        await self.consumer.close()


Kind = type[Sync] | type[Async]
both = pytest.mark.parametrize("kind", [Sync, Async])


@both
async def test_every_group_comes_once_in_order_and_then_the_run_ends(
    kind: Kind, client: redis.Redis, redis_url: str
) -> None:
    """Batches of n, the last one shorter; what was acknowledged is gone from the stream, and the member from the group."""
    sent = list(_groups(21))
    append_groups(client, sent)
    consumer = kind(redis_url, batch=4)
    batches = await consumer.batches(5)
    await consumer.close()
    assert [len(batch) for batch in batches] == [5, 5, 5, 5, 1]
    read = [delivery for batch in batches for delivery in batch]
    for delivery, group in zip(read, sent, strict=True):
        assert_same_group(delivery.group, group)
        assert delivery.deliveries == 1
    assert client.xlen(KEYS.groups) == 0
    assert client.xinfo_consumers(KEYS.groups, "trainer") == []


@both
async def test_the_iteration_waits_until_the_run_is_closed_and_settled(
    kind: Kind, client: redis.Redis, redis_url: str
) -> None:
    """Not while the run is open, nor closed with items in flight; dead letters count as settled."""
    append_groups(client, _groups(3), close=False)
    consumer = kind(redis_url)
    got = await consumer.some(3)
    reading = asyncio.create_task(asyncio.to_thread(asyncio.run, consumer.rest()) if kind is Sync else consumer.rest())
    client.hset(KEYS.state, mapping={"admitted": 6, "status": "closed"})
    await asyncio.sleep(0.15)
    assert not reading.done()
    append_groups(client, [make_group(seq=5, rollouts=2, tokens=8)])
    client.hset(KEYS.state, mapping={"admitted": 6, "emitted": 4, "dead": 2})
    assert _seqs(await asyncio.wait_for(reading, 5)) == [5]
    assert await consumer.ack(*got) == 3
    await consumer.close()


@both
async def test_unacknowledged_groups_come_back_first_under_the_same_name(
    kind: Kind, client: redis.Redis, redis_url: str
) -> None:
    """In order, with their count, before anything new; those parked after max_deliveries stay away."""
    append_groups(client, _groups(6))
    first = kind(redis_url, consumer="trainer-0", batch=3)
    await first.ack((await first.some(3))[1])
    for life in (2, 3):
        again = kind(redis_url, consumer="trainer-0", batch=2, max_deliveries=3)
        got = await again.some(3)
        assert [(delivery.group.seq, delivery.deliveries) for delivery in got] == [(0, life), (2, life), (3, life - 1)]
    last = kind(redis_url, consumer="trainer-0", max_deliveries=3)
    rest = await last.rest()
    assert _seqs(rest) == [3, 4, 5]
    assert last.consumer.parked == 2
    assert [(fields[b"seq"], fields[b"deliveries"]) for fields in _parked(client)] == [(b"0", b"3"), (b"2", b"3")]
    await last.ack(*rest)
    assert client.xlen(KEYS.groups) == 0


@both
async def test_a_group_that_cannot_be_decoded_is_parked_and_the_rest_goes_on(
    kind: Kind, client: redis.Redis, redis_url: str
) -> None:
    """Damaged bytes never heal: whole entry and reason are kept, the entry is acknowledged, the run ends."""
    append_groups(client, [make_group(seq=0, tokens=8)])
    client.xadd(KEYS.groups, {**encode_group(make_group(seq=1, tokens=8)), "group": b"\x81\xa1x\x90"})
    client.xadd(KEYS.groups, {"junk": "x"})
    append_groups(client, [make_group(seq=2, tokens=8)])
    consumer = kind(redis_url)
    rest = await consumer.rest()
    assert _seqs(rest) == [0, 2]
    damaged, junk = _parked(client)
    assert damaged[b"group"] == b"\x81\xa1x\x90"
    assert junk[b"junk"] == b"x"
    assert b"schema" in junk[b"reason"]
    await consumer.ack(*rest)
    assert client.xlen(KEYS.groups) == 0


@both
async def test_a_group_this_installation_cannot_read_is_an_error_and_stays(
    kind: Kind, client: redis.Redis, redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A newer major, a missing codec, a limit set too low: the caller is told each time, nothing is parked or lost."""
    append_groups(client, [make_group(tokens=512)], compression="zstd")
    small = kind(redis_url, consumer="same", max_bytes=1000)
    for _ in range(2):
        with pytest.raises(GroupTooLarge, match="max_bytes"):
            await small.some(1)
    monkeypatch.setitem(sys.modules, "zstandard", None)
    with pytest.raises(CodecMissing, match="pip install"):
        await kind(redis_url, consumer="same").some(1)
    monkeypatch.undo()
    good = kind(redis_url, consumer="same")
    assert _seqs(await good.some(1)) == [0]
    client.xadd(KEYS.groups, {**encode_group(make_group(seq=1)), "schema": "2.0"})
    with pytest.raises(SchemaVersionError, match="install"):
        await good.some(1)
    assert client.exists(KEYS.parked("trainer")) == 0
    assert client.xpending(KEYS.groups, "trainer")["pending"] == 2


@both
async def test_a_group_that_is_in_the_stream_twice_is_yielded_once(
    kind: Kind, client: redis.Redis, redis_url: str
) -> None:
    """By its group id, within one consumer process; the copy is acknowledged unseen."""
    append_groups(client, [*_groups(4), make_group(seq=2), make_group(seq=0)])
    client.hset(KEYS.state, mapping={"admitted": 6, "emitted": 6})
    consumer = kind(redis_url)
    rest = await consumer.rest()
    assert _seqs(rest) == [0, 1, 2, 3]
    assert consumer.consumer.duplicates == 2
    await consumer.ack(*rest)
    assert client.xlen(KEYS.groups) == 0


@both
async def test_a_new_run_of_the_same_name_is_not_taken_for_duplicates(
    kind: Kind, client: redis.Redis, redis_url: str
) -> None:
    """Redis was flushed under a live consumer and the run opened again: its groups come, from 0 on."""
    append_groups(client, _groups(3), close=False)
    consumer = kind(redis_url)
    await consumer.some(3)
    client.flushall()
    client.hset(KEYS.state, "opened", "1790009999.0")
    GroupConsumer("run", client).join()
    append_groups(client, _groups(2))
    assert _seqs(await consumer.rest()) == [0, 1]


async def test_a_slow_second_consumer_group_loses_nothing(client: redis.Redis, redis_url: str) -> None:
    """P9: Two groups and one that comes later, acknowledging in random order: each gets all, and only then is the stream empty."""
    sent = 40
    append_groups(client, _groups(sent // 2), close=False)
    fast = GroupConsumer("run", client, group="fast", batch=7, **FAST)
    slow = GroupConsumer("run", client, group="slow", batch=3, **FAST)
    slow.join()
    rng = random.Random(1)
    fast_got = [next(fast) for _ in range(sent // 2)]
    rng.shuffle(fast_got)
    for delivery in fast_got:
        fast.ack(delivery)
    assert client.xlen(KEYS.groups) == sent // 2, "freed what the slow group has not read"
    slow_got = [next(slow) for _ in range(5)]
    slow.ack(*slow_got[1:])
    assert client.xlen(KEYS.groups) == sent // 2 - 4, "only the four that both acknowledged are free"
    slow.ack(slow_got[0])
    assert client.xlen(KEYS.groups) == sent // 2 - 5
    late = GroupConsumer("run", client, group="late", **FAST)
    late.join()
    append_groups(client, (make_group(seq=seq, rollouts=2, tokens=8) for seq in range(sent // 2, sent)))
    for consumer, got in ((slow, slow_got), (fast, fast_got), (late, [])):
        for batch in consumer.batches(4):
            got += batch
            consumer.ack(*batch)
    assert sorted(_seqs(fast_got)) == sorted(_seqs(slow_got)) == list(range(sent))
    assert _seqs(got) == list(range(5, sent)), "a group created later sees what is left"
    assert client.xlen(KEYS.groups) == 0


def test_memory_returns_to_base_when_groups_are_acknowledged(client: redis.Redis) -> None:
    """P9: Redis's own count of the stream's bytes, with two consumer groups."""
    append_groups(client, (make_group(seq=seq, tokens=1024) for seq in range(20)))
    before = _memory(client)
    for name in ("a", "b"):
        consumer = GroupConsumer("run", client, group=name, **FAST)
        consumer.join()
    for name in ("a", "b"):
        with GroupConsumer("run", client, group=name, **FAST) as consumer:
            for delivery in consumer:
                consumer.ack(delivery)
    assert before > 1_000_000
    assert _memory(client) < 10_000


async def test_a_cancelled_read_loses_nothing(client: redis.Redis, redis_url: str) -> None:
    """P20: A timeout strikes after Redis delivered and before the reply is here: those entries are found again, in order."""
    append_groups(client, _groups(30), close=False)
    mine = connect_async(redis_url)
    rng = random.Random(3)
    cancelled = 0

    def lose_replies(name: str) -> None:
        method = getattr(mine, name)

        async def losing(*args: Any, **options: Any) -> Any:
            reply = await method(*args, **options)
            if rng.random() < 0.4:
                await asyncio.sleep(60)
            return reply

        setattr(mine, name, losing)

    for name in ("xreadgroup", "xclaim", "xpending_range"):
        lose_replies(name)
    got: list[Delivery] = []
    async with mine, AsyncGroupConsumer("run", mine, batch=4, max_deliveries=1000) as consumer:
        while len(got) < 30:
            try:
                async with asyncio.timeout(0.05):
                    got.append(await anext(consumer))
            except TimeoutError:
                cancelled += 1
        assert _seqs(got) == list(range(30))
        assert await consumer.ack(*got) == 30
    assert cancelled > 5
    assert client.xlen(KEYS.groups) == 0


async def test_a_cancellation_that_redis_swallows_still_counts(client: redis.Redis, redis_url: str) -> None:
    """asyncio.wait_for of Python 3.11 does that, inside of redis-py: the reply comes and the cancellation is forgotten."""
    append_groups(client, _groups(2), close=False)
    mine = connect_async(redis_url)
    method = mine.xreadgroup

    async def swallowing(*args: Any, **options: Any) -> Any:
        reply = await method(*args, **options)
        try:
            await asyncio.sleep(0.1)
        except asyncio.CancelledError:
            return reply
        return reply

    async with mine, AsyncGroupConsumer("run", mine, **FAST) as consumer:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(mine, "xreadgroup", swallowing)
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.05):
                    await anext(consumer)
        assert [(await anext(consumer)).group.seq for _ in range(2)] == [0, 1]


async def test_a_batch_that_was_cancelled_half_way_is_continued(client: redis.Redis, redis_url: str) -> None:
    """What was collected for it is in the next batch."""
    append_groups(client, _groups(3), close=False)
    async with AsyncGroupConsumer("run", redis_url, **FAST) as consumer:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.2):
                await anext(consumer.batches(5))
        append_groups(client, (make_group(seq=seq, tokens=8) for seq in (3, 4)))
        assert _seqs(await anext(consumer.batches(5))) == [0, 1, 2, 3, 4]


async def test_members_of_a_group_share_the_entries(client: redis.Redis, redis_url: str) -> None:
    """P23: Two members at once: disjoint, together everything, and both see the end."""
    append_groups(client, _groups(50))

    async def member() -> list[int]:
        async with AsyncGroupConsumer("run", redis_url, batch=2, **FAST) as consumer:
            seqs = []
            async for delivery in consumer:
                seqs.append(delivery.group.seq)
                await consumer.ack(delivery)
            return seqs

    one, other = await asyncio.gather(member(), member())
    assert one
    assert other
    assert sorted(one + other) == list(range(50))


async def test_large_groups_are_decoded_off_the_loop(
    client: redis.Redis, redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Megabytes are decoded in another thread, so that the loop goes on turning."""
    append_groups(client, [make_group(rollouts=16, tokens=16_384, messages=False)])
    threads: set[int] = set()

    def spy(*args: Any, **options: Any) -> Any:
        threads.add(threading.get_ident())
        return decode_group(*args, **options)

    monkeypatch.setattr("distaff.consuming.decode_group", spy)
    async with AsyncGroupConsumer("run", redis_url, **FAST) as consumer:
        await anext(consumer)
    assert threads
    assert threading.get_ident() not in threads


@pytest.mark.parametrize("protocol", [2, 3])
async def test_a_client_of_the_caller_is_used_and_stays_open(
    client: redis.Redis, redis_url: str, protocol: int
) -> None:
    """Either protocol of redis-py, synchronous and asyncio."""
    append_groups(client, _groups(3))
    with redis.Redis.from_url(redis_url, protocol=protocol) as own:
        with GroupConsumer("run", own, group="a", **FAST) as consumer:
            assert _seqs(list(consumer)) == [0, 1, 2]
        own.ping()
    async with redis.asyncio.Redis.from_url(redis_url, protocol=protocol) as mine:
        async with AsyncGroupConsumer("run", mine, group="b", **FAST) as other:
            assert [delivery.group.seq async for delivery in other] == [0, 1, 2]
            assert client.xpending(KEYS.groups, "b")["pending"] == 3
        await mine.ping()


@pytest.mark.parametrize(
    "wrong",
    [
        {"run": "no spaces"},
        {"group": ""},
        {"batch": 0},
        {"block_s": 0.0},
        {"block_s": 60.0},
        {"claim_idle_s": 0.0},
        {"max_deliveries": 0},
    ],
)
def test_a_wrong_argument_is_a_configuration_error(wrong: dict[str, Any], client: redis.Redis) -> None:
    """Refused when the consumer is made."""
    with pytest.raises(ConfigurationError, match="consumer: "):
        GroupConsumer(wrong.pop("run", "run"), client, **wrong)


def test_a_client_that_decodes_responses_is_refused(redis_url: str) -> None:
    """Before the first group comes out garbled."""
    with pytest.raises(ConfigurationError, match="decode_responses"):
        GroupConsumer("run", redis.Redis.from_url(redis_url, decode_responses=True))


def test_seen_numbers_cost_memory_by_count_and_not_by_size() -> None:
    """A set, exact at page borders, and one page for a number of any size."""
    seen = SeenNumbers()
    numbers = {0, 1, 4095, 4096, 8191, 2**62}
    for number in numbers:
        seen.add(number)
    assert {n for n in (*range(9000), 2**62, 2**62 - 1) if n in seen} == numbers
    seen.clear()
    assert 0 not in seen


async def test_closing_twice_or_without_a_group_is_harmless(redis_url: str) -> None:
    """close() never raises for Redis's sake."""
    consumer = GroupConsumer("run", redis_url, **FAST)
    consumer.close()
    consumer.close()
    mine = connect_async(redis_url)
    other = AsyncGroupConsumer("run", mine, **FAST)
    await other.close()
    await mine.aclose()
