"""The worker's life: admit leases into slots, play them as tasks on one loop, settle each, drain at the end.

Invariant: every claimed lease ends in exactly one settling call (emit, bury or release), or its loss was reported to us.
Nothing here blocks the loop: Redis is spoken to from threads of their own, so that user code that fills the default pool
cannot starve beats or settlements.
"""

from __future__ import annotations

import asyncio
import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from json import dumps
from typing import Any, Literal

import redis
import structlog
from rq.worker.base import WorkerStatus

from distaff.errors import FatalRun, WireError
from distaff.keys import parse_job_id
from distaff.types import DeadKind, DeadLetter, RolloutItem
from distaff_worker.beat import Beater
from distaff_worker.claim import Claimer, Suspended
from distaff_worker.leases import Lease, Settlement
from distaff_worker.metrics import Metrics
from distaff_worker.outcome import Bury, Emit, Outcome, Player, Retry
from distaff_worker.registration import Registration
from distaff_worker.rq_schema import decode_job
from distaff_worker.settle import Settler
from distaff_worker.sweep import Sweeper

log = structlog.get_logger(__name__)
Interrupt = Literal["stop", "hand_back", "lost"]
CLAIM_BATCH = 16
IDLE_WAIT_S = 1.0
TICK_S = 0.05
TIDY_EVERY_S = 60.0
UNWIND_S = 5.0
"""How long an interrupted play may take to clean up before it is left behind."""


@dataclass(slots=True, eq=False)
class Running:
    """One execution in progress."""

    lease: Lease
    task: asyncio.Task[None] | None = None
    play: asyncio.Task[Outcome] | None = None
    interrupt: Interrupt | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceOptions:
    """How one worker works; see WorkerSection in `distaff.settings`."""

    pool: str
    name: str
    slots: int = 64
    lease_s: float = 30.0
    beat_s: float = 5.0
    drain_s: float = 30.0
    burst: bool = False
    """End when the queue is empty and nothing runs."""
    max_groups: int = 0
    """End, gracefully, after so many settled items; 0: never."""


