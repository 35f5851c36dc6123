"""The scripts behind the producer: opening, admitting and closing are atomic, guarded and repeatable; jobs are RQ's own."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import redis
from rq import Queue
from rq.job import Job, JobStatus

from distaff.config import RunConfig
from distaff.errors import ConfigurationError
from distaff.keys import RUNS, RunKeys
from distaff.runs import read_config_json, read_state
from distaff_producer.admit import Admission, Admitted
from distaff_producer.items import ItemSource
from distaff_producer.rq_jobs import QueuedJob, queued_job
from tests.producer_support import Numbers, Settler, config, item_on_queue, queued_seqs

KEYS = RunKeys("r")


def jobs(client: redis.Redis, start: int, count: int, settings: RunConfig | None = None) -> list[QueuedJob]:
    """The jobs of items start, start + 1, ... of an unshuffled run."""
    settings = settings or config(shuffle=False)
    source = ItemSource(settings, Numbers(rows=None))
    items = [source.item(seq) for seq in range(start, start + count)]
    return [queued_job(item, pool="p", group_timeout_s=1800.5, client=client) for item in items if item is not None]


@pytest.fixture
def admission(client: redis.Redis) -> Admission:
    """An open run with a window of six."""
    opened = Admission(client, config(shuffle=False, window=6))
    opened.open(target=20)
    return opened


@pytest.fixture
def full_memory(client: redis.Redis) -> Iterator[None]:
    """A Redis that refuses writes because it is full."""
    client.config_set("maxmemory", "1")
    yield
    client.config_set("maxmemory", "0")


def snapshot(client: redis.Redis) -> dict[bytes, Any]:
    """Everything in Redis."""
    return {key: client.dump(key) for key in client.scan_iter()}


def test_a_batch_is_queued_and_counted_in_one_step(client: redis.Redis, admission: Admission) -> None:
    """Jobs, queue, registration of the queue, cursor and target change together."""
    assert admission.admit(jobs(client, 0, 4), expected=0, target=21) == Admitted(status="admitted", cursor=4, room=2)
    assert queued_seqs(client) == [0, 1, 2, 3]
    assert client.smembers("rq:queues") == {b"rq:queue:p"}
    state = read_state(client, "r")
    assert state is not None
    assert (state.status, state.admitted, state.target) == ("open", 4, 21)


def test_a_batch_sent_twice_is_admitted_once(client: redis.Redis, admission: Admission) -> None:
    """A lost reply is resolved by sending again: the cursor has moved and nothing is written."""
    batch = jobs(client, 0, 3)
    admission.admit(batch, expected=0, target=20)
    before = snapshot(client)
    assert admission.admit(batch, expected=0, target=20) == Admitted(status="moved", cursor=3, room=3)
    assert snapshot(client) == before


def test_only_what_fits_the_window_is_admitted(client: redis.Redis, admission: Admission) -> None:
    """Queued, running and unread items never exceed the window; what does not fit is told by the cursor."""
    assert admission.admit(jobs(client, 0, 9), expected=0, target=20) == Admitted(status="admitted", cursor=6, room=0)
    assert admission.admit(jobs(client, 6, 3), expected=6, target=20) == Admitted(status="full", cursor=6, room=0)
    settler = Settler(client)
    assert settler.emit()
    assert admission.admit(jobs(client, 6, 3), expected=6, target=20).status == "full"
    assert settler.acknowledge()
    assert settler.drop()
    assert admission.admit(jobs(client, 6, 3), expected=6, target=20) == Admitted(status="admitted", cursor=8, room=0)
    assert queued_seqs(client) == [2, 3, 4, 5, 6, 7]
    assert not client.exists("rq:job:r-000000008")


def test_a_full_redis_refuses_a_batch_whole(client: redis.Redis, admission: Admission, full_memory: None) -> None:
    """P8: Out of memory means nothing of the batch is there: no cursor without jobs, no jobs without cursor."""
    before = snapshot(client)
    with pytest.raises(redis.exceptions.OutOfMemoryError):
        admission.admit(jobs(client, 0, 3), expected=0, target=20)
    assert snapshot(client) == before


def test_a_closed_or_deleted_run_admits_nothing(client: redis.Redis, admission: Admission) -> None:
    """After the close, and without a run, a batch changes nothing."""
    admission.close(expected=0)
    before = snapshot(client)
    assert admission.admit(jobs(client, 0, 1), expected=0, target=20).status == "closed"
    assert snapshot(client) == before
    client.delete(KEYS.state)
    assert admission.admit(jobs(client, 0, 1), expected=0, target=20).status == "missing"
    assert not client.exists("rq:queue:p")


def test_nothing_of_an_older_job_survives_in_a_new_one(client: redis.Redis, admission: Admission) -> None:
    """A job hash left by a run of the same name does not lend its marks to the new item."""
    client.hset("rq:job:r-000000000", mapping={"distaff_settled": "x", "status": "finished"})
    admission.admit(jobs(client, 0, 1), expected=0, target=20)
    assert client.hget("rq:job:r-000000000", "distaff_settled") is None
    assert client.hget("rq:job:r-000000000", "status") == b"queued"


def test_items_with_priority_go_to_the_front(client: redis.Redis, admission: Admission) -> None:
    """A priority above 0 puts an item before all that wait."""
    source = ItemSource(config(shuffle=False), Numbers())
    item = source.item(2)
    assert item is not None
    urgent = queued_job(replace(item, priority=1), pool="p", group_timeout_s=1.0, client=client)
    admission.admit([*jobs(client, 0, 2), urgent], expected=0, target=20)
    assert queued_seqs(client) == [2, 0, 1]


def test_rq_reads_our_jobs(client: redis.Redis, admission: Admission) -> None:
    """RQ's own Job finds function, item, timeouts and retries in the hash."""
    admission.admit(jobs(client, 0, 1), expected=0, target=20)
    job = Job.fetch("r-000000000", connection=client, serializer="json")
    assert (job.func_name, job.args, job.origin) == ("distaff_worker.job.play", [], "p")
    assert job.description == "distaff r 0"
    assert job.get_status() == JobStatus.QUEUED
    assert (job.timeout, job.result_ttl, job.failure_ttl, job.retries_left) == (1861, 3600, 604_800, 1_000_000)
    item = item_on_queue(client, "r-000000000")
    assert item["task"] == {"question": "0?", "answer": 0, "info": {"deep": [1, None, "é"]}}
    assert (item["run"], item["seq"], item["trace"]) == ("r", 0, {})


