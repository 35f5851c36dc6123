"""P19: a proxy between every pair of parts: what is cut, silent, half-open, late or slow heals by itself, and every item is settled once."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import redis

from distaff import GroupConsumer
from distaff.clients import SOCKET_TIMEOUT_S, connect
from distaff.environments.load import load
from distaff.keys import RunKeys
from distaff.types import RolloutItem, ScoredGroup
from distaff_consumer import archive_command
from distaff_consumer.reading import read_archive
from distaff_producer.produce import Producer
from distaff_worker.leases import Lease
from distaff_worker.metrics import Metrics
from distaff_worker.outcome import Outcome
from distaff_worker.service import Service
from distaff_worker.service_options import ServiceOptions
from distaff_worker.sweep import Sweeper
from tests.archive_process import PlainArchive
from tests.farm_support import make_worker, run_config, says, settled
from tests.harness.byte_proxy import ByteProxy
from tests.harness.oracle import check, check_settled
from tests.harness.servers import RedisServer
from tests.scripted_engine import Ask, Reply, ScriptedEngine
from tests.test_service import working
from tests.worker_support import POOL, ScriptedPlayer, emit_of, enqueue, open_run, until

RUN = "run-1"
ROWS = 8
REDIS_PAIRS = ("producer", "worker", "archiver", "trainer")
PAIRS = (*REDIS_PAIRS, "engine", "service")
"""Who speaks through a proxy: four roles to Redis, the worker to the engine, the environment to its tool and judge."""
SHORT_S = 2.0
"""Instead of the 30 s after which a client takes a silent connection for dead, where a test must not wait so long."""


@dataclass(slots=True)
class Parts:
    """A farm in this process, each part behind a proxy of its own; `client` is direct."""

    client: redis.Redis
    proxies: dict[str, ByteProxy]
    archive: Path
    trained: list[ScoredGroup] = field(default_factory=list)
    stop: threading.Event = field(default_factory=threading.Event)
    tasks: list[asyncio.Task[None]] = field(default_factory=list)

    @property
    def emitted(self) -> int:
        return int(self.client.hget(RunKeys(RUN).state, "emitted") or 0)

    def going(self, groups: int) -> bool:
        """So many are emitted. Raises what ended a part before."""
        for task in self.tasks:
            if task.done():
                task.result()
        return self.emitted >= groups

    def over(self) -> bool:
        """Every item is settled and the consumers have let go of all groups."""
        return self.going(0) and settled(self.client, RUN) and self.client.xlen(RunKeys(RUN).groups) == 0


async def _answer(ask: Ask) -> Reply:
    await asyncio.sleep(0.1)
    return says(f"number {ask.number % 5}")


@asynccontextmanager
async def farm(folder: Path, *, timeout_s: float) -> AsyncIterator[Parts]:
    """All parts running; on leaving they must have come to their ends by themselves. timeout_s: of worker's and trainer's sockets."""
    async with AsyncExitStack() as stack:
        server = stack.enter_context(RedisServer(folder / "redis", tcp=True))
        engine = await stack.enter_async_context(ScriptedEngine(script=_answer))
        service = await stack.enter_async_context(ScriptedEngine())
        service.documents |= {"/tool": {"text": "and then?"}, "/judge": {"factor": 2.0}}
        ports = {name: _port(server.url) for name in REDIS_PAIRS}
        ports |= {"engine": _port(engine.url), "service": _port(service.url)}
        proxies = {
            name: stack.enter_context(ByteProxy("127.0.0.1", port, scheme="redis" if name in REDIS_PAIRS else "http"))
            for name, port in ports.items()
        }
        parts = Parts(server.client(), proxies, folder / "archive")
        producer = _producer(parts)
        parts.tasks += [
            asyncio.create_task(asyncio.to_thread(part))
            for part in (lambda: _produce(producer), lambda: _archive(parts), lambda: _train(parts, timeout_s))
        ]
        worker, _ = make_worker(proxies["worker"].url, lease_s=3.0, beat_s=0.5, slots=2, socket_timeout_s=timeout_s)
        working = asyncio.create_task(worker.run())
        try:
            yield parts
            await asyncio.wait_for(asyncio.gather(*parts.tasks), 90)
            worker._stop("test")
            await asyncio.wait_for(working, 30)
            _check(parts)
        finally:
            parts.stop.set()
            working.cancel()
            await asyncio.wait({working, *parts.tasks}, timeout=15)


def _port(url: str) -> int:
    return int(url.rpartition(":")[2].partition("/")[0])


def _producer(parts: Parts) -> Producer:
    """Made on the main thread, as verifiers demands of whoever loads an environment."""
    service = parts.proxies["service"].url
    config = run_config(
        parts.proxies["engine"].url,
        environment={"id": "tests.judged_env", "args": {"url": service, "rows": ROWS}},
        engine={"request_timeout_s": 2, "connect_timeout_s": 1, "max_retries": 5, "start_timeout_s": 30},
        rollouts={"group_size": 2, "max_attempts": 10, "timeout_s": 15, "score_timeout_s": 4},
        producer={"window": 4, "batch": 2},
    )
    return Producer(config, parts.proxies["producer"].url, load(config.environment), stop=parts.stop)


def _produce(producer: Producer) -> None:
    producer.run(None)


def _archive(parts: Parts) -> None:
    url = parts.proxies["archiver"].url
    report = archive_command.run(RUN, redis_url=url, archive=PlainArchive(parts.archive), stop=parts.stop)
    assert report.ended or parts.stop.is_set()


def _train(parts: Parts, timeout_s: float) -> None:
    with (
        connect(parts.proxies["trainer"].url, socket_timeout_s=timeout_s) as client,
        GroupConsumer(
            RUN, client, block_s=0.2, batch=2, claim_idle_s=5, max_deliveries=100, reconnect_s=60
        ) as consumer,
    ):
        for delivery in consumer:
            parts.trained.append(delivery.group)
            consumer.ack(delivery)


def _check(parts: Parts) -> None:
    """The oracle; the archive and the trainer have each group once, and no item was given up."""
    result = check(parts.client, RUN, consumed=parts.trained)
    assert (len(result.emitted), result.dead) == (ROWS, [])
    assert sorted(int(record["seq"]) for record in read_archive(parts.archive)) == result.emitted
    for group in parts.trained:
        assert [rollout.error for rollout in group.rollouts] == [None, None]


async def _reset(proxies: list[ByteProxy]) -> None:
    """So often that it does not only strike idle connections, which clients replace without a word."""
    for _ in range(100):
        for proxy in proxies:
            proxy.reset()
        await asyncio.sleep(0.02)


async def _half_open(proxies: list[ByteProxy]) -> None:
    for proxy in proxies:
        proxy.half_open()


async def _silence(proxies: list[ByteProxy]) -> None:
    await _weather(proxies, ByteProxy.black_hole, 4.0)


async def _latency(proxies: list[ByteProxy]) -> None:
    for proxy in proxies:
        proxy.delay(0.3)


async def _dribble(proxies: list[ByteProxy]) -> None:
    await _weather(proxies, lambda proxy: proxy.dribble(1_000), 4.0)


async def _weather(proxies: list[ByteProxy], change: Callable[[ByteProxy], None], seconds: float) -> None:
    for proxy in proxies:
        change(proxy)
    await asyncio.sleep(seconds)
    for proxy in proxies:
        proxy.heal()


FAULTS: dict[str, Callable[[list[ByteProxy]], Any]] = {
    "reset": _reset,
    "silence": _silence,
    "half open": _half_open,
    "300 ms": _latency,
    "1 kB/s": _dribble,
}


async def _suffer(folder: Path, fault: str, pairs: tuple[str, ...], *, timeout_s: float) -> None:
    async with farm(folder, timeout_s=timeout_s) as parts:
        await until(lambda: parts.going(3), seconds=120, what="the farm did not get going")
        struck = [parts.proxies[name] for name in pairs]
        assert all(proxy.accepted for proxy in struck)
        await FAULTS[fault](struck)
        await until(parts.over, seconds=90, what=f"the farm did not heal: {parts.emitted} emitted")


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("fault", FAULTS)
async def test_a_farm_whose_whole_network_fails_heals_by_itself(tmp_path: Path, fault: str) -> None:
    """Between all pairs of parts at once. Half-open only where the client's patience can be set: the others are in the full matrix."""
    pairs = ("worker", "trainer", "engine", "service") if fault == "half open" else PAIRS
    await _suffer(tmp_path, fault, pairs, timeout_s=SHORT_S)


