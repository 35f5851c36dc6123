"""Items as RQ 3.0 jobs. The one place of the producer that knows RQ.

Invariant: job hashes are made by RQ's own `Job`, with its JSON serializer: stock `rq info`, `rq requeue` and monitors read them.
Nothing is written here.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass

import redis
from rq import Queue, Retry
from rq.defaults import RQ_KEY_PREFIX
from rq.job import Job, JobStatus
from rq.registry import CanceledJobRegistry, StartedJobRegistry
from rq.utils import now

from distaff.keys import job_id
from distaff.types import RolloutItem

FUNCTION = "distaff_worker.job.play"
SERIALIZER = "json"
RESULT_TTL_S = 3600
FAILURE_TTL_S = 7 * 24 * 3600
"""RQ's default is a year, and without one the results of failed jobs stay for ever."""
TIMEOUT_MARGIN_S = 60
"""On top of the group's own deadline, which the worker enforces."""
RETRIES = 1_000_000
"""Stock `rq info` fails an abandoned job that has no retries left; ours are counted elsewhere, so it always requeues them."""

QUEUES_KEY: str = Queue.redis_queues_keys
JOB_PREFIX: str = Job.redis_job_namespace_prefix
EXECUTION_PREFIX = f"{RQ_KEY_PREFIX}:execution:"


@dataclass(frozen=True, slots=True, kw_only=True)
class QueuedJob:
    """A job as `admit.lua` takes it."""

    id: str
    key: str
    fields: tuple[str | bytes | int | float, ...]
    """Names and values of the job hash, one after the other."""
    payload_bytes: int
    """Of the item as JSON, before RQ compresses it."""
    at_front: bool
    """Items with a priority above 0 go to the front of the queue, before all that wait; the others to its end."""


def queue_key(pool: str) -> str:
    """Key of the list that workers of the pool listen on."""
    return f"{Queue.redis_queue_namespace_prefix}{pool}"


def wip_key(pool: str) -> str:
    """Key of the registry that holds the pool's leases."""
    return str(StartedJobRegistry.key_template.format(pool))


def canceled_key(pool: str) -> str:
    """Key of the registry of jobs that an operator canceled."""
    return str(CanceledJobRegistry.key_template.format(pool))


def queued_job(item: RolloutItem, *, pool: str, group_timeout_s: float, client: redis.Redis) -> QueuedJob:
    """The job of an item, stamped with the time of the call. RQ wants a client to make one; nothing is sent."""
    job = Job.create(
        FUNCTION,
        kwargs={"item": asdict(item)},
        id=job_id(item.run, item.seq),
        origin=pool,
        description=f"distaff {item.run} {item.seq}",
        timeout=math.ceil(group_timeout_s) + TIMEOUT_MARGIN_S,
        result_ttl=RESULT_TTL_S,
        failure_ttl=FAILURE_TTL_S,
        retry=Retry(max=RETRIES),
        status=JobStatus.QUEUED,
        serializer=SERIALIZER,
        connection=client,
    )
    job.enqueued_at = now()
    fields = job.to_dict()
    return QueuedJob(
        id=job.id,
        key=job.key,
        fields=tuple(part for pair in fields.items() for part in pair),
        payload_bytes=len(job.data),
        at_front=item.priority > 0,
    )
