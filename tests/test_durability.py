"""P7: Redis is shut down, killed, loses the end of its log, fails over: every item is settled once in what is left, nothing is stuck."""

from __future__ import annotations

import asyncio
import random
import shutil
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Literal
from urllib.parse import urlsplit

import pytest

from distaff import GroupConsumer
from distaff.clients import connect
from distaff.errors import ConfigurationError
from tests.durability_support import KEYS, LEASE_S, RUN, Trainer, farming, produce
from tests.group_support import append_groups, make_group
from tests.harness.byte_proxy import ByteProxy
from tests.harness.oracle import check_nothing_left
from tests.harness.resp import Scanner
from tests.harness.resp_proxy import RespProxy
from tests.harness.seeds import replay, seed
from tests.harness.servers import KINDS, Kind, RedisServer
from tests.worker_support import until

ROWS = 100
ONE_KIND = [pytest.param(kind, marks=[pytest.mark.exhaustive] if number else []) for number, kind in enumerate(KINDS)]
"""Where the kinds differ in nothing that is tried: all of them only when everything is."""


def in_background(url: str, rows: int, *, window: int) -> Future[object]:
    """A producer on a thread that ends with it."""
    threads = ThreadPoolExecutor(1, "producer")
    future: Future[object] = threads.submit(produce, url, rows, window=window)
    threads.shutdown(wait=False)
    return future


@pytest.mark.parametrize("fsync", ["always", "everysec"])
@pytest.mark.parametrize("way", ["stop", "kill"])
async def test_a_redis_that_is_restarted_again_and_again_costs_nothing(
    tmp_path: Path, way: Literal["stop", "kill"], fsync: str
) -> None:
    """SHUTDOWN NOSAVE or kill -9 three times in the middle of everything; the producer, the workers and the trainer live through it."""
    with RedisServer(tmp_path, aof=True, config={"appendfsync": fsync}) as server:
        async with farming(server.url, server.client()) as farm:
            producing = in_background(server.url, ROWS, window=30)
            for share in (0.2, 0.5, 0.8):
                await until(lambda share=share: len(farm.trainer.groups) >= share * ROWS, seconds=30)  # type: ignore[misc]
                await asyncio.to_thread(server.stop if way == "stop" else server.kill)
                await asyncio.to_thread(server.start)
            settled = await farm.finish(f"{way} {fsync}")
            assert producing.result(10)
    assert (len(settled.emitted), len(settled.dead)) == (90, 10)


@pytest.mark.parametrize("kind", KINDS)
async def test_a_log_that_lost_its_end_costs_work_and_no_item(
    tmp_path: Path, kind: Kind, request: pytest.FixtureRequest
) -> None:
    """A power cut: of the log since the run began a random part is left. Producer, workers and trainer are alive and know better.

    Groups that the trainer used and Redis does not know of any more are made again; the trainer sees none of them twice.
    """
    chosen = seed(request)
    share = random.Random(chosen).uniform(0.05, 0.8)
    with RedisServer(tmp_path, kind=kind, aof=True, config={"appendfsync": "always"}) as server:
        async with farming(server.url, server.client()) as farm:
            producing = in_background(server.url, ROWS, window=30)
            await until(lambda: farm.state("admitted") > 0)
            began = server.aof.stat().st_size
            await until(lambda: len(farm.trainer.groups) >= 0.5 * ROWS, seconds=30)
            server.kill()
            log = server.aof.read_bytes()
            keep = began + int(share * (len(log) - began))
            lost = log[keep:].count(b"XADD")
            server.lose_tail(keep)
            await asyncio.to_thread(server.start)
            settled = await farm.finish(f"{replay(chosen)}: {share:.3f} of the log left, without {lost} groups")
            assert producing.result(10)
    assert lost, f"no group was forgotten; {replay(chosen)}"
    assert (len(settled.emitted), len(settled.dead)) == (90, 10)


