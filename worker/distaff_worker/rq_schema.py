"""RQ 3.0's Redis schema as the worker uses it: key names, the job payload, the shape of a result.

Invariant: key names come from RQ's own constants, so RQ_KEY_PREFIX is honoured; a contract test holds the rest against RQ.
Never deserializes anything but JSON, never imports the function a job names.
"""

from __future__ import annotations

import base64
import json
import zlib
from dataclasses import dataclass, fields

from rq.defaults import RQ_KEY_PREFIX
from rq.executions import WORKER_EXECUTIONS_KEY_TEMPLATE
from rq.job import Job
from rq.queue import Queue
from rq.registry import FailedJobRegistry, FinishedJobRegistry, StartedJobRegistry
from rq.serializers import JSONSerializer
from rq.suspension import WORKERS_SUSPENDED

from distaff.errors import WireError
from distaff.keys import parse_job_id
from distaff.types import RolloutItem

JOB_FUNCTION = "distaff_worker.job.play"
"""The only function name a job may carry; it is a name, it is never called by it."""
MAX_PAYLOAD_BYTES = 64 << 20
JOB_PREFIX: str = Job.redis_job_namespace_prefix
EXECUTION_PREFIX = f"{RQ_KEY_PREFIX}:execution:"
EXECUTIONS_PREFIX = f"{RQ_KEY_PREFIX}:executions:"
SUSPENDED: str = WORKERS_SUSPENDED

_ITEM_FIELDS = {field.name for field in fields(RolloutItem)}


class JSONQueue(Queue):
    """A queue that speaks JSON whatever the caller says: `rq info --queue-class distaff_worker.rq_schema.JSONQueue`.

    Stock `rq info` builds queues with the pickle serializer and restores job results with it; this class does not.
    """

    def __init__(self, *args: object, **options: object) -> None:
        options["serializer"] = JSONSerializer
        super().__init__(*args, **options)  # type: ignore[arg-type]


@dataclass(frozen=True, slots=True)
class PoolKeys:
    """RQ's keys of one queue."""

    queue: str
    wip: str
    finished: str
    failed: str

    @classmethod
    def of(cls, pool: str) -> PoolKeys:
        return cls(
            queue=f"{Queue.redis_queue_namespace_prefix}{pool}",
            wip=StartedJobRegistry.key_template.format(pool),
            finished=FinishedJobRegistry.key_template.format(pool),
            failed=FailedJobRegistry.key_template.format(pool),
        )


@dataclass(frozen=True, slots=True)
class ExecutionKeys:
    """RQ's keys of one execution of one job."""

    job: str
    executions: str
    execution: str

    @classmethod
    def of(cls, job_id: str, execution_id: str) -> ExecutionKeys:
        return cls(
            job=f"{JOB_PREFIX}{job_id}",
            executions=f"{EXECUTIONS_PREFIX}{job_id}",
            execution=f"{EXECUTION_PREFIX}{job_id}:{execution_id}",
        )


def worker_executions_key(worker: str) -> str:
    return str(WORKER_EXECUTIONS_KEY_TEMPLATE.format(worker))


def results_key(job_id: str) -> str:
    return f"{RQ_KEY_PREFIX}:results:{job_id}"


def pack_exception(text: str) -> str:
    """An exception text as RQ's Result stores it."""
    return base64.b64encode(zlib.compress(text.encode("utf-8", "replace"))).decode()


def decode_job(data: bytes, *, job_id: str) -> RolloutItem:
    """The item in the `data` field of the job `job_id`. Raises WireError for anything that is not one of our jobs."""
    try:
        payload = json.loads(_inflate(data))
    except (ValueError, RecursionError, zlib.error) as error:
        raise WireError(
            f"the job is not JSON ({type(error).__name__}); distaff jobs are made by `distaff produce`"
        ) from None
    match payload:
        case [str(function), None, [], {"item": dict(item)}] if function == JOB_FUNCTION:
            return _item(item, job_id)
    raise WireError("the job does not come from `distaff produce`: only its own jobs may be on a pool's queue")


def unknown_item(job_id: str) -> RolloutItem:
    """What stands for the item of a job that cannot be decoded."""
    run, seq = parse_job_id(job_id) or ("", 0)
    return RolloutItem(run=run, seq=seq, key="", epoch=0, split="train", task={}, seed=0)


def _inflate(data: bytes) -> bytes:
    try:
        inflater = zlib.decompressobj()
        plain = inflater.decompress(data, MAX_PAYLOAD_BYTES)
    except zlib.error:
        return data
    if inflater.unconsumed_tail:
        raise ValueError("too large")
    return plain


def _item(values: dict[str, object], job_id: str) -> RolloutItem:
    unknown = values.keys() - _ITEM_FIELDS
    if unknown:
        raise WireError(
            f"the job has fields this version does not know: {', '.join(sorted(unknown))}; upgrade the workers"
        )
    try:
        item = RolloutItem(**values)  # type: ignore[arg-type]
    except TypeError as error:
        raise WireError(f"the job is incomplete: {error}") from None
    numbers = (item.seq, item.epoch, item.seed, item.priority)
    if not all(type(number) is int for number in numbers) or not isinstance(item.task, dict):
        raise WireError("the job has fields of the wrong type")
    if parse_job_id(job_id) != (item.run, item.seq):
        raise WireError("the job's id does not name its item; distaff jobs are made by `distaff produce`")
    return item