@pytest.mark.exhaustive
@pytest.mark.timeout(300)
@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("pair", PAIRS)
async def test_any_one_pair_heals_by_itself(tmp_path: Path, pair: str, fault: str) -> None:
    """The matrix, with the patience that processes have."""
    await _suffer(tmp_path, fault, (pair,), timeout_s=SOCKET_TIMEOUT_S)


async def test_a_half_open_connection_costs_a_worker_no_lease(tmp_path: Path) -> None:
    """What the worker says over its main client hangs for 30 s; the heartbeats have a client of their own and go on with everything they do."""
    held = asyncio.Event()

    async def play(lease: Lease, item: RolloutItem) -> Outcome:
        await held.wait()
        return emit_of(item)

    with RedisServer(tmp_path, tcp=True) as server, ByteProxy("127.0.0.1", _port(server.url), scheme="redis") as proxy:
        direct = server.client()
        open_run(direct, RUN)
        enqueue(direct, RUN, 4)
        sweeper = Sweeper(direct, pool=POOL)
        with connect(proxy.url) as client, connect(server.url, socket_timeout_s=1) as beats:
            options = ServiceOptions(pool=POOL, name="w1", slots=4, lease_s=1.5, beat_s=0.25, drain_s=5.0)
            service = Service(client, options=options, player=ScriptedPlayer(play), metrics=Metrics(), beats=beats)
            async with working(service):
                await until(lambda: direct.zcard("rq:wip:default") == 4)
                await until(lambda: proxy.open_connections >= 2)
                proxy.half_open()
                for _ in range(30):
                    assert await asyncio.to_thread(sweeper.sweep) == 0
                    await asyncio.sleep(0.15)
                held.set()
                proxy.heal()
                await until(lambda: direct.xlen(RunKeys(RUN).groups) == 4, seconds=20)
        check_settled(direct, RUN)
        assert direct.hget(RunKeys(RUN).state, "lost") is None