@pytest.mark.parametrize("kind", ONE_KIND)
async def test_admission_that_was_lost_is_made_again_by_producing_again(
    tmp_path: Path, kind: Kind, request: pytest.FixtureRequest
) -> None:
    """The producer has closed the run and gone; the log ends in the middle of its admission, while workers hold its items."""
    chosen = seed(request)
    with RedisServer(tmp_path, kind=kind, aof=True, config={"appendfsync": "always"}) as server:
        async with farming(server.url, server.client()) as farm:
            began = server.aof.stat().st_size
            first = asyncio.create_task(asyncio.to_thread(produce, server.url, ROWS))
            await until(lambda: farm.state("admitted") > 8)
            half = server.aof.stat().st_size
            assert (await first).total == ROWS
            await until(lambda: len(farm.trainer.groups) >= 5)
            server.kill()
            keep = half - random.Random(chosen).randrange(0, 3000)
            assert keep > began
            server.lose_tail(keep)
            await asyncio.to_thread(server.start)
            admitted = farm.state("admitted")
            assert 0 < admitted < ROWS, replay(chosen)
            assert farm.client.hget(KEYS.state, "status") == b"open"
            again = await asyncio.to_thread(produce, server.url, ROWS)
            settled = await farm.finish(replay(chosen))
    assert (again.already_there, again.admitted, again.total) == (admitted, ROWS - admitted, ROWS)
    assert (len(settled.emitted), len(settled.dead)) == (90, 10)


@pytest.mark.parametrize("kind", ONE_KIND)
async def test_a_replica_that_was_behind_takes_over_and_the_run_ends_there(tmp_path: Path, kind: Kind) -> None:
    """Failover with asynchronous replication: what the primary had not passed on is forgotten, as with a log that lost its end."""
    options = {"repl-diskless-sync-delay": "0"}
    with (
        RedisServer(tmp_path / "1", kind=kind, tcp=True, config=options) as primary,
        RedisServer(tmp_path / "2", kind=kind) as replica,
        ByteProxy("127.0.0.1", int(urlsplit(primary.url).port or 0)) as link,
        RespProxy(primary.url) as front,
        connect(front.url) as client,
    ):
        replica.client().replicaof("127.0.0.1", str(link.port))
        await until(lambda: replica.client().info("replication")["master_link_status"] == "up", seconds=20)
        client.set("first", 1)
        await until(lambda: replica.client().exists("first"), seconds=20)
        async with farming(front.url, client) as farm:
            producing = in_background(front.url, ROWS, window=30)
            await until(lambda: len(farm.trainer.groups) >= 0.3 * ROWS, seconds=30)
            link.black_hole()
            await until(lambda: len(farm.trainer.groups) >= 0.6 * ROWS, seconds=30)
            await asyncio.to_thread(primary.kill)
            behind = int(replica.client().hget(KEYS.state, "emitted") or 0)
            replica.client().replicaof("NO", "ONE")
            front.retarget(replica.url)
            settled = await farm.finish(f"the replica had {behind} groups")
            assert producing.result(10)
    assert 0 < behind < 0.6 * ROWS
    assert (len(settled.emitted), len(settled.dead)) == (90, 10)


async def test_a_primary_that_has_too_few_replicas_is_waited_for(tmp_path: Path) -> None:
    """`min-replicas-to-write`: what it refuses is repeated until a replica is back; nobody ends and nothing is lost."""
    with RedisServer(tmp_path) as server:
        client = server.client()
        async with farming(server.url, client) as farm:
            producing = in_background(server.url, ROWS, window=30)
            await until(lambda: len(farm.trainer.groups) >= 0.3 * ROWS, seconds=30)
            client.config_set("min-replicas-to-write", 1)
            before = farm.settled
            await asyncio.sleep(2 * LEASE_S)
            assert farm.settled == before
            client.config_set("min-replicas-to-write", 0)
            settled = await farm.finish("without replicas for a while")
            assert producing.result(10)
    assert (len(settled.emitted), len(settled.dead)) == (90, 10)


async def test_a_redis_that_keeps_no_log_loses_the_run_and_says_so(tmp_path: Path) -> None:
    """Without persistence: the producer ends with what to do, and doing it plays the whole run with the workers that are there."""
    with RedisServer(tmp_path) as server:
        async with farming(server.url, server.client()) as farm:
            producing = in_background(server.url, ROWS, window=30)
            await until(lambda: len(farm.trainer.groups) >= 20)
            await asyncio.to_thread(server.restart)
            with pytest.raises(ConfigurationError, match=r"gone from Redis.*Produce again"):
                await asyncio.to_thread(producing.result, 20)
            first_life = len(farm.trainer.groups)
            again = await asyncio.to_thread(produce, server.url, ROWS)
            await until(lambda: farm.trainer.done, seconds=30)
            del farm.trainer.groups[:first_life]
            settled = await farm.finish("after the loss")
    assert (again.already_there, again.total) == (0, ROWS)
    assert (len(settled.emitted), len(settled.dead)) == (90, 10)