class Service:
    """One worker on one pool. `run` returns when it was told to stop and everything is settled or handed back.

    done: asked (on a thread) when there is nothing to do; True ends the worker.
    """

    def __init__(
        self,
        client: redis.Redis,
        *,
        options: ServiceOptions,
        player: Player,
        metrics: Metrics,
        done: Callable[[], bool] | None = None,
    ) -> None:
        self._options, self._player, self._metrics, self._done = options, player, metrics, done
        self._running: dict[str, Running] = {}
        self._killed = threading.Event()
        ttl_s = max(60, round(3 * options.lease_s))
        self._registration = Registration(
            client,
            pool=options.pool,
            name=options.name,
            ttl_s=ttl_s,
            on_stop=self._stop_from_thread,
            on_shutdown=lambda: self._from_thread(self._on_signal),
        )
        names = {"pool": options.pool, "worker": options.name}
        self._claimer = Claimer(client, **names, worker_key=self._registration.key, lease_s=options.lease_s)
        self._settler = Settler(client, **names, worker_key=self._registration.key, give_up=self._killed.is_set)
        self._sweeper = Sweeper(client, pool=options.pool)
        self._beater = Beater(
            client,
            **names,
            lease_s=options.lease_s,
            beat_s=options.beat_s,
            leases=lambda: [running.lease for running in list(self._running.values())],
            on_lost=lambda lease: self._from_thread(self._interrupt, lease.execution_id, "lost"),
            announce=self._announce,
            tick=lambda: self._tick,
        )
        self._tick = time.monotonic()
        self._settled = 0
        self._fatal: FatalRun | None = None
        self._signals = 0

    async def run(self) -> None:
        """Work until SIGTERM, SIGINT or a shutdown command. Raises FatalRun, redis.RedisError at start."""
        self._loop = asyncio.get_running_loop()
        self._stopping, self._freed = asyncio.Event(), asyncio.Event()
        self._claims = ThreadPoolExecutor(1, "distaff-claim")
        self._books = ThreadPoolExecutor(4, "distaff-settle")
        for number in (signal.SIGTERM, signal.SIGINT):
            self._loop.add_signal_handler(number, self._on_signal)
        await self._player.open()
        await self._loop.run_in_executor(self._books, self._registration.birth)
        self._beater.start()
        log.info("worker.started", worker=self._options.name, pool=self._options.pool, slots=self._options.slots)
        try:
            async with asyncio.TaskGroup() as side:
                sides = [side.create_task(self._keep_ticking()), side.create_task(self._keep_sweeping())]
                try:
                    await self._admit()
                    await self._drain()
                finally:
                    for task in sides:
                        task.cancel()
        finally:
            await self._close()
        if self._fatal:
            raise self._fatal

    async def _close(self) -> None:
        self._killed.set()
        await self._player.close()
        await asyncio.to_thread(self._beater.stop)
        try:
            await self._loop.run_in_executor(self._books, self._registration.death)
        except redis.RedisError as error:
            log.warning("worker.unregistered_late", error=type(error).__name__)
        self._claims.shutdown()
        self._books.shutdown()
        log.info("worker.stopped", worker=self._options.name, settled=self._settled)

    # -- admission ---------------------------------------------------------------------------------------------------

    async def _admit(self) -> None:
        while not self._stopping.is_set():
            free = self._options.slots - len(self._running)
            if self._options.max_groups:
                free = min(free, self._options.max_groups - self._settled - len(self._running))
                if self._settled >= self._options.max_groups:
                    return
            if free <= 0:
                self._freed.clear()
                await self._freed.wait()
                continue
            leases = await self._loop.run_in_executor(self._claims, self._claim, min(CLAIM_BATCH, -(-free // 4)))
            for lease in leases:
                self._start(lease)
            if not leases and not self._running and await self._is_over():
                return
            if not leases and self._options.burst:
                self._freed.clear()
                await self._freed.wait()

    async def _is_over(self) -> bool:
        if self._options.burst or self._done is None:
            return self._options.burst
        try:
            return await self._loop.run_in_executor(self._claims, self._done)
        except redis.RedisError as error:
            log.warning("done.unknown", error=type(error).__name__)
            return False

    def _claim(self, count: int) -> list[Lease]:
        try:
            leases = self._claimer.claim(count)
            if not leases and not self._options.burst and self._claimer.wait(IDLE_WAIT_S):
                leases = self._claimer.claim(count)
            if self._registration.get_state() == WorkerStatus.SUSPENDED:
                self._registration.set_state(WorkerStatus.IDLE)
        except Suspended:
            if self._registration.get_state() != WorkerStatus.SUSPENDED:
                self._registration.set_state(WorkerStatus.SUSPENDED)
            time.sleep(0.25)
            return []
        except redis.RedisError as error:
            log.warning("claim.failed", error=type(error).__name__)
            self._metrics.redis_errors.inc()
            time.sleep(1.0)
            return []
        return leases

    def _start(self, lease: Lease) -> None:
        running = Running(lease)
        self._running[lease.execution_id] = running
        self._metrics.running.set(len(self._running))
        running.task = self._loop.create_task(self._execute(running), name=f"item {lease.job_id}")
        running.task.add_done_callback(lambda task: self._finished(running, task))

    def _finished(self, running: Running, task: asyncio.Task[None]) -> None:
        self._running.pop(running.lease.execution_id, None)
        self._metrics.running.set(len(self._running))
        self._freed.set()
        if not task.cancelled() and (error := task.exception()):
            log.error("execution.broke", job=running.lease.job_id, exc_info=error)

    # -- one execution -----------------------------------------------------------------------------------------------

    async def _execute(self, running: Running) -> None:
        lease = running.lease
        try:
            item = decode_job(lease.payload)
        except WireError as error:
            letter = _letter(lease, _unknown_item(lease), self._options.name, "rejected", "queue", str(error))
            await self._settle(lease, Bury(letter=letter))
            return
        with structlog.contextvars.bound_contextvars(
            run=item.run, seq=item.seq, execution=lease.execution_id, attempt=lease.attempts + 1
        ):
            await self._settle(lease, await self._outcome(running, item))

    async def _outcome(self, running: Running, item: RolloutItem) -> Outcome | None:
        """None: hand the item back, or leave it to the one who has it now."""
        lease = running.lease
        if running.interrupt is None:
            running.play = self._loop.create_task(self._player.play(lease, item))
            await asyncio.wait({running.play})
        if running.interrupt == "stop":
            letter = _letter(lease, item, self._options.name, "stopped", "operator", "stopped by an operator")
            return Bury(letter=letter, status="stopped")
        if running.play is None or running.play.cancelled():
            return None
        error = running.play.exception()
        if error is None:
            return running.play.result()
        if running.interrupt:
            return None
        if isinstance(error, FatalRun):
            self._fatal = self._fatal or error
            self._stop("fatal run")
            return None
        log.error("play.broke", exc_info=error)
        message = f"{type(error).__name__}: {error}"[:2000]
        return Bury(letter=_letter(lease, item, self._options.name, "environment_error", "worker", message))

    async def _settle(self, lease: Lease, outcome: Outcome | None) -> None:
        if outcome is None and self._running[lease.execution_id].interrupt == "lost":
            log.warning("lease.lost", job=lease.job_id)
            return
        call = self._loop.run_in_executor(self._books, self._carry_out, lease, outcome)
        try:
            answer = await call
        except redis.RedisError as error:
            log.error("settle.failed", job=lease.job_id, error=type(error).__name__)
            return
        self._report(lease, outcome, answer)

    def _carry_out(self, lease: Lease, outcome: Outcome | None) -> Settlement:
        match outcome:
            case Emit():
                return self._settler.emit(lease, outcome.fields, outcome.counts)
            case Bury():
                text = f"{outcome.letter.kind} in {outcome.letter.boundary}: {outcome.letter.message}"
                letter = dumps(asdict(outcome.letter))
                return self._settler.bury(lease, letter, text=text, status=outcome.status, dropped=outcome.dropped)
            case Retry():
                return self._settler.release(lease, "retried")
            case None:
                return self._settler.release(lease, "handed_back")

    def _report(self, lease: Lease, outcome: Outcome | None, answer: Settlement) -> None:
        seconds = round(time.monotonic() - lease.claimed, 3)
        if answer in ("settled", "lost", "gone"):
            log.warning("execution.fenced", job=lease.job_id, answer=answer, seconds=seconds)
            self._metrics.fenced.inc()
            return
        match outcome:
            case Emit():
                self._settled += 1
                self._metrics.emitted(outcome.counts, size_bytes=outcome.size_bytes, seconds=seconds)
                log.info(
                    "group.emitted",
                    reward=round(outcome.reward_mean, 4),
                    samples=outcome.counts.samples,
                    tokens=outcome.counts.tokens,
                    seconds=seconds,
                )
            case Bury():
                self._settled += 1
                self._metrics.dead.labels(outcome.letter.kind).inc()
                where = {"kind": outcome.letter.kind, "boundary": outcome.letter.boundary}
                log.warning("item.buried", job=lease.job_id, **where, reason=outcome.letter.message)
            case Retry():
                self._metrics.retried.inc()
                log.warning("item.retried", kind=outcome.kind, boundary=outcome.boundary, reason=outcome.message)
            case None:
                log.info("item.handed_back", job=lease.job_id)

    # -- stopping ----------------------------------------------------------------------------------------------------

    def _stop(self, reason: str) -> None:
        if not self._stopping.is_set():
            log.info("worker.stopping", reason=reason, running=len(self._running))
        self._stopping.set()
        self._freed.set()

    def _on_signal(self) -> None:
        self._signals += 1
        self._stop("asked to")
        if self._signals > 1:
            for execution_id in list(self._running):
                self._interrupt(execution_id, "hand_back")

    async def _drain(self) -> None:
        """Let what runs finish for `drain_s`, then hand the rest back."""
        tasks = {running.task for running in self._running.values() if running.task}
        if not tasks:
            return
        grace_s = 0.0 if self._fatal else self._options.drain_s
        _, left = await asyncio.wait(tasks, timeout=grace_s)
        for execution_id in list(self._running):
            self._interrupt(execution_id, "hand_back")
        if left:
            await asyncio.wait(left, timeout=UNWIND_S + self._options.lease_s)

    def _interrupt(self, execution_id: str, reason: Interrupt) -> None:
        running = self._running.get(execution_id)
        if running is None or running.interrupt is not None:
            return
        running.interrupt = reason
        if running.play:
            running.play.cancel()

    def _stop_from_thread(self, job_id: str, execution_id: str | None) -> None:
        for running in list(self._running.values()):
            lease = running.lease
            if lease.job_id == job_id and execution_id in (None, lease.execution_id):
                self._from_thread(self._interrupt, lease.execution_id, "stop")

    def _from_thread(self, call: Any, *args: Any) -> None:
        self._loop.call_soon_threadsafe(call, *args)

    # -- on the side -------------------------------------------------------------------------------------------------

    async def _keep_ticking(self) -> None:
        while True:
            before = time.monotonic()
            self._tick = before
            await asyncio.sleep(TICK_S)
            self._metrics.loop_lag(max(0.0, time.monotonic() - before - TICK_S))

    async def _keep_sweeping(self) -> None:
        tidied = 0.0
        while True:
            try:
                await asyncio.to_thread(self._sweeper.sweep)
                if time.monotonic() - tidied > TIDY_EVERY_S:
                    await asyncio.to_thread(self._sweeper.tidy)
                    tidied = time.monotonic()
            except redis.RedisError as error:
                log.warning("sweep.failed", error=type(error).__name__)
            await asyncio.sleep(self._options.lease_s / 4)

    def _announce(self) -> None:
        self._registration.announce(
            {
                "running": len(self._running),
                "slots": self._options.slots,
                "pool": self._options.pool,
                "ready": int(self.ready),
                "loop_lag_ms": round(1000 * self._metrics.recent_lag_s, 1),
            }
        )

    @property
    def ready(self) -> bool:
        """Takes work: not stopping, Redis answered lately."""
        return not self._stopping.is_set() and self.redis_age_s < 3 * self._options.beat_s + 5

    @property
    def redis_age_s(self) -> float:
        """Seconds since the last beat that Redis answered."""
        return time.monotonic() - self._beater.last_success

    @property
    def tick_age_s(self) -> float:
        """Seconds since the event loop last turned."""
        return time.monotonic() - self._tick


def _unknown_item(lease: Lease) -> RolloutItem:
    run, seq = parse_job_id(lease.job_id) or ("", 0)
    return RolloutItem(run=run, seq=seq, key="", epoch=0, split="train", task={}, seed=0)


def _letter(lease: Lease, item: RolloutItem, worker: str, kind: DeadKind, boundary: str, message: str) -> DeadLetter:
    attempts = lease.attempts + 1
    return DeadLetter(
        item=item,
        kind=kind,
        boundary=boundary,
        message=message,
        attempts=attempts,
        first=lease.first,
        last=time.time(),
        worker=worker,
    )
