"""Emit, bury, release: the only writes that end an execution.

Invariant: each is one atomic script that writes only for the owner of the lease and says the same when it is sent twice, so a lost
reply is resolved by sending it again. While Redis is away or full the result is held and the call waits; the lease decides in the end.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any, Literal, cast

import redis
import structlog
from redis.commands.core import Script
from rq.utils import now, utcformat

from distaff import scripts
from distaff.clients import may_pass
from distaff.keys import RunKeys
from distaff_worker.leases import Counts, Lease, Settlement
from distaff_worker.rq_schema import ExecutionKeys, PoolKeys, pack_exception, results_key, worker_executions_key

log = structlog.get_logger(__name__)
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.05, 2.0


class Settler:
    """Settles executions of one worker. Thread-safe: holds a client and scripts, no state of its own.

    give_up: asked between repeats; True ends the waiting (the worker is being killed) with the last error raised.
    """

    def __init__(
        self,
        client: redis.Redis,
        *,
        pool: str,
        worker: str,
        worker_key: str,
        give_up: Callable[[], bool] = lambda: False,
    ) -> None:
        self._worker, self._worker_key = worker, worker_key
        self._pool = PoolKeys.of(pool)
        self._give_up = give_up
        self._emit: Script = client.register_script(scripts.load("emit"))
        self._bury: Script = client.register_script(scripts.load("bury"))
        self._release: Script = client.register_script(scripts.load("release"))

    def emit(self, lease: Lease, fields: Mapping[Any, Any], counts: Counts) -> Settlement:
        """Append the group to its run's stream and finish the job."""
        run, seq = _item_of(lease)
        flat = [part for pair in fields.items() for part in pair]
        numbers = [counts.rollouts, counts.samples, counts.tokens, counts.trained_tokens, repr(counts.reward_sum)]
        return self._send(
            self._emit,
            lease,
            keys=[*self._owner_keys(lease), self._pool.finished, run.groups, run.state, run.settled],
            args=[seq, utcformat(now()), *numbers, counts.reward_count, _worked(lease), *flat],
        )

    def bury(
        self,
        lease: Lease,
        letter_json: str,
        *,
        text: str,
        status: Literal["failed", "stopped"] = "failed",
        dropped: bool = False,
    ) -> Settlement:
        """Record a dead letter and fail the job. text: what RQ's tools show as the exception."""
        run, seq = _item_of(lease)
        return self._send(
            self._bury,
            lease,
            keys=[
                *self._owner_keys(lease),
                self._pool.failed,
                run.dead,
                run.state,
                run.settled,
                results_key(lease.job_id),
            ],
            args=[
                seq if lease.place[0] else "",
                utcformat(now()),
                letter_json,
                status,
                pack_exception(text),
                self._worker,
                int(dropped),
                _worked(lease),
            ],
        )

    def release(self, lease: Lease, reason: Literal["handed_back", "retried"]) -> Settlement:
        """Put the item back: at once at the front (handed_back), or at the back with one attempt used (retried)."""
        run, _ = _item_of(lease)
        keys = [*self._owner_keys(lease)[:5], self._pool.queue, run.state]
        return self._send(self._release, lease, keys=keys, args=[utcformat(now()), reason])

    def _owner_keys(self, lease: Lease) -> list[str]:
        keys = ExecutionKeys.of(lease.job_id, lease.execution_id)
        executions = worker_executions_key(self._worker)
        return [keys.job, self._pool.wip, keys.executions, keys.execution, executions, self._worker_key]

    def _send(self, script: Script, lease: Lease, *, keys: list[str], args: list[Any]) -> Settlement:
        pause_s = FIRST_PAUSE_S
        while True:
            try:
                answer = script(keys=keys, args=[lease.execution_id, lease.job_id, *args])
                return cast(Settlement, answer.decode())
            except redis.RedisError as error:
                log.warning("settle.delayed", job=lease.job_id, error=type(error).__name__)
                if self._give_up() or not may_pass(error):
                    raise
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)


def _item_of(lease: Lease) -> tuple[RunKeys, int]:
    run, seq = lease.place
    return RunKeys(run), seq


def _worked(lease: Lease) -> str:
    return repr(round(time.monotonic() - lease.claimed, 6))
