"""A small farm over a Redis that dies: the real producer, two real workers whose player only pretends, a trainer on a thread."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field

import redis

from distaff import GroupConsumer
from distaff.config import RunConfig
from distaff.keys import RunKeys
from distaff.types import RolloutItem, ScoredGroup
from distaff.wire import encode_group
from distaff_producer.produce import Producer
from distaff_producer.report import ProduceReport
from distaff_worker.leases import Counts, Lease
from distaff_worker.outcome import Bury, Emit, Outcome
from tests.group_support import make_group
from tests.harness.oracle import Settled, check
from tests.producer_support import Numbers, config
from tests.test_service import letter, make_service, working
from tests.worker_support import POOL, ScriptedPlayer, until

RUN = "run-1"
KEYS = RunKeys(RUN)
LEASE_S = 1.0


async def play(lease: Lease, item: RolloutItem) -> Outcome:
    """Takes a moment; every tenth item is a dead letter, the others are groups."""
    await asyncio.sleep(0.02)
    return bury(item) if item.seq % 10 == 9 else emit(item)


def emit(item: RolloutItem) -> Emit:
    """A group that decodes and fits together."""
    group = make_group(run=item.run, seq=item.seq, rollouts=2, tokens=8)
    fields = encode_group(group)
    size = sum(len(value) for value in fields.values() if isinstance(value, bytes))
    counts = Counts(rollouts=2, samples=2, tokens=16, trained_tokens=8, reward_sum=1.0, reward_count=2)
    return Emit(fields=fields, counts=counts, size_bytes=size, reward_mean=0.5)


def bury(item: RolloutItem) -> Bury:
    return Bury(letter=letter(item, "environment_error"), dropped=False)


def run_of(rows: int, *, window: int) -> RunConfig:
    return config(run={"name": RUN, "pool": POOL}, window=window, batch=8, limit=rows)


def produce(url: str, rows: int, *, window: int = 1000) -> ProduceReport:
    """Call the producer to its end, or call it again."""
    return Producer(run_of(rows, window=window), url, Numbers(rows=rows)).run()


@dataclass
class Trainer:
    """Uses each group it is given and acknowledges it, to the end of the run, on a thread."""

    url: str
    groups: list[ScoredGroup] = field(default_factory=list)
    duplicates: int = 0
    error: Exception | None = None
    hold: threading.Event = field(default_factory=threading.Event)
    _stop: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        self.hold.set()
        self._thread = threading.Thread(target=self._run, name="trainer", daemon=True)
        self._thread.start()

    @property
    def done(self) -> bool:
        return not self._thread.is_alive()

    def stop(self) -> None:
        self._stop.set()
        self.hold.set()
        self._thread.join(10)

    def _run(self) -> None:
        try:
            with GroupConsumer(
                RUN, self.url, consumer="trainer-0", batch=4, block_s=0.1, claim_idle_s=0.5, reconnect_s=30
            ) as consumer:
                for delivery in consumer:
                    self.groups.append(delivery.group)
                    self.hold.wait(60)
                    if self._stop.is_set():
                        return
                    consumer.ack(delivery)
                    self.duplicates = consumer.duplicates
        except Exception as error:  # noqa: BLE001 - raised by whoever waits for the end
            self.error = error


@dataclass
class Farm:
    """What the test looks at."""

    client: redis.Redis
    trainer: Trainer

    def state(self, name: str) -> int:
        return int(self.client.hget(KEYS.state, name) or 0)

    @property
    def settled(self) -> int:
        return self.state("emitted") + self.state("dead")

    async def finish(self, note: str, *, seconds: float = 40) -> Settled:
        """Wait until the trainer has seen the end of the run, then ask the oracle. note: for messages, how to see it again."""

        def found() -> str:
            state = self.client.hgetall(KEYS.state)
            return f"{state}, the trainer has {len(self.trainer.groups)}, {note}"

        await until(lambda: self.trainer.done, seconds=seconds, what="the trainer sees no end")
        assert self.trainer.error is None, f"{self.trainer.error!r}: {found()}"
        await until(lambda: self._swept(), seconds=3 * LEASE_S, what=f"an execution is left: {found()}")
        try:
            return check(self.client, RUN, pool=POOL, consumed=self.trainer.groups)
        except AssertionError as error:
            error.add_note(found())
            raise

    def _swept(self) -> bool:
        """What a worker had in hand when history was rewound runs out with its lease."""
        return not any(self.client.scan_iter(f"rq:execution*:{RUN}-*", count=1000))


@asynccontextmanager
async def farming(url: str, client: redis.Redis, *, workers: str = "w") -> AsyncIterator[Farm]:
    """Two workers and a trainer, whose consumer group is there before anything else. workers: how their names begin."""
    trainer = Trainer(url)
    try:
        await until(lambda: client.exists(KEYS.groups))
        async with AsyncExitStack() as stack:
            for number in range(2):
                service = make_service(url, ScriptedPlayer(play), name=f"{workers}{number}", lease_s=LEASE_S, slots=6)
                await stack.enter_async_context(working(service))
                await until(lambda service=service: hasattr(service, "_stopping"), seconds=20)  # type: ignore[misc]
            yield Farm(client, trainer)
    finally:
        await asyncio.to_thread(trainer.stop)
