"""Faults the settlement machine found, each as the few steps that showed it: they are steps of the machine, judged by its model."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import pytest
import redis
from rq.job import cancel_job
from rq.registry import FailedJobRegistry
from rq.serializers import JSONSerializer

from distaff.keys import RunKeys, job_id, parse_job_id
from distaff.types import RolloutItem
from distaff_producer.restore import Restorer
from distaff_producer.rq_jobs import queued_job
from distaff_worker.leases import Lease
from distaff_worker.outcome import Outcome
from distaff_worker.rq_schema import JSONQueue
from tests.settlement_machine import Settlement
from tests.settlement_support import POOL, RUNS
from tests.test_service import make_service, working
from tests.worker_support import ScriptedPlayer, check_oracle, emit_of, enqueue, make_item, open_run, until

RUN, OTHER = RUNS


@pytest.fixture
def farm(client: redis.Redis) -> Iterator[Settlement]:
    """The machine with a run of three items; at the end it brings everything to its end."""
    Settlement.server = client
    machine = Settlement()
    machine.begin()
    yield machine
    machine.all_is_well()
    machine.teardown()


@pytest.mark.parametrize("name", ["a-1", "a-0000000001", "a-99999999999"])
def test_an_id_that_only_looks_like_one_of_ours_is_no_item(farm: Settlement, name: str) -> None:
    """It must not bring item 1's dead letter back to life, nor be settled in its place."""
    for _ in range(2):
        farm.claim("w0", 1, False, 9)
    farm.bury(1, False, "environment_error", False)
    farm.push_foreign(name)
    assert parse_job_id(name) is None
    while farm.model.queue:
        farm.claim("w1", 1, False, 9)
        farm.all_is_well()
    farm.bury(len(farm.executions) - 1, True, "environment_error", False)


@pytest.mark.parametrize("name", ["a-1", "a-0000000001"])
def test_deleting_a_run_leaves_alone_what_only_looks_like_its_items(farm: Settlement, name: str) -> None:
    """The job of somebody else stays on the queue."""
    farm.push_foreign(name)
    farm.delete_run(0, False, False)
    assert farm.client.lrange(f"rq:queue:{POOL}", 0, -1) == [name.encode()]


def test_deleting_a_run_forgets_no_queue_whose_registries_hold_another_run(farm: Settlement) -> None:
    """An empty queue is not one nobody uses: the leases of the other run have to be found when that is deleted."""
    farm.claim("w0", 3, False, 9)
    farm.open_run(OTHER)
    farm.delete_run(1, False, False)
    assert farm.client.sismember("rq:queues", f"rq:queue:{POOL}")
    farm.delete_run(0, False, False)


@pytest.mark.parametrize("step", ["emit", "bury", "release", "sweep", "queue"])
def test_what_is_left_of_a_half_deleted_run_is_not_counted_for_the_one_opened_anew(farm: Settlement, step: str) -> None:
    """Jobs and leases of the former life that nobody deleted: the new life has not admitted these items."""
    if step != "queue":
        farm.claim("w0", 1, False, 9)
    farm.delete_run(0, True, True)
    match step:
        case "emit":
            farm.emit(0, True, False)
        case "bury":
            farm.bury(0, True, "environment_error", False)
        case "release":
            farm.release(0, True, "handed_back")
        case "sweep":
            farm.expire(0)
            farm.sweep(["w1"])
    farm.claim("w1", 3, False, 9)
    assert farm.model.runs[RUN].admitted == 0
    assert farm.client.exists(RunKeys(RUN).settled) == 0


@pytest.mark.parametrize("raced", [False, True])
@pytest.mark.parametrize("claimed", [False, True])
def test_an_item_that_an_operator_cancels_is_a_dead_letter(farm: Settlement, claimed: bool, raced: bool) -> None:
    """Job.cancel says "never run": the item is settled as stopped, and `rq requeue` brings it back."""
    if claimed:
        farm.claim("w0", 1, False, 9)
    farm.cancel(0, raced)
    farm.settle_canceled(["w1", "w2"])
    farm.all_is_well()
    [letter] = [json.loads(text) for text in _letters(farm)]
    assert (letter["kind"], letter["boundary"], letter["item"]["seq"]) == ("stopped", "operator", 0)
    if claimed:
        farm.beat("w0")
        assert not farm.workers["w0"].hands
    farm.requeue(0)
    farm.claim("w2", 3, False, 9)
    assert _letters(farm) == []


def test_a_canceled_item_whose_deletion_broke_off_is_settled(farm: Settlement) -> None:
    """RQ takes it off the list of canceled jobs, fails on an execution that has run out, and leaves it with nobody."""
    farm.claim("w0", 1, False, 9)
    farm.expire(0)
    farm.cancel(0, True)
    with pytest.raises(ValueError, match="Execution"):
        farm._job(job_id(RUN, 0)).delete()
    farm.model.canceled.clear()
    assert farm.client.zcard(f"rq:canceled:{POOL}") == 0
    farm.restore(0)
    farm.settle_canceled(["w1"])
    assert len(_letters(farm)) == 1


@pytest.mark.parametrize("settled", ["emit", "bury"])
def test_canceling_a_settled_item_changes_nothing_about_it(farm: Settlement, settled: str) -> None:
    """What was emitted is shown as finished again, a dead letter as failed."""
    farm.claim("w0", 1, False, 9)
    if settled == "emit":
        farm.emit(0, False, False)
    else:
        farm.bury(0, False, "dropped", False)
    farm.cancel(0, False)
    farm.settle_canceled(["w1", "w1"])
    status = {"emit": "finished", "bury": "stopped"}[settled]
    assert farm.client.hget(f"rq:job:{job_id(RUN, 0)}", "status") == status.encode()
    assert farm.client.ttl(f"rq:job:{job_id(RUN, 0)}") > 0