class TestConsumerOfARewoundLog:
    """What a trainer in the middle of its work sees when Redis forgets the last thing that happened."""

    @pytest.fixture
    def server(self, tmp_path: Path) -> RedisServer:
        return RedisServer(tmp_path, aof=True, config={"appendfsync": "always"})

    def rewind(self, server: RedisServer, keep_bytes: int) -> None:
        server.kill()
        server.lose_tail(keep_bytes)
        server.start()

    def add(self, server: RedisServer, *seqs: int, close: bool = False) -> None:
        groups = [make_group(run=RUN, seq=seq, rollouts=2, tokens=8) for seq in seqs]
        if groups:
            append_groups(server.client(), groups, close=False)
        if close:
            server.client().hset(KEYS.state, "status", "closed")

    def consumer(self, server: RedisServer, name: str = "trainer-0", *, claim_idle_s: float = 0.2) -> GroupConsumer:
        return GroupConsumer(RUN, server.url, consumer=name, batch=4, block_s=0.05, claim_idle_s=claim_idle_s)

    def test_a_group_in_hand_that_is_made_again_stays_the_callers_until_it_acknowledges(
        self, server: RedisServer
    ) -> None:
        """The entry that replaced the one in its hands is not acknowledged behind its back: if it dies now, the group comes again."""
        with server, self.consumer(server) as consumer:
            self.add(server, 0)
            consumer.ack(next(consumer))
            size = server.aof.stat().st_size
            self.add(server, 1)
            in_hand = next(consumer)
            self.rewind(server, size)
            assert server.client().xlen(KEYS.groups) == 0
            self.add(server, 1, 2)
            assert next(consumer).group.seq == 2
            assert consumer.duplicates == 1
            with self.consumer(server, "heir") as heir:
                assert next(heir).group.seq == 1, "the trainer died with it in its hands"
            assert consumer.ack(in_hand) == 1
            assert {row["name"]: row["pending"] for row in server.client().xinfo_groups(KEYS.groups)} == {b"trainer": 1}

    def test_a_delivery_that_redis_forgot_is_not_a_second_one(self, server: RedisServer) -> None:
        """The very entry in the caller's hands is delivered to it again: it stays in its hands, and is yielded once."""
        with server, self.consumer(server) as consumer:
            consumer.join()
            self.add(server, 0, 1)
            size = server.aof.stat().st_size
            in_hand = next(consumer)
            self.rewind(server, size)
            assert next(consumer).group.seq == 1
            self.add(server, 2)
            assert next(consumer).group.seq == 2
            assert server.client().xpending(KEYS.groups, "trainer")["pending"] == 3
            assert consumer.ack(in_hand) == 1

    def test_an_acknowledgement_that_redis_forgot_is_given_again(self, server: RedisServer) -> None:
        """At the latest at the end of the run, which is not over before."""
        with server, self.consumer(server, claim_idle_s=60) as consumer:
            self.add(server, 0)
            used = next(consumer)
            size = server.aof.stat().st_size
            self.add(server, 1)
            in_hand = next(consumer)
            consumer.ack(used)
            self.rewind(server, size)
            self.add(server, close=True)
            assert list(consumer) == []
            assert server.client().xlen(KEYS.groups) == 0, "group 0 was acknowledged again"
            assert consumer.ack(in_hand) == 0

    def test_a_consumer_group_that_redis_forgot_is_made_again_without_what_was_used(self, server: RedisServer) -> None:
        """Everything is delivered again, to a consumer that knows the run and what it has had of it."""
        with server:
            self.add(server, 0, 1)
            size = server.aof.stat().st_size
            with self.consumer(server) as consumer:
                consumer.ack(next(consumer))
                in_hand = next(consumer)
                self.rewind(server, size)
                self.add(server, 2, close=True)
                assert next(consumer).group.seq == 2
                assert consumer.ack(in_hand) == 1
                assert consumer.duplicates == 2

    def test_another_trainer_sees_a_used_group_again_at_most(self, server: RedisServer) -> None:
        """It has no memory of what its neighbour used: the same `group_id`, which is what to deduplicate by."""
        with server, self.consumer(server) as consumer:
            consumer.join()
            size = server.aof.stat().st_size
            self.add(server, 0)
            used = next(consumer)
            consumer.ack(used)
            self.rewind(server, size)
            self.add(server, 0, close=True)
            with self.consumer(server, "other") as other:
                again = list(other)
            assert [delivery.group.group_id for delivery in again] == [used.group.group_id]


