"""The oracle itself: each way a farm may go wrong is one it does not pass."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import redis
from rq.registry import StartedJobRegistry

from distaff.keys import RunKeys, job_id
from distaff.types import SampleArrays, ScoredGroup
from distaff.wire import encode_group
from distaff_worker.claim import Claimer
from distaff_worker.leases import Counts
from distaff_worker.rq_schema import JOB_PREFIX, JSONQueue, PoolKeys
from distaff_worker.settle import Settler
from tests.group_support import make_group
from tests.harness.oracle import check, check_whole
from tests.worker_support import POOL, enqueue, open_run, wait_until

RUN = "run"


def play(client: redis.Redis, *, seqs: int = 3) -> None:
    """A run of `seqs` groups and one dead letter, as workers leave it."""
    open_run(client, RUN)
    enqueue(client, RUN, seqs + 1)
    claimer = Claimer(client, pool=POOL, worker="w", worker_key="rq:worker:w", lease_s=5)
    settler = Settler(client, pool=POOL, worker="w", worker_key="rq:worker:w")
    *leases, last = claimer.claim(seqs + 1)
    for lease in leases:
        group = whole_group(lease.place[1])
        assert settler.emit(lease, encode_group(group), _counts()) == "emitted"
    assert settler.bury(last, '{"kind": "timeout"}', text="late") == "buried"


def whole_group(seq: int) -> ScoredGroup:
    """A group whose rollouts say how many tokens they sampled."""
    group = make_group(run=RUN, seq=seq, rollouts=2, tokens=16)
    trained = [int(np.count_nonzero(sample.loss_mask)) for sample in group.samples]
    rollouts = [replace(r, completion_tokens=n) for r, n in zip(group.rollouts, trained, strict=True)]
    return replace(group, rollouts=rollouts)


def _counts() -> Counts:
    return Counts(rollouts=2, samples=2, tokens=32, trained_tokens=16, reward_sum=1.0, reward_count=2)


def emit_twice(client: redis.Redis) -> None:
    client.xadd(RunKeys(RUN).groups, encode_group(whole_group(1)))
    client.hincrby(RunKeys(RUN).state, "emitted", 1)


def lose_an_entry(client: redis.Redis) -> None:
    entries: Any = client.xrange(RunKeys(RUN).groups, count=1)
    client.xdel(RunKeys(RUN).groups, entries[0][0])


def settle_what_nobody_admitted(client: redis.Redis) -> None:
    client.xadd(RunKeys(RUN).groups, encode_group(whole_group(9)))


def bury_what_was_emitted(client: redis.Redis) -> None:
    client.hset(RunKeys(RUN).dead, "0", "{}")


def forget_a_bit(client: redis.Redis) -> None:
    client.setbit(RunKeys(RUN).settled, 0, 0)


def leave_on_the_queue(client: redis.Redis) -> None:
    client.rpush(PoolKeys.of(POOL).queue, job_id(RUN, 0))


def leave_a_lease(client: redis.Redis) -> None:
    client.zadd(PoolKeys.of(POOL).wip, {f"{job_id(RUN, 0)}:x": 1})


def leave_on_its_way(client: redis.Redis) -> None:
    client.rpush(f"{PoolKeys.of(POOL).queue}:intermediate", job_id(RUN, 0))


def leave_an_execution(client: redis.Redis) -> None:
    client.hset(f"rq:execution:{job_id(RUN, 0)}:x", "id", "x")


def leave_a_started_job(client: redis.Redis) -> None:
    client.hset(f"{JOB_PREFIX}{job_id(RUN, 0)}", "status", "started")


def miscount(client: redis.Redis) -> None:
    client.hincrby(RunKeys(RUN).state, "dead", 1)


FAULTS: dict[Callable[[redis.Redis], None], str] = {
    emit_twice: "1 \\(run-000000001\\) doubled",
    lose_an_entry: "1 \\(run-000000000\\) lost",
    settle_what_nobody_admitted: "1 \\(run-000000009\\) never admitted",
    bury_what_was_emitted: "doubled",
    forget_a_bit: "settled bit",
    leave_on_the_queue: "queued",
    leave_a_lease: "leased",
    leave_on_its_way: "intermediate",
    leave_an_execution: "executions",
    leave_a_started_job: "jobs",
    miscount: "counter",
}


def test_a_run_as_workers_leave_it_passes(client: redis.Redis) -> None:
    """Three groups and a dead letter: and the oracle says so."""
    play(client)
    settled = check(client, RUN)
    assert (settled.emitted, settled.dead, len(settled)) == ([0, 1, 2], [3], 4)


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_what_a_broken_farm_leaves_does_not_pass(client: redis.Redis, fault: Callable[[redis.Redis], None]) -> None:
    """A check that cannot fail is a defect."""
    play(client)
    fault(client)
    with pytest.raises(AssertionError, match=FAULTS[fault]):
        check(client, RUN)


def test_groups_that_were_consumed_are_judged_by_what_consumers_got(client: redis.Redis) -> None:
    """The stream is empty by then; a group that nobody got is lost, and one that is still there was not acknowledged."""
    play(client)
    groups = [whole_group(seq) for seq in range(3)]
    with pytest.raises(AssertionError, match="never acknowledged"):
        check(client, RUN, consumed=groups)
    client.xtrim(RunKeys(RUN).groups, 0)
    assert check(client, RUN, consumed=groups).emitted == [0, 1, 2]
    with pytest.raises(AssertionError, match="lost"):
        check(client, RUN, consumed=groups[1:])


def test_a_token_trained_twice_or_never_does_not_pass() -> None:
    """The mask has one place for each sampled token of a rollout, over all its samples."""
    group = whole_group(0)
    check_whole(group)
    samples = list(group.samples)
    doubled = SampleArrays.concatenate([*samples, replace(samples[0], branch=1)], with_logprobs=True)
    for arrays in (doubled, SampleArrays.concatenate(samples[1:], with_logprobs=True)):
        with pytest.raises(AssertionError, match=r"rollout 0 sampled 8 tokens and trains (16|0)"):
            check_whole(replace(group, samples=arrays))


@pytest.mark.parametrize("ends", ["emitted", "buried"])
def test_nothing_is_left_of_an_execution_that_rqs_own_clean_up_ended(client: redis.Redis, ends: str) -> None:
    """`rq info` puts a dead worker's item back by itself, and leaves the execution in the job's list: settling the item removes it."""
    open_run(client, RUN)
    enqueue(client, RUN, 1)
    dead, alive = (Claimer(client, pool=POOL, worker=w, worker_key=f"rq:worker:{w}", lease_s=0.05) for w in ("d", "a"))
    dead.claim(1)
    wait_until(lambda: StartedJobRegistry(queue=JSONQueue(POOL, connection=client)).get_expired_job_ids())
    StartedJobRegistry(queue=JSONQueue(POOL, connection=client)).cleanup()
    [lease] = alive.claim(1)
    settler = Settler(client, pool=POOL, worker="a", worker_key="rq:worker:a")
    if ends == "emitted":
        assert settler.emit(lease, encode_group(whole_group(0)), _counts()) == ends
    else:
        assert settler.bury(lease, '{"kind": "timeout"}', text="late") == ends
    assert len(check(client, RUN)) == 1
