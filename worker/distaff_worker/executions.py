"""The executions in progress: each a task that plays one lease and settles it exactly once.

Invariant: an execution ends in one settling call (emit, bury or release), unless its lease is known to be lost. An interrupt decides what
becomes of it: stop buries, hand_back releases, lost drops; a result that was ready is used.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import Executor
from dataclasses import asdict, dataclass
from json import dumps
from typing import Literal

import redis
import structlog

from distaff.clients import is_refusal
from distaff.errors import FatalRun, WireError
from distaff.types import RolloutItem
from distaff_worker.leases import Lease, Settlement
from distaff_worker.letters import Letters
from distaff_worker.metrics import Metrics
from distaff_worker.outcome import Bury, Emit, Outcome, Player, Retry
from distaff_worker.rq_schema import decode_job, unknown_item
from distaff_worker.settle import Settler

log = structlog.get_logger(__name__)
Interrupt = Literal["stop", "hand_back", "lost"]


@dataclass(slots=True, eq=False)
class Running:
    """One execution in progress."""

    lease: Lease
    task: asyncio.Task[None] | None = None
    play: asyncio.Task[Outcome] | None = None
    interrupt: Interrupt | None = None


class Executions:
    """All executions of one worker. Used from its loop, except `leases`.

    books: threads for settling calls. on_free: called when one has ended. on_fatal: called with the lease of an item whose run cannot be
    played here, and why. on_refused: called when Redis denies us a settling call, which it will do with every other.
    """

    def __init__(
        self,
        settler: Settler,
        player: Player,
        *,
        worker: str,
        metrics: Metrics,
        on_free: Callable[[], None],
        on_fatal: Callable[[Lease, FatalRun], None],
        on_refused: Callable[[Exception], None],
    ) -> None:
        self._settler, self._player, self._metrics = settler, player, metrics
        self._letters = Letters(worker)
        self._on_free, self._on_fatal, self._on_refused = on_free, on_fatal, on_refused
        self._running: dict[str, Running] = {}
        self.settled = 0
        """Items emitted or buried."""

    def __len__(self) -> int:
        return len(self._running)

    def leases(self) -> list[Lease]:
        """The leases in progress; safe to call from any thread."""
        return [running.lease for running in list(self._running.values())]

    def tasks(self) -> set[asyncio.Task[None]]:
        return {running.task for running in self._running.values() if running.task}

    def start(self, lease: Lease, *, books: Executor) -> None:
        """Play `lease` as a task of its own."""
        running = Running(lease)
        self._running[lease.execution_id] = running
        self._metrics.running.set(len(self._running))
        running.task = asyncio.get_running_loop().create_task(
            self._execute(running, books), name=f"item {lease.job_id}"
        )
        running.task.add_done_callback(lambda task: self._finished(running, task))

    def _finished(self, running: Running, task: asyncio.Task[None]) -> None:
        self._running.pop(running.lease.execution_id, None)
        self._metrics.running.set(len(self._running))
        self._on_free()
        if not task.cancelled() and (error := task.exception()):
            log.error("execution.broke", job=running.lease.job_id, exc_info=error)

    def interrupt(self, execution_id: str, reason: Interrupt) -> None:
        """End an execution early; the first interrupt counts."""
        running = self._running.get(execution_id)
        if running is None or running.interrupt is not None:
            return
        running.interrupt = reason
        if running.play:
            running.play.cancel()

    def interrupt_all(self, reason: Interrupt) -> None:
        for execution_id in list(self._running):
            self.interrupt(execution_id, reason)

    def interrupt_run(self, run: str, life: str, reason: Interrupt) -> None:
        """Interrupt all of one run."""
        for lease in self.leases():
            if lease.life == life and lease.place[0] == run:
                self.interrupt(lease.execution_id, reason)

    async def _execute(self, running: Running, books: Executor) -> None:
        lease = running.lease
        try:
            item = decode_job(lease.payload, job_id=lease.job_id)
        except WireError as error:
            item = unknown_item(lease.job_id)
            rejected = self._letters.bury(lease, item, kind="rejected", boundary="queue", message=str(error))
            await self._settle(running, rejected, books)
            return
        with structlog.contextvars.bound_contextvars(
            run=item.run, seq=item.seq, execution=lease.execution_id, attempt=lease.attempts + 1
        ):
            await self._settle(running, await self._outcome(running, item), books)

    async def _outcome(self, running: Running, item: RolloutItem) -> Outcome | None:
        """None: hand the item back, or leave it to the one who has it now."""
        lease = running.lease
        if running.interrupt is None:
            running.play = asyncio.get_running_loop().create_task(self._player.play(lease, item))
            await asyncio.wait({running.play})
        if running.interrupt == "stop":
            message = "stopped by an operator"
            return self._letters.bury(lease, item, kind="stopped", boundary="operator", message=message)
        if running.play is None or running.play.cancelled():
            return None
        error = running.play.exception()
        if error is None:
            return running.play.result()
        if running.interrupt:
            return None
        if isinstance(error, redis.RedisError):
            log.warning("play.interrupted", error=type(error).__name__)
            return None
        if isinstance(error, FatalRun):
            self._on_fatal(lease, error)
            return None
        log.error("play.broke", exc_info=error)
        message = f"{type(error).__name__}: {error}"
        return self._letters.bury(lease, item, kind="environment_error", boundary="worker", message=message)

    async def _settle(self, running: Running, outcome: Outcome | None, books: Executor) -> None:
        lease = running.lease
        if outcome is None and running.interrupt == "lost":
            self._report(lease, None, "lost")
            return
        try:
            answer = await asyncio.get_running_loop().run_in_executor(books, self._carry_out, lease, outcome)
        except redis.RedisError as error:
            log.error("settle.failed", job=lease.job_id, error=type(error).__name__)
            if is_refusal(error):
                self._on_refused(error)
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
                self.settled += 1
                self._metrics.emitted(outcome.counts, size_bytes=outcome.size_bytes, seconds=seconds)
                log.info(
                    "group.emitted",
                    reward=round(outcome.reward_mean, 4),
                    samples=outcome.counts.samples,
                    tokens=outcome.counts.tokens,
                    seconds=seconds,
                )
            case Bury():
                self.settled += 1
                self._metrics.dead.labels(outcome.letter.kind).inc()
                where = {"kind": outcome.letter.kind, "boundary": outcome.letter.boundary}
                log.warning("item.buried", job=lease.job_id, **where, reason=outcome.letter.message)
            case Retry():
                self._metrics.retried.inc()
                log.warning("item.retried", kind=outcome.kind, boundary=outcome.boundary, reason=outcome.message)
            case None:
                log.info("item.handed_back", job=lease.job_id)
