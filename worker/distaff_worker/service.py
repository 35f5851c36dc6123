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
from dataclasses import dataclass
from typing import Any

import redis
import structlog
from rq.worker.base import WorkerStatus

from distaff.errors import FatalRun
from distaff_worker.beat import Beater
from distaff_worker.claim import Claimer, Suspended
from distaff_worker.executions import Executions
from distaff_worker.leases import Lease
from distaff_worker.metrics import Metrics
from distaff_worker.outcome import Player
from distaff_worker.registration import Registration
from distaff_worker.settle import Settler
from distaff_worker.sweep import Sweeper

log = structlog.get_logger(__name__)
CLAIM_BATCH = 16
IDLE_WAIT_S = 1.0
SUSPECTS_WAIT_S = 0.25
"""Pause when all there is on the queue must wait for a suspect to end."""
TICK_S = 0.05
TIDY_EVERY_S = 60.0
UNWIND_S = 5.0
"""How long an interrupted play may take to clean up before it is left behind."""


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

    beats: a client for the heartbeats, with a shorter time-out, so that a connection that went silent does not cost the leases.
    done: asked (on a thread) when there is nothing to do; True ends the worker.
    """

    def __init__(
        self,
        client: redis.Redis,
        *,
        options: ServiceOptions,
        player: Player,
        metrics: Metrics,
        beats: redis.Redis | None = None,
        done: Callable[[], bool] | None = None,
    ) -> None:
        self._options, self._player, self._metrics, self._done = options, player, metrics, done
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
        self._executions = Executions(
            self._settler,
            player,
            worker=options.name,
            metrics=metrics,
            on_free=lambda: self._freed.set(),  # noqa: PLW0108 - the event is made when the loop runs
            on_fatal=self._on_fatal,
        )
        self._sweeper = Sweeper(client, pool=options.pool)
        self._beater = Beater(
            beats or client,
            **names,
            lease_s=options.lease_s,
            beat_s=options.beat_s,
            leases=self._executions.leases,
            on_lost=lambda lease: self._from_thread(self._executions.interrupt, lease.execution_id, "lost"),
            announce=self._announce,
            tick=lambda: self._tick,
        )
        self._tick = time.monotonic()
        self._refused: dict[str, FatalRun] = {}
        """ "<run> <life>" of the runs that cannot be played here, and why."""
        self._signals = 0

    async def run(self) -> None:
        """Work until SIGTERM, SIGINT, a shutdown command, or until all that is left is what cannot be played here.

        Raises FatalRun in that last case (and at the end of a worker that had refused a run), redis.RedisError at start.
        """
        self._loop = asyncio.get_running_loop()
        self._stopping, self._freed = asyncio.Event(), asyncio.Event()
        self._claims = ThreadPoolExecutor(1, "distaff-claim")
        self._books = ThreadPoolExecutor(4, "distaff-settle")
        self._upkeep = ThreadPoolExecutor(1, "distaff-upkeep")
        for number in (signal.SIGTERM, signal.SIGINT):
            self._loop.add_signal_handler(number, self._on_signal)
        await self._player.open()
        await self._loop.run_in_executor(self._books, self._enlist)
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
        if self._refused:
            raise next(iter(self._refused.values()))

    async def _close(self) -> None:
        self._killed.set()
        await self._player.close()
        await self._loop.run_in_executor(self._upkeep, self._beater.stop)
        try:
            await self._loop.run_in_executor(self._books, self._registration.death)
        except redis.RedisError as error:
            log.warning("worker.unregistered_late", error=type(error).__name__)
        for threads in (self._claims, self._books, self._upkeep):
            threads.shutdown()
        log.info("worker.stopped", worker=self._options.name, settled=self._executions.settled)

    # -- admission ---------------------------------------------------------------------------------------------------

    async def _admit(self) -> None:
        while not self._stopping.is_set():
            free = self._options.slots - len(self._executions)
            if self._options.max_groups:
                free = min(free, self._options.max_groups - self._executions.settled - len(self._executions))
                if self._executions.settled >= self._options.max_groups:
                    return
            if free <= 0:
                self._freed.clear()
                await self._freed.wait()
                continue
            leases = await self._loop.run_in_executor(self._claims, self._claim, min(CLAIM_BATCH, -(-free // 4)))
            if leases is None:
                continue
            for lease in leases:
                self._executions.start(lease, books=self._books)
            if not leases and not self._executions and await self._is_over():
                return
            if not leases and self._options.burst and not self._stopping.is_set():
                self._freed.clear()
                await self._freed.wait()

    async def _is_over(self) -> bool:
        if self._refused:
            return True
        if self._options.burst or self._done is None:
            return self._options.burst
        try:
            return await self._loop.run_in_executor(self._claims, self._done)
        except redis.RedisError as error:
            log.warning("done.unknown", error=type(error).__name__)
            return False

    def _claim(self, count: int) -> list[Lease] | None:
        """None when the queue could not be asked: Redis is away, or the workers are suspended."""
        try:
            suspects = sum(lease.suspect for lease in self._executions.leases())
            refused = list(self._refused)
            leases = self._claimer.claim(count, suspects=suspects, refused=refused)
            if not leases and not self._options.burst and self._claimer.wait(IDLE_WAIT_S):
                leases = self._claimer.claim(count, suspects=suspects, refused=refused)
                if not leases:
                    time.sleep(SUSPECTS_WAIT_S)
            if self._registration.get_state() == WorkerStatus.SUSPENDED:
                self._registration.set_state(WorkerStatus.IDLE)
        except Suspended:
            if self._registration.get_state() != WorkerStatus.SUSPENDED:
                self._registration.set_state(WorkerStatus.SUSPENDED)
            time.sleep(0.25)
            return None
        except redis.RedisError as error:
            log.warning("claim.failed", error=type(error).__name__)
            self._metrics.redis_errors.inc()
            time.sleep(1.0)
            return None
        return leases

    # -- stopping ----------------------------------------------------------------------------------------------------

    def _stop(self, reason: str) -> None:
        if not self._stopping.is_set():
            log.info("worker.stopping", reason=reason, running=len(self._executions))
        self._stopping.set()
        self._freed.set()

    def _on_fatal(self, lease: Lease, error: FatalRun) -> None:
        """Others may be able to play the run, and this worker may be able to play others."""
        run, _ = lease.place
        key = f"{run} {lease.life}"
        if key not in self._refused:
            self._refused[key] = error
            log.error("run.refused", run=run, reason=str(error))
        self._executions.interrupt_run(run, lease.life, "hand_back")

    def _on_signal(self) -> None:
        self._signals += 1
        self._stop("asked to")
        if self._signals > 1:
            self._executions.interrupt_all("hand_back")

    async def _drain(self) -> None:
        """Let what runs finish for `drain_s`, then hand the rest back."""
        tasks = self._executions.tasks()
        if not tasks:
            return
        _, left = await asyncio.wait(tasks, timeout=self._options.drain_s)
        self._executions.interrupt_all("hand_back")
        if left:
            await asyncio.wait(left, timeout=UNWIND_S + self._options.lease_s)

    def _stop_from_thread(self, job_id: str, execution_id: str | None) -> None:
        for lease in self._executions.leases():
            if lease.job_id == job_id and execution_id in (None, lease.execution_id):
                self._from_thread(self._executions.interrupt, lease.execution_id, "stop")

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
                await self._loop.run_in_executor(self._upkeep, self._sweeper.sweep)
                if time.monotonic() - tidied > TIDY_EVERY_S:
                    await self._loop.run_in_executor(self._upkeep, self._sweeper.tidy)
                    tidied = time.monotonic()
            except redis.RedisError as error:
                log.warning("sweep.failed", error=type(error).__name__)
            await asyncio.sleep(self._options.lease_s / 4)

    def _enlist(self) -> None:
        self._registration.birth()
        self._announce()

    def _announce(self) -> None:
        self._registration.announce(
            {
                "state": self._state(),
                "running": len(self._executions),
                "slots": self._options.slots,
                "pool": self._options.pool,
                "ready": int(self.ready),
                "loop_lag_ms": round(1000 * self._metrics.recent_lag_s, 1),
            }
        )

    def _state(self) -> str:
        if self._registration.get_state() == WorkerStatus.SUSPENDED:
            return WorkerStatus.SUSPENDED.value
        return WorkerStatus.BUSY.value if self._executions else WorkerStatus.IDLE.value

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
