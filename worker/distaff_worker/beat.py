"""Keep leases alive, on a thread of its own so that a busy event loop does not look dead at once.

Invariant: a lease is extended only for its owner; the loser is told, so that it stops burning tokens. A loop that has stood
still for `give_up_s` is not beaten for any more: others take its items. A beat that cannot be sent at all is reported, never skipped.
"""

from __future__ import annotations

import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence

import redis
import structlog
from redis.commands.core import Script
from rq.utils import now, utcformat

from distaff import scripts
from distaff.clients import is_refusal
from distaff.redaction import redact
from distaff_worker.leases import Lease
from distaff_worker.rq_schema import EXECUTION_PREFIX, EXECUTIONS_PREFIX, JOB_PREFIX, PoolKeys, worker_executions_key

log = structlog.get_logger(__name__)
CHUNK = 500
STALL_REPORT_S = 5.0


class Beater:
    """The heartbeat thread of one worker.

    leases: the executions to beat for, read at each beat. on_lost: called (on this thread) with each that is not ours any
    more. on_end: called when the thread ends without having been told to. announce: refreshes the worker's registration.
    tick: time.monotonic() of the event loop's last turn.
    """

    def __init__(
        self,
        client: redis.Redis,
        *,
        pool: str,
        worker: str,
        lease_s: float,
        beat_s: float,
        leases: Callable[[], Sequence[Lease]],
        on_lost: Callable[[Lease], None],
        on_end: Callable[[], None],
        announce: Callable[[], None],
        tick: Callable[[], float],
    ) -> None:
        self._script: Script = client.register_script(scripts.load("beat"))
        self._keys = [PoolKeys.of(pool).wip, worker_executions_key(worker)]
        self._lease_s, self._beat_s = lease_s, beat_s
        self._leases, self._on_lost, self._on_end = leases, on_lost, on_end
        self._announce, self._tick = announce, tick
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="distaff-beat", daemon=True)
        self.last_success = time.monotonic()
        self.failure: redis.RedisError | None = None
        """What ended the thread."""

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stop.set()
        self._thread.join(timeout=self._beat_s + 5)

    def beat(self) -> None:
        """One beat for all leases, then the announcement: a full Redis refuses that one. Raises redis.RedisError."""
        leases = list(self._leases())
        for start in range(0, len(leases), CHUNK):
            chunk = leases[start : start + CHUNK]
            pairs = [part for lease in chunk for part in (lease.job_id, lease.execution_id)]
            args: list[str | int] = [
                round(self._lease_s * 1000),
                utcformat(now()),
                JOB_PREFIX,
                EXECUTION_PREFIX,
                EXECUTIONS_PREFIX,
                *pairs,
            ]
            for lease, ours in zip(chunk, self._script(keys=self._keys, args=args), strict=True):
                if not ours:
                    self._on_lost(lease)
        self._announce()
        self.last_success = time.monotonic()

    def _run(self) -> None:
        try:
            self._keep_beating()
        finally:
            if not self._stop.is_set():
                self._on_end()

    def _keep_beating(self) -> None:
        while not self._stop.wait(self._beat_s):
            stall_s = time.monotonic() - self._tick()
            if stall_s > STALL_REPORT_S:
                log.error("loop.stalled", seconds=round(stall_s, 1), stack=_main_stack())
            if stall_s > 4 * self._lease_s:
                continue
            try:
                self.beat()
            except redis.RedisError as error:
                log.warning("beat.failed", error=type(error).__name__, detail=redact(str(error)))
                if is_refusal(error):
                    self.failure = error
                    raise


def _main_stack() -> str:
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    return "".join(traceback.format_stack(frame)) if frame else ""