@pytest.fixture(scope="module")
def history(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[int]]:
    """The folder of a Redis that has seen a whole small run, and where in its log each command or transaction ends."""
    folder = tmp_path_factory.mktemp("history")

    async def live() -> None:
        with RedisServer(folder, aof=True, config={"appendfsync": "always"}) as server:
            async with farming(server.url, server.client()) as farm:
                producing = in_background(server.url, 12, window=6)
                await farm.finish("history")
                assert producing.result(10)

    asyncio.run(live())
    log = RedisServer(folder).aof.read_bytes()
    scanner, ends, inside = Scanner(requests=True), [], False
    start = 0
    for end in scanner.ends(bytearray(log)):
        name = log[start:end].split(b"\r\n")[2].upper()
        inside = name == b"MULTI" or (inside and name != b"EXEC")
        if not inside:
            ends.append(end)
        start = end
    return folder, ends


async def ends_well(folder: Path, history: Path, *, keep: int) -> None:
    """The log as far as `keep`, and then everybody again: producer, workers, the trainer of the same name."""
    shutil.copytree(history / "appendonlydir", folder / "appendonlydir")
    server = RedisServer(folder, aof=True)
    server.lose_tail(keep)
    with server:
        client = server.client()
        before = int(client.hget(KEYS.state, "emitted") or 0) - client.xlen(KEYS.groups)
        producing = in_background(server.url, 12, window=6)
        async with farming(server.url, client, workers="later") as farm:
            await until(lambda: farm.trainer.done, seconds=20, what=f"stuck with {keep} bytes of the log")
            assert farm.trainer.error is None
            await until(farm._swept, seconds=5, what=f"left over with {keep} bytes of the log")
            assert producing.result(10)
            seqs = [group.seq for group in farm.trainer.groups]
            assert len(seqs) == len(set(seqs)), f"doubled with {keep} bytes of the log"
            assert len(seqs) + before == farm.state("emitted") == 11, f"with {keep} bytes of the log"
            assert (farm.state("admitted"), farm.state("dead"), client.bitcount(KEYS.settled)) == (12, 1, 12)
            check_nothing_left(client, runs=[RUN])
            assert client.xlen(KEYS.groups) == 0


@pytest.mark.parametrize("part", range(5))
async def test_every_beginning_of_a_history_can_be_gone_on_from(
    tmp_path: Path, history: tuple[Path, list[int]], part: int
) -> None:
    """At one of five places spread over the log, also in the middle of a command or of a transaction."""
    folder, ends = history
    keep = ends[part * (len(ends) - 1) // 4]
    await ends_well(tmp_path, folder, keep=keep + (7 if part % 2 and part < 4 else 0))


@pytest.mark.exhaustive
@pytest.mark.timeout(1200)
async def test_every_beginning_of_a_history_can_be_gone_on_from_at_all_places(
    tmp_path: Path, history: tuple[Path, list[int]]
) -> None:
    """Behind every command and transaction of the log of a whole run."""
    folder, ends = history
    for number, keep in enumerate(ends):
        await ends_well(tmp_path / str(number), folder, keep=keep)


def test_the_trainer_of_these_tests_can_be_stopped(tmp_path: Path) -> None:
    """A thread that outlives its test would hide what comes after."""
    with RedisServer(tmp_path) as server:
        trainer = Trainer(server.url)
        trainer.hold.clear()
        append_groups(server.client(), [make_group(run=RUN, seq=0, rollouts=2, tokens=8)], close=False)
        trainer.stop()
        assert trainer.done or not trainer.groups