@pytest.mark.parametrize("letter", ['{"message": "\\ud800"}', "[1]", "none", "[" * 2000])
def test_a_dead_letter_that_lua_cannot_read_can_be_requeued(farm: Settlement, letter: str) -> None:
    """Half a claim must not be carried out: text of an environment may hold anything."""
    farm.claim("w0", 1, False, 9)
    farm.bury(0, False, "environment_error", False)
    farm.client.hset(RunKeys(RUN).dead, "0", letter)
    farm.requeue(0)
    farm.claim("w1", 3, False, 9)
    assert len(farm.workers["w1"].hands) == 3


def test_an_execution_that_a_worker_never_heard_of_leaves_its_list(farm: Settlement) -> None:
    """A claim whose reply was lost runs out; the worker that lives on is not shown with it for ever."""
    farm.claim("w0", 1, True, 9)
    farm.claim("w0", 1, False, 9)
    farm.expire(0)
    farm.expire(1)
    farm.sweep(["w1"])
    farm.claim("w0", 1, False, 9)
    farm.beat("w0")
    assert farm.client.scard("rq:worker:w0:executions") == len(farm.workers["w0"].hands)


def test_the_first_worker_hears_that_its_item_is_anothers(farm: Settlement) -> None:
    """P3: its beat extends nothing, and takes nothing from the second."""
    farm.claim("w0", 1, False, 9)
    farm.lose(0, "w1")
    farm.beat("w0")
    farm.all_is_well()
    assert (len(farm.workers["w0"].hands), len(farm.workers["w1"].hands)) == (0, 1)
    farm.emit(0, True, False)
    farm.emit(1, True, False)
    farm.emit(0, True, False)


def test_a_lease_left_over_takes_no_item_from_its_new_owner(farm: Settlement) -> None:
    """`rq empty` deleted the job of an item that was being played (its id was on the list a second time), and the producer restored it."""
    farm.claim("w0", 1, False, 9)
    farm.push_again(0, True)
    farm.empty()
    farm.restore(0)
    farm.claim("w1", 3, False, 9)
    farm._expire(f"{farm.executions[0][1].job_id}:{farm.executions[0][1].execution_id}")
    farm.sweep(["w2", "w1"])
    farm.all_is_well()
    farm.beat("w1")
    assert len(farm.workers["w1"].hands) == 3


def test_an_item_that_came_back_meanwhile_is_not_restored(farm: Settlement) -> None:
    """What the producer found lost is looked at again in the script: queued, leased and settled items are left alone."""
    restorer = Restorer(farm.client, run=RUN, pool=POOL)

    def put_back(seq: int) -> int:
        return restorer._put_back(
            seq, queued_job(make_item(RUN, seq), pool=POOL, group_timeout_s=5, client=farm.client)
        )

    assert put_back(0) == 0
    farm.claim("w0", 1, False, 9)
    assert put_back(0) == 0
    farm.emit(0, False, False)
    assert put_back(0) == 0
    assert put_back(3) == 0
    farm.all_is_well()


def test_a_consumer_that_came_before_the_run_reads_a_run_opened_anew(farm: Settlement) -> None:
    """It did not know which run it was reading, and took the items of the next one for repetitions."""
    farm.delete_run(0, False, False)
    farm.join(RUN, "trainer", "m0")
    for life in range(2):
        farm.open_run(RUN)
        farm.admit(RUN, 1, False)
        farm.claim("w0", 1, False, 9)
        farm.emit(life, False, False)
        if life:
            farm.join(RUN, "trainer", "m1")
        farm.read(0, "trainer", "m0")
        assert len(farm.members[RUN, "trainer", "m0"].holds) == life + 1
        if not life:
            farm.delete_run(0, False, False)


async def test_a_worker_stops_and_settles_what_an_operator_cancels(redis_url: str, client: redis.Redis) -> None:
    """One item at play, one on the queue: both are dead letters within a lease, the others are played, nothing is left."""
    keys = open_run(client, "r")
    names = enqueue(client, "r", 4)
    began, ended = asyncio.Event(), asyncio.Event()

    async def play(lease: Lease, item: RolloutItem) -> Outcome:
        if item.seq == 0:
            began.set()
            try:
                await asyncio.sleep(60)
            finally:
                ended.set()
        return emit_of(item)

    async with working(make_service(redis_url, ScriptedPlayer(play), slots=1)):
        await asyncio.wait_for(began.wait(), 10)
        for name in (names[0], names[3]):
            cancel_job(name, client, serializer=JSONSerializer)
        await asyncio.wait_for(ended.wait(), 10)
        await until(lambda: client.hlen(keys.dead) == 2 and client.xlen(keys.groups) == 2)
    check_oracle(client, "r")
    assert sorted(client.hkeys(keys.dead)) == [b"0", b"3"]


def _letters(farm: Settlement) -> list[bytes]:
    letters: Any = farm.client.hvals(RunKeys(RUN).dead)
    return list(letters)


def test_a_requeued_item_is_not_in_the_failed_registry(farm: Settlement) -> None:
    """RQ's own view agrees."""
    farm.claim("w0", 1, False, 9)
    farm.bury(0, False, "environment_error", False)
    assert FailedJobRegistry(queue=JSONQueue(POOL, connection=farm.client)).get_job_ids() == [job_id(RUN, 0)]
    farm.requeue(0)
    assert FailedJobRegistry(queue=JSONQueue(POOL, connection=farm.client)).get_job_ids() == []
