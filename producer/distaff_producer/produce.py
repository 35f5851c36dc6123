"""Walks an environment's dataset and admits it to a run, item by item, until the run has what it was to have.

Invariant: item n is admitted once, whoever and however many produce: the cursor in Redis decides, is read before every step and
guards every write. All steps are safe to repeat, so an outage is answered by waiting and taking the next step.
Never writes a job outside `admit.lua`; never holds more than one batch in memory.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import redis
import structlog

from distaff.clients import connect
from distaff.config import RunConfig
from distaff.environments.protocol import Environment
from distaff.errors import ConfigurationError
from distaff_producer.admit import Admission
from distaff_producer.items import ItemSource
from distaff_producer.outage import Outage
from distaff_producer.report import Phase, ProduceReport, Progress, Tally
from distaff_producer.restore import Restorer
from distaff_producer.rq_jobs import QueuedJob, queued_job
from distaff_producer.window import Pace, Standing, read_standing

MAX_BATCH_BYTES = 8 << 20
"""Of the items in one script call: Redis does nothing else while it takes them in."""
OUTAGE_BUDGET_S = 300.0
RESTORE_EVERY_S = 30.0
"""How often a producer that waits looks for items that got lost."""

log = structlog.get_logger(__name__)


class Producer:
    """Admits one run. `run` may be called once; `stop` ends it between two batches, and the run stays open."""

    def __init__(
        self,
        config: RunConfig,
        redis_url: str,
        environment: Environment,
        *,
        stop: threading.Event | None = None,
        outage_budget_s: float = OUTAGE_BUDGET_S,
    ) -> None:
        self.stop = stop or threading.Event()
        self._config = config
        self._run = config.run.name
        self._client = connect(redis_url, client_name="distaff-producer")
        self._admission = Admission(self._client, config)
        self._source = ItemSource(config, environment)
        self._environment = environment
        self._outage = Outage(redis_url, budget_s=outage_budget_s, stop=self.stop)
        self._pace = Pace(self.stop)
        self._restorer = Restorer(self._client, run=self._run, pool=config.run.pool)
        self._restored = 0
        self._looked: float | None = None
        self._drops = config.run.mode == "rl" and config.rollouts.zero_variance == "drop"
        self._tally: Tally | None = None
        self._was_closed = False
        self._closed = False
        self._shown: Progress | None = None

    def run(self, on_progress: Callable[[Progress], None] | None = None) -> ProduceReport:
        """Admit what is missing and close the run; return when it is closed or stopped.

        Raises ConfigurationError (another configuration, an item that is too large or not JSON, the run deleted meanwhile),
        EnvironmentFailure (a row cannot be read), RedisUnavailable (away for longer than the budget).
        """
        began = time.monotonic()
        with self._client:
            while not (self.stop.is_set() or self._closed):
                try:
                    self._step(on_progress)
                except redis.exceptions.RedisError as error:
                    self._outage.wait(error)
                else:
                    self._outage.over()
        report = self._report(time.monotonic() - began)
        log.info(
            "run.closed" if report.closed else "producer.stopped",
            run=self._run,
            admitted=report.admitted,
            already_there=report.already_there,
            total=report.total,
        )
        return report

    def _step(self, on_progress: Callable[[Progress], None] | None) -> None:
        if self._tally is None:
            self._tally = self._open()
        standing = self._read(self._tally)
        self._restore(standing)
        phase = self._act(standing, self._tally)
        self._show(on_progress, phase, standing, self._tally.cursor)
        if phase in ("window full", "waiting for groups"):
            self._pace.wait()
        else:
            self._pace.reset()

    def _restore(self, standing: Standing) -> None:
        """At the start and from time to time put items back that somebody took off the queue."""
        if self._looked is not None and time.monotonic() - self._looked < RESTORE_EVERY_S:
            return
        count = self._restorer.restore(standing.state, self._job)
        self._looked = time.monotonic()
        self._restored += count
        if count:
            log.warning("items.restored", run=self._run, items=count)

    def _open(self) -> Tally:
        opened = self._admission.open(target=self._source.total)
        self._was_closed = opened.closed
        log.info(
            "run.opened" if opened.created else "run.joined", run=self._run, cursor=opened.cursor, closed=opened.closed
        )
        return Tally(opened.cursor)

    def _read(self, tally: Tally) -> Standing:
        standing = read_standing(self._client, self._run)
        if standing is None:
            raise self._gone()
        tally.follow(standing.state.admitted)
        return standing

    def _act(self, standing: Standing, tally: Tally) -> Phase:
        if standing.state.status == "closed":
            self._closed = True
            return "closed"
        goal = self._goal(standing)
        if goal is not None and standing.state.admitted >= goal:
            return self._finish(standing)
        room = standing.room(self._config.producer.window)
        if room < 1:
            return "window full"
        most = min(self._config.producer.batch, room)
        jobs = self._jobs(standing.state.admitted, most if goal is None else min(most, goal - standing.state.admitted))
        return self._send(jobs, goal, tally) if jobs else "admitting"

    def _finish(self, standing: Standing) -> Phase:
        if self._drops and standing.state.settled < standing.state.admitted:
            return "waiting for groups"
        status = self._admission.close(expected=standing.state.admitted)
        if status == "missing":
            raise self._gone()
        self._closed = status == "closed"
        return "closed" if self._closed else "admitting"

    def _goal(self, standing: Standing) -> int | None:
        """Items the run is to have by now: what was asked for, and one more for each dropped group within the budget."""
        total = self._source.total
        if total is None:
            return None
        if not self._drops:
            return total
        extra = min(standing.state.dropped, self._config.producer.replacements or total)
        available = self._source.available
        return total + extra if available is None else min(total + extra, available)

    def _jobs(self, start: int, count: int) -> list[QueuedJob]:
        jobs: list[QueuedJob] = []
        size_bytes = 0
        for seq in range(start, start + count):
            job = self._job(seq)
            if job is None:
                log.warning("environment.ended", run=self._run, environment=self._environment.id, rows=seq)
                break
            self._check_size(job, seq)
            size_bytes += job.payload_bytes
            if jobs and size_bytes > MAX_BATCH_BYTES:
                break
            jobs.append(job)
        return jobs

    def _job(self, seq: int) -> QueuedJob | None:
        item = self._source.item(seq)
        if item is None:
            return None
        limits = self._config.rollouts
        return queued_job(item, pool=self._config.run.pool, group_timeout_s=limits.group_timeout_s, client=self._client)

    def _check_size(self, job: QueuedJob, seq: int) -> None:
        limit = self._config.producer.max_item_bytes
        if job.payload_bytes > limit:
            raise ConfigurationError(
                f"{self._source.describe(seq)} makes an item of {job.payload_bytes} bytes; producer.max_item_bytes is {limit}. "
                f"Raise it to at least {job.payload_bytes}, or have the environment put large data beside the dataset and a reference "
                "into the row"
            )

    def _send(self, jobs: list[QueuedJob], goal: int | None, tally: Tally) -> Phase:
        tally.sending(len(jobs))
        outcome = self._admission.admit(jobs, expected=tally.cursor, target=goal)
        if outcome.status == "missing":
            raise self._gone()
        if outcome.status != "admitted":
            tally.refused()
        tally.follow(outcome.cursor)
        return "window full" if outcome.status == "full" else "admitting"

    def _show(
        self, on_progress: Callable[[Progress], None] | None, phase: Phase, standing: Standing, cursor: int
    ) -> None:
        state = standing.state
        progress = Progress(
            run=self._run,
            phase=phase,
            admitted=cursor,
            target=self._goal(standing),
            emitted=state.emitted,
            dead=state.dead,
            dropped=state.dropped,
            unread=standing.unread,
        )
        if progress == self._shown:
            return
        if phase == "window full" and (self._shown is None or self._shown.phase != phase):
            log.info("window.filled", run=self._run, unsettled=state.admitted - state.settled, unread=standing.unread)
        self._shown = progress
        if on_progress is not None:
            on_progress(progress)

    def _report(self, seconds: float) -> ProduceReport:
        tally = self._tally or Tally(0)
        total = self._source.total
        return ProduceReport(
            run=self._run,
            admitted=tally.admitted,
            already_there=tally.already_there,
            elsewhere=tally.elsewhere,
            restored=self._restored,
            replaced=0 if total is None else max(0, tally.cursor - total),
            total=tally.cursor,
            was_closed=self._was_closed,
            closed=self._closed,
            seconds=seconds,
        )

    def _gone(self) -> ConfigurationError:
        return ConfigurationError(
            f"run {self._run!r} is gone from Redis: it was deleted, or Redis lost its data. Produce again to begin it anew"
        )
