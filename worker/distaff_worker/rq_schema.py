"""RQ 3.0's Redis schema as the worker uses it: key names, the job payload, the shape of a result.

Invariant: key names come from RQ's own constants, so RQ_KEY_PREFIX is honoured; a contract test holds the rest against RQ.
Never deserializes anything but JSON, never imports the function a job names.
"""

from __future__ import annotations

import base64
import json
import zlib
from collections.abc import Iterable
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
from distaff.plain import MAX_DEPTH as MAX_ROW_DEPTH
from distaff.types import MAX_ITEM_BYTES, RolloutItem

JOB_FUNCTION = "distaff_worker.job.play"
"""The only function name a job may carry; it is a name, it is never called by it."""
MAX_PAYLOAD_BYTES = 2 * MAX_ITEM_BYTES
"""Of the JSON text: an item, and room for what encloses it."""
MAX_DEPTH = MAX_ROW_DEPTH + 8
FREE_CONTAINERS, BYTES_PER_CONTAINER = 200_000, 24
"""Beyond the first a text may open one list or object in so many bytes, or it would grow thirtyfold in memory."""
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
        payload = json.loads(_bounded(_inflate(data)), parse_constant=_refuse_constant)
        _check_depth(payload)
    except (ValueError, RecursionError) as error:
        raise WireError(
            f"the job is not JSON ({type(error).__name__}); distaff jobs are made by `distaff produce`"
        ) from None
    match payload:
        case [str(function), None, [], {"item": dict(item), **others}] if function == JOB_FUNCTION and not others:
            return _item(item, job_id)
    raise WireError("the job does not come from `distaff produce`: only its own jobs may be on a pool's queue")


def unknown_item(job_id: str) -> RolloutItem:
    """What stands for the item of a job that cannot be decoded."""
    run, seq = parse_job_id(job_id) or ("", 0)
    return RolloutItem(run=run, seq=seq, key="", epoch=0, split="train", task={}, seed=0)


def _inflate(data: bytes) -> bytes:
    """As RQ: what is not compressed is taken as it is."""
    if len(data) > MAX_PAYLOAD_BYTES:
        raise ValueError("too large")
    try:
        inflater = zlib.decompressobj()
        plain = inflater.decompress(data, MAX_PAYLOAD_BYTES)
    except zlib.error:
        plain = data
    else:
        if not inflater.eof or inflater.unused_data:
            raise ValueError("too large, or damaged")
    return plain


def _bounded(text: bytes) -> bytes:
    containers = text.count(b"[") + text.count(b"{")
    if containers > FREE_CONTAINERS and containers > len(text) // BYTES_PER_CONTAINER:
        raise ValueError("too many lists and objects")
    return text


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def _check_depth(value: object) -> None:
    """Raise ValueError for what is nested too deep to be copied, encoded and shown elsewhere: recursion ends at some depth everywhere."""
    level: list[object] = [value]
    for _ in range(MAX_DEPTH):
        level = [inner for outer in level for inner in _inside(outer)]
        if not level:
            return
    raise ValueError("nested too deep")


def _inside(value: object) -> Iterable[object]:
    if isinstance(value, list):
        return value
    return value.values() if isinstance(value, dict) else ()


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
    if not _is_typed(item):
        raise WireError("the job has fields of the wrong type")
    if parse_job_id(job_id) != (item.run, item.seq):
        raise WireError("the job's id does not name its item; distaff jobs are made by `distaff produce`")
    return item


def _is_typed(item: RolloutItem) -> bool:
    numbers = (item.seq, item.epoch, item.seed, item.priority)
    texts = (item.run, item.key, *item.trace, *item.trace.values()) if isinstance(item.trace, dict) else (None,)
    return (
        all(type(number) is int and -(2**63) <= number < 2**63 for number in numbers)
        and all(isinstance(text, str) for text in texts)
        and item.split in ("train", "eval")
        and isinstance(item.task, dict)
    )
