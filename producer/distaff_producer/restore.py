"""Finds items that were admitted and got lost behind our back (`rq empty`, a deleted key), and admits them again.

Invariant: an item that is on the queue, leased or settled is never touched: `restore.lua` looks again before it writes. What is
unsettled is bounded by the window, so is the work here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import numpy as np
import redis

from distaff import scripts
from distaff.keys import RunKeys, job_id
from distaff.runs import RunState
from distaff_producer.rq_jobs import (
    EXECUTION_PREFIX,
    JOB_PREFIX,
    QUEUES_KEY,
    QueuedJob,
    canceled_key,
    queue_key,
    wip_key,
)


class Restorer:
    """Of one run on one pool. No retries: errors of redis-py go to the caller, who may call again."""

    def __init__(self, client: redis.Redis, *, run: str, pool: str) -> None:
        self._client = client
        self._run, self._keys = run, RunKeys(run)
        self._queue, self._wip, self._canceled = queue_key(pool), wip_key(pool), canceled_key(pool)
        self._script = scripts.register(client, "restore")

    def restore(self, state: RunState, job_of: Callable[[int], QueuedJob | None]) -> int:
        """Put lost items back on the queue; returns how many. job_of: the job of an item, None when there is none."""
        return sum(self._put_back(seq, job) for seq in self.lost(state) if (job := job_of(seq)))

    def _put_back(self, seq: int, job: QueuedJob) -> int:
        keys = [self._keys.state, self._keys.settled, self._queue, QUEUES_KEY, job.key, self._wip, self._canceled]
        return cast("int", self._script(keys=keys, args=[seq, job.id, EXECUTION_PREFIX, *job.fields]))

    def lost(self, state: RunState) -> list[int]:
        """Numbers of the unsettled items that are neither in anybody's hands nor on the queue."""
        if state.settled >= state.admitted:
            return []
        unsettled = self._unsettled(state.admitted)
        with self._client.pipeline(transaction=True) as pipeline:
            pipeline.lrange(self._queue, 0, -1)
            pipeline.zrange(self._wip, 0, -1)
            pipeline.zrange(self._canceled, 0, -1)
            for seq in unsettled:
                pipeline.hget(f"{JOB_PREFIX}{job_id(self._run, seq)}", "status")
            queue, leases, canceled, *statuses = pipeline.execute()
        leased = {lease.partition(b":")[0] for lease in leases}
        places = {b"queued": set(queue), b"started": leased, b"canceled": set(canceled)}
        return [
            seq
            for seq, status in zip(unsettled, statuses, strict=True)
            if status is None or (status in places and job_id(self._run, seq).encode() not in places[status])
        ]

    def _unsettled(self, admitted: int) -> list[int]:
        stored = cast("bytes | None", self._client.get(self._keys.settled)) or b""
        bits = np.zeros(admitted, dtype=np.uint8)
        known = np.unpackbits(np.frombuffer(stored, dtype=np.uint8))[:admitted]
        bits[: len(known)] = known
        return [int(seq) for seq in np.flatnonzero(bits == 0)]
