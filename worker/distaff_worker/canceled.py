"""Settle what an operator canceled through RQ (Job.cancel): a dead letter of kind `stopped`, like one of `rq` stop-job.

Invariant: an item that RQ calls canceled does not stay unsettled, or its run would never end. Every worker looks, without a lock: the script
is atomic and settles an item once. Jobs of others on the queue are left alone.
"""

from __future__ import annotations

from dataclasses import asdict
from json import dumps
from typing import Any

import redis
import structlog
from redis.commands.core import Script
from rq.registry import CanceledJobRegistry
from rq.utils import now, utcformat

from distaff import scripts
from distaff.errors import WireError
from distaff.keys import RunKeys, parse_job_id
from distaff.types import DeadLetter, RolloutItem
from distaff_worker.rq_schema import (
    EXECUTION_PREFIX,
    EXECUTIONS_PREFIX,
    JOB_PREFIX,
    PoolKeys,
    decode_job,
    pack_exception,
    results_key,
    unknown_item,
)

log = structlog.get_logger(__name__)
MESSAGE = "canceled by an operator; `rq requeue` plays it after all"


class CanceledItems:
    """Of one pool. Synchronous; used from one thread."""

    def __init__(self, client: redis.Redis, *, pool: str, worker: str) -> None:
        self._client, self._worker = client, worker
        self._canceled: str = CanceledJobRegistry.key_template.format(pool)
        self._pool = PoolKeys.of(pool)
        self._script: Script = client.register_script(scripts.load("settle_canceled"))

    def settle(self) -> int:
        """Write the dead letters that are missing; returns how many. Raises redis.RedisError."""
        names: Any = self._client.zrange(self._canceled, 0, -1)
        return sum(self._settle(name.decode(errors="replace")) for name in names)

    def _settle(self, name: str) -> bool:
        place = parse_job_id(name)
        if place is None:
            return False
        run, seq = RunKeys(place[0]), place[1]
        letter = dumps(asdict(self._letter(name)))
        verdict = self._script(
            keys=[
                f"{JOB_PREFIX}{name}",
                self._canceled,
                self._pool.wip,
                f"{EXECUTIONS_PREFIX}{name}",
                self._pool.failed,
                self._pool.finished,
                run.dead,
                run.state,
                run.settled,
                results_key(name),
            ],
            args=[
                name,
                seq,
                utcformat(now()),
                letter,
                pack_exception(f"stopped in operator: {MESSAGE}"),
                self._worker,
                EXECUTION_PREFIX,
            ],
        )
        log.warning("item.canceled", job=name, answer=verdict.decode())
        return bool(verdict == b"buried")

    def _letter(self, name: str) -> DeadLetter:
        marks: Any = self._client.hmget(f"{JOB_PREFIX}{name}", "data", "distaff_attempts", "distaff_first")
        data, attempts, first = marks
        seconds, micros = self._client.time()
        ended = seconds + micros / 1e6
        return DeadLetter(
            item=_item(data or b"", name),
            kind="stopped",
            boundary="operator",
            message=MESSAGE,
            attempts=int(attempts or 0),
            first=float(first or ended),
            last=ended,
            worker=self._worker,
        )


def _item(data: bytes, name: str) -> RolloutItem:
    try:
        return decode_job(data, job_id=name)
    except WireError:
        return unknown_item(name)
