"""Recover what dead workers held: expired leases go back to the front of the queue.

Invariant: no lock and no owner: every worker sweeps, the script is atomic, and a lease is swept once.
"""

from __future__ import annotations

import redis
import structlog
from redis.commands.core import Script
from rq import worker_registration
from rq.registry import FailedJobRegistry, FinishedJobRegistry
from rq.utils import now, utcformat

from distaff import scripts
from distaff.keys import PREFIX, swept_key
from distaff_worker.rq_schema import EXECUTIONS_PREFIX, JOB_PREFIX, JSONQueue, PoolKeys

log = structlog.get_logger(__name__)
LIMIT = 500


class Sweeper:
    """Sweeps one pool. Synchronous; used from one thread."""

    def __init__(self, client: redis.Redis, *, pool: str, lease_s: float = 0.0) -> None:
        """lease_s: of this pool's workers; 0: sweep also right after an outage."""
        self._client, self._lease_s = client, lease_s
        self._pool = pool
        self._keys = PoolKeys.of(pool)
        self._script: Script = client.register_script(scripts.load("sweep"))

    def sweep(self) -> int:
        """Put expired leases back; returns how many. Raises redis.RedisError."""
        back = self._script(
            keys=[self._keys.wip, self._keys.queue, swept_key(self._pool)],
            args=[JOB_PREFIX, f"{PREFIX}:run:", EXECUTIONS_PREFIX, LIMIT, utcformat(now()), self._lease_s],
        )
        for job_id in back:
            log.warning("lease.expired", job=job_id.decode())
        return len(back)

    def tidy(self) -> None:
        """RQ's own housekeeping that is safe without a lock: expired entries of the finished and failed registries, dead workers."""
        queue = JSONQueue(self._pool, connection=self._client)
        server_s, _ = self._client.time()
        FinishedJobRegistry(queue=queue).cleanup(server_s)
        FailedJobRegistry(queue=queue).cleanup(server_s)
        worker_registration.clean_worker_registry(queue)
