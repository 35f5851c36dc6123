"""Pull: pop and lease items in one atomic step.

Invariant: an item is in the list or leased, never in between. Blocking is an identity move of the list's head, so a
cut connection or a kill while waiting takes nothing off the queue.
"""

from __future__ import annotations

import time
from collections.abc import Collection
from uuid import uuid4

import redis
from redis.commands.core import Script
from rq.utils import now, utcformat

from distaff import scripts
from distaff.keys import PREFIX
from distaff_worker.leases import Lease
from distaff_worker.rq_schema import (
    EXECUTION_PREFIX,
    EXECUTIONS_PREFIX,
    JOB_PREFIX,
    SUSPENDED,
    PoolKeys,
    worker_executions_key,
)

RUN_PREFIX = f"{PREFIX}:run:"


class Suspended(Exception):
    """`rq suspend` is in force."""


class Claimer:
    """Claims from one pool for one worker. Synchronous; used from one thread."""

    def __init__(self, client: redis.Redis, *, pool: str, worker: str, worker_key: str, lease_s: float) -> None:
        self._client = client
        self._keys = PoolKeys.of(pool)
        self._worker = worker
        self._worker_key = worker_key
        self._lease_ms = round(lease_s * 1000)
        self._script: Script = client.register_script(scripts.load("claim"))

    def claim(self, count: int, *, suspects: int = 0, refused: Collection[str] = ()) -> list[Lease]:
        """Up to `count` leases, none when the queue has nothing for us. Raises Suspended, redis.RedisError.

        suspects: how many of the leases this worker holds are `Lease.suspect`. refused: "<run> <life>" of the runs it cannot play.
        """
        answer = self._script(
            keys=[
                self._keys.queue,
                self._keys.wip,
                worker_executions_key(self._worker),
                self._worker_key,
                self._keys.finished,
                SUSPENDED,
            ],
            args=[
                count,
                JOB_PREFIX,
                EXECUTION_PREFIX,
                EXECUTIONS_PREFIX,
                self._worker,
                utcformat(now()),
                self._lease_ms,
                RUN_PREFIX,
                suspects,
                *[uuid4().hex for _ in range(count)],
                *refused,
            ],
        )
        if answer == 0:
            raise Suspended
        claimed = time.monotonic()
        return [
            Lease(
                job_id=job_id.decode(),
                execution_id=execution_id.decode(),
                payload=data,
                attempts=int(attempts),
                lost=int(lost),
                first=float(first),
                policy_version=int(version),
                claimed=claimed,
                at=float(at),
                life=life.decode(),
            )
            for job_id, execution_id, data, attempts, lost, first, version, life, at in answer
        ]

    def wait(self, seconds: float) -> bool:
        """Block until the queue has something or `seconds` passed; takes nothing off it."""
        queue = self._keys.queue
        return self._client.blmove(queue, queue, seconds, "LEFT", "LEFT") is not None  # type: ignore[arg-type]
