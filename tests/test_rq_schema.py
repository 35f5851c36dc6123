"""What we write by script is what RQ 3.0 itself reads and writes: the contract test for the pinned version."""

from __future__ import annotations

import json
import zlib
from dataclasses import asdict

import pytest
import redis
from rq.executions import Execution, ExecutionRegistry
from rq.job import Job
from rq.registry import FailedJobRegistry, FinishedJobRegistry, StartedJobRegistry
from rq.results import Result
from rq.serializers import JSONSerializer
from rq.worker import Worker

from distaff.errors import WireError
from distaff.keys import job_id
from distaff_worker.claim import Claimer
from distaff_worker.rq_schema import (
    JOB_FUNCTION,
    ExecutionKeys,
    JSONQueue,
    PoolKeys,
    decode_job,
    results_key,
    worker_executions_key,
)
from tests.worker_support import POOL, enqueue, make_item, open_run


def test_key_names_are_rqs_own(client: redis.Redis) -> None:
    """Every key name equals the one RQ's classes give."""
    queue = JSONQueue(POOL, connection=client)
    job = Job.create("f", id="j-1", connection=client, serializer=JSONSerializer, origin=POOL)
    execution = Execution("e1", "j-1", client, worker_name="w1")
    keys, mine = PoolKeys.of(POOL), ExecutionKeys.of("j-1", "e1")
    assert keys.queue == queue.key
    assert keys.wip == StartedJobRegistry(queue=queue).key
    assert keys.finished == FinishedJobRegistry(queue=queue).key
    assert keys.failed == FailedJobRegistry(queue=queue).key
    assert mine.job == job.key
    assert mine.execution == execution.key
    assert mine.executions == ExecutionRegistry("j-1", connection=client).key
    assert worker_executions_key("w1") == execution.worker_executions_key
    assert results_key("j-1") == Result.get_key("j-1")  # type: ignore[no-untyped-call]


def test_a_claimed_job_is_a_started_job_with_an_execution(client: redis.Redis) -> None:
    """RQ reads our lease as an execution of a started job."""
    open_run(client, "r")
    [name] = enqueue(client, "r", 1)
    [lease] = Claimer(client, pool=POOL, worker="w1", worker_key="rq:worker:w1", lease_s=30).claim(1)
    queue = JSONQueue(POOL, connection=client)
    job = Job.fetch(name, connection=client, serializer=JSONSerializer)
    assert job.is_started
    assert job.worker_name == "w1"
    assert StartedJobRegistry(queue=queue).get_job_ids(cleanup=False) == [name]
    execution = Execution.fetch(lease.execution_id, name, client)
    assert execution.worker_name == "w1"
    assert [found.id for found in job.get_executions()] == [lease.execution_id]
    worker = Worker([queue], name="w1", connection=client, serializer=JSONSerializer)
    assert worker.current_execution_count == 1


def payload(*parts: object) -> bytes:
    return zlib.compress(json.dumps(parts).encode())


@pytest.mark.parametrize(
    "data",
    [
        b"\x80\x04.",
        b"",
        b"[" * 100_000,
        payload(),
        payload("os.system", None, [], {"item": {}}),
        payload(JOB_FUNCTION, None, ["x"], {"item": {}}),
        payload(JOB_FUNCTION, None, [], {"item": {}}),
        payload(JOB_FUNCTION, None, [], {"item": {"run": "r", "nonsense": 1}}),
        payload(JOB_FUNCTION, None, [], {"item": [1]}),
        zlib.compress(b"x" * (80 << 20)),
    ],
)
def test_a_payload_that_is_not_ours_is_refused(data: bytes) -> None:
    """P26: typed error, nothing executed, nothing unpickled, bounded memory."""
    with pytest.raises(WireError):
        decode_job(data, job_id=job_id("run-1", 3))


def test_a_payload_of_ours_round_trips() -> None:
    """The item is read back as it was admitted."""
    item = make_item("r", 7)
    body = payload(JOB_FUNCTION, None, [], {"item": asdict(item)})
    assert decode_job(body, job_id=job_id("r", 7)) == item


@pytest.mark.parametrize("name", [job_id("r", 8), job_id("other", 7), "b6a1b7a0-2f0e-4b7c-8a71-3d9f5f0d2a11"])
def test_an_item_under_the_id_of_another_is_refused(name: str) -> None:
    """Settled under that id it would be counted for the other's run."""
    body = payload(JOB_FUNCTION, None, [], {"item": asdict(make_item("r", 7))})
    with pytest.raises(WireError):
        decode_job(body, job_id=name)
