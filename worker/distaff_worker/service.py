"""The worker's life: admit leases into slots, play them as tasks on one loop, settle each, drain at the end.

Invariant: every claimed lease ends in exactly one settling call (emit, bury or release), or its loss was reported to us.
Nothing here blocks the loop: Redis is spoken to from threads of their own, so that user code that fills the default pool
cannot starve beats or settlements. No thread or task of it can fail and leave the rest alive: the worker hands back and ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NoReturn

import redis
import structlog
from rq.worker.base import WorkerStatus

from distaff.clients import is_refusal, may_pass, refusal
from distaff.errors import FatalRun, WorkerBroken
from distaff.redaction import redact
from distaff.starting import patiently
from distaff_worker.beat import Beater
from distaff_worker.canceled import CanceledItems
from distaff_worker.claim import Claimer, Suspended
from distaff_worker.executions import Executions
from distaff_worker.leases import Lease
from distaff_worker.memory import rss_bytes
from distaff_worker.metrics import Metrics
from distaff_worker.outcome import Player
from distaff_worker.registration import Registration
from distaff_worker.service_options import ServiceOptions
from distaff_worker.settle import Settler
from distaff_worker.sweep import Sweeper

log = structlog.get_logger(__name__)
CLAIM_BATCH = 16
IDLE_WAIT_S = 1.0
SUSPECTS_WAIT_S = 0.25
"""Pause when all there is on the queue must wait for a suspect to end."""
MAX_DENIED = 10
"""One failure may be the fault of one job; after so many claims in a row the worker is of no use here."""
TICK_S = 0.05
ALIVE_S = 1.0
TIDY_EVERY_S = 60.0
UNWIND_S = 5.0
"""How long an interrupted play may take to clean up before it is left behind."""


class Service:
    """One worker on one pool. `run` returns when it was told to stop and everything is settled or handed back.

    beats: a client for the heartbeats, with a shorter time-out, so that a connection that went silent does not cost the leases.
    done: asked (on a thread) when there is nothing to do; True ends the worker. alive: told by the loop, every ALIVE_S, that it turns.
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
        alive: Callable[[], None] = lambda: None,
    ) -> None:
        self._options, self._player, self._metrics, self._done = options, player, metrics, done
        self._alive = alive
        self._user = f"user {client.get_connection_kwargs().get('username') or 'default'!r}"
        self._killed = threading.Event()
        ttl_s = max(60, round(3 * options.lease_s))
        self._registration = patiently(
            lambda: Registration(
                client,
                pool=options.pool,
                name=options.name,
                ttl_s=ttl_s,
                beats=beats or client,
                on_stop=self._stop_from_thread,
                on_shutdown=lambda: self._from_thread(self._on_signal),
            ),
            role="the worker",
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
            on_refused=self._on_broken,
        )
        self._sweeper = Sweeper(client, pool=options.pool, lease_s=options.lease_s)
        self._canceled = CanceledItems(client, pool=options.pool, worker=options.name)
        self._beater = Beater(
            beats or client,
            **names,
            lease_s=options.lease_s,
            beat_s=options.beat_s,
            leases=self._executions.leases,
            on_lost=lambda lease: self._from_thread(self._executions.interrupt, lease.execution_id, "lost"),
            on_end=lambda: self._from_thread(
                self._on_broken, self._beater.failure or RuntimeError("the heartbeat thread ended")
            ),
            announce=self._announce,
            tick=lambda: self._tick,
        )
        self._tick = time.monotonic()
        self._refused: dict[str, FatalRun] = {}
        """ "<run> <life>" of the runs that cannot be played here, and why."""
        self._signals = 0
        self._denied = 0
        """Claims in a row that failed for a reason which does not pass by itself."""

    async def run(self) -> None:
        """Work until SIGTERM, SIGINT, a shutdown command, or until all that is left is what cannot be played here.

        Raises FatalRun in that last case (and at the end of a worker that had refused a run), redis.RedisError at start, WorkerBroken when
        a part of it failed that must not; what it had claimed is handed back first.
        """
        self._loop = asyncio.get_running_loop()
        self._stopping, self._freed = asyncio.Event(), asyncio.Event()
        self._broken: asyncio.Future[Exception] = self._loop.create_future()
        self._claims = ThreadPoolExecutor(1, "distaff-claim")
        self._books = ThreadPoolExecutor(4, "distaff-settle")
        self._upkeep = ThreadPoolExecutor(1, "distaff-upkeep")
        for number in (signal.SIGTERM, signal.SIGINT):
            self._loop.add_signal_handler(number, self._on_signal)
        await self._player.open()
        await self._loop.run_in_executor(self._books, self._register)
        self._beater.start()
        log.info("worker.started", worker=self._options.name, pool=self._options.pool, slots=self._options.slots)
        try:
            async with asyncio.TaskGroup() as side:
                keepers = (self._keep_ticking(), self._keep_sweeping(), self._keep_whole())
                sides = [side.create_task(keeper) for keeper in keepers]
                try:
                    await self._admit()
                    await self._drain()
                finally:
                    for task in sides:
                        task.cancel()
        except ExceptionGroup as group:
            await self._break_off(group.exceptions[0])
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
        while not self._stopping.is_set() and not self._overgrown():
            free = self._options.slots - len(self._executions)
            if self._options.max_groups:
                free = min(free, self._options.max_groups - self._executions.settled - len(self._executions))
                if self._executions.settled >= self._options.max_groups:
                    return
            if free <= 0:
                self._freed.clear()
                await self._freed.wait()
                continue
            leases = await self._start_claimed(min(CLAIM_BATCH, -(-free // 4)))
            if leases is None:
                continue
            if not leases and not self._executions and await self._is_over():
                return
            if not leases and self._options.burst and not self._stopping.is_set():
                self._freed.clear()
                await self._freed.wait()

    def _overgrown(self) -> bool:
        limit_bytes = self._options.max_rss_bytes
        if not limit_bytes or (used_bytes := rss_bytes()) < limit_bytes:
            return False
        log.info("worker.overgrown", rss_bytes=used_bytes, max_rss_bytes=limit_bytes)
        return True

    async def _start_claimed(self, count: int) -> list[Lease] | None:
        """Claim and start; also what a claim brings that was on its way when the worker broke, so that it is handed back with the rest."""
        claim = self._loop.run_in_executor(self._claims, self._claim, count)
        try:
            leases = await asyncio.shield(claim)
        except asyncio.CancelledError:
            await asyncio.wait({claim})
            if claim.exception() is None:
                self._start(claim.result() or [])
            raise
        self._start(leases or [])
        return leases

    def _start(self, leases: list[Lease]) -> None:
        for lease in leases:
            self._executions.start(lease, books=self._books)

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
            leases = self._ask(count)
        except redis.RedisError as error:
            self._denied = 0 if may_pass(error) else self._denied + 1
            if is_refusal(error) or self._denied >= MAX_DENIED:
                raise
            log.warning("claim.failed", error=type(error).__name__, detail=redact(str(error)))
            self._metrics.redis_errors.inc()
            time.sleep(1.0)
            return None
        self._denied = 0
        return leases

    def _ask(self, count: int) -> list[Lease] | None:
        """None when the workers are suspended. Raises redis.RedisError before anything was claimed."""
        suspects = sum(lease.suspect for lease in self._executions.leases())
        refused = list(self._refused)
        try:
            leases = self._claimer.claim(count, suspects=suspects, refused=refused)
            if not leases and not self._options.burst and self._claimer.wait(IDLE_WAIT_S):
                leases = self._claimer.claim(count, suspects=suspects, refused=refused)
                if not leases:
                    time.sleep(SUSPECTS_WAIT_S)
        except Suspended:
            if self._registration.get_state() != WorkerStatus.SUSPENDED:
                self._registration.set_state(WorkerStatus.SUSPENDED)
            time.sleep(0.25)
            return None
        if self._registration.get_state() == WorkerStatus.SUSPENDED:
            with contextlib.suppress(redis.RedisError):  # the next beat says it as well; the leases are ours by now
                self._registration.set_state(WorkerStatus.IDLE)
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

    def _on_broken(self, error: Exception) -> None:
        """Something failed without which everything claimed from here on is lost: the heartbeat, the right to settle."""
        if not self._broken.done():
            self._broken.set_result(error)

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

    async def _break_off(self, error: Exception) -> NoReturn:
        """Hand everything back and raise WorkerBroken: a worker that lacks a part is started anew, not kept alive without it."""
        log.critical("worker.broke", exc_info=error)
        self._stop("broken")
        self._executions.interrupt_all("hand_back")
        if tasks := self._executions.tasks():
            await asyncio.wait(tasks, timeout=UNWIND_S + self._options.lease_s)
        if is_refusal(error):
            raise WorkerBroken(f"Redis {refusal(error, self._user)}. What the worker had was handed back") from error
        raise WorkerBroken(
            f"a part of the worker failed that it cannot go on without ({type(error).__name__}: {redact(str(error))}). Its items were handed "
            "back; start it again. The log has the details under worker.broke"
        ) from error

    def _stop_from_thread(self, job_id: str, execution_id: str | None) -> None:
        for lease in self._executions.leases():
            if lease.job_id == job_id and execution_id in (None, lease.execution_id):
                self._from_thread(self._executions.interrupt, lease.execution_id, "stop")

    def _from_thread(self, call: Any, *args: Any) -> None:
        self._loop.call_soon_threadsafe(call, *args)

    # -- on the side -------------------------------------------------------------------------------------------------

    async def _keep_ticking(self) -> None:
        told = 0.0
        while True:
            before = time.monotonic()
            self._tick = before
            if before - told > ALIVE_S:
                told = before
                self._alive()
            await asyncio.sleep(TICK_S)
            self._metrics.loop_lag(max(0.0, time.monotonic() - before - TICK_S))

    async def _keep_sweeping(self) -> None:
        tidied = 0.0
        while True:
            try:
                await self._loop.run_in_executor(self._upkeep, self._sweeper.sweep)
                await self._loop.run_in_executor(self._upkeep, self._canceled.settle)
                if time.monotonic() - tidied > TIDY_EVERY_S:
                    await self._loop.run_in_executor(self._upkeep, self._sweeper.tidy)
                    tidied = time.monotonic()
            except redis.RedisError as error:
                log.warning("sweep.failed", error=type(error).__name__)
            await asyncio.sleep(self._options.lease_s / 4)

    async def _keep_whole(self) -> None:
        """Raises what is reported to `_on_broken`."""
        raise await self._broken

    def _register(self) -> None:
        patiently(self._enlist, role="the worker", give_up=self._stopping.is_set)

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
                "prefix_share": "" if (share := self._metrics.recent_prefix_share) is None else round(share, 4),
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