def test_our_jobs_have_the_fields_of_rqs_own(client: redis.Redis, admission: Admission) -> None:
    """The hash has exactly the fields that RQ writes when it enqueues the same job itself."""
    admission.admit(jobs(client, 0, 1), expected=0, target=20)
    ours = cast("dict[bytes, bytes]", client.hgetall("rq:job:r-000000000"))
    made = Job.fetch("r-000000000", connection=client, serializer="json")
    made.id = "stock"
    Queue("stock", connection=client, serializer="json").enqueue_job(made)
    stock = cast("dict[bytes, bytes]", client.hgetall("rq:job:stock"))
    assert ours.keys() == stock.keys()
    varying = {b"enqueued_at", b"origin"}
    assert {k: v for k, v in ours.items() if k not in varying} == {k: v for k, v in stock.items() if k not in varying}


def test_stock_rq_info_shows_the_jobs(client: redis.Redis, redis_url: str, admission: Admission) -> None:
    """`rq info` lists the pool's queue with the number of items."""
    admission.admit(jobs(client, 0, 5), expected=0, target=20)
    shown = subprocess.run(
        [Path(sys.executable).with_name("rq"), "info", "-u", redis_url, "--raw", "-S", "json"],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert "queue p 5" in shown.stdout


def test_rqs_key_prefix_is_followed_and_a_deleted_run_leaves_nothing(redis_url: str) -> None:
    """With RQ_KEY_PREFIX set, all of RQ's keys carry it, and deleting the run finds them."""
    program = (
        "import sys; from distaff.clients import connect; from distaff.runs import delete_run\n"
        "from distaff_producer.produce import Producer; from tests.producer_support import Numbers, config\n"
        "client = connect(sys.argv[1]); Producer(config(), sys.argv[1], Numbers(rows=2)).run()\n"
        "print(sorted(key.decode() for key in client.keys())); delete_run(client, 'r'); print(client.keys())\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, redis_url],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
        env={**os.environ, "RQ_KEY_PREFIX": "{other}"},
        cwd=Path(__file__).parent.parent,
    )
    lines = done.stdout.splitlines()
    assert (
        "['distaff:run:r:config', 'distaff:run:r:state', 'distaff:runs', '{other}:job:r-000000000', "
        "'{other}:job:r-000000001', '{other}:queue:p', '{other}:queues']" in lines
    )
    assert lines[-1] == "[]"


def test_opening_twice_joins_the_run(client: redis.Redis, admission: Admission) -> None:
    """The second open finds the cursor of the first and writes nothing."""
    admission.admit(jobs(client, 0, 2), expected=0, target=20)
    before = snapshot(client)
    again = Admission(client, config(shuffle=False, window=6)).open(target=20)
    assert (again.created, again.cursor, again.closed) == (False, 2, False)
    assert snapshot(client) == before
    assert client.smembers(RUNS) == {b"r"}
    stored = read_config_json(client, "r")
    assert stored is not None
    assert RunConfig.model_validate_json(stored) == config(shuffle=False, window=6)


def test_another_configuration_is_refused_by_setting(client: redis.Redis, admission: Admission) -> None:
    """A run's configuration never changes: the error lists what differs, with both values."""
    other = config(shuffle=False, window=7, rollouts={"group_size": 4})
    with pytest.raises(ConfigurationError) as caught:
        Admission(client, other).open(target=20)
    message = str(caught.value)
    assert "run 'r' exists with another configuration; choose another run.name or delete it" in message
    assert "  producer.window: 6 in the run, 7 now\n" in message + "\n"
    assert "  rollouts.group_size: 8 in the run, 4 now\n" in message + "\n"
    assert "seed" not in message


def test_an_unreadable_configuration_is_refused(client: redis.Redis, admission: Admission) -> None:
    """A configuration of another version is said to be that."""
    client.set(KEYS.config, '{"run": {"colour": "red"}}')
    with pytest.raises(ConfigurationError, match="this version cannot read"):
        Admission(client, config(shuffle=False, window=6)).open(target=20)


def test_a_run_closes_only_at_the_expected_cursor(client: redis.Redis, admission: Admission) -> None:
    """Whoever closes knows everything that was admitted; closing twice is the same as once."""
    admission.admit(jobs(client, 0, 2), expected=0, target=20)
    assert admission.close(expected=0) == "moved"
    state = read_state(client, "r")
    assert state is not None
    assert (state.status, state.closed) == ("open", None)
    assert admission.close(expected=2) == "closed"
    assert admission.close(expected=2) == "closed"
    state = read_state(client, "r")
    assert state is not None
    assert (state.status, state.target) == ("closed", 2)
    assert state.closed is not None
    assert state.closed >= state.opened > 1.7e9
    client.delete(KEYS.state)
    assert admission.close(expected=2) == "missing"
