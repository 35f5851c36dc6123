"""Any order of the steps of delivery, on a real server, next to a model: nothing is lost, nothing is doubled, nothing is stuck.

Leases run out without waiting: the score in the registry is put into the past and the execution key is deleted, which is what time does.
A lost reply is a step whose answer is thrown away and that is then sent again.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal, TypeVar

import pytest
import redis
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from rq.exceptions import InvalidJobOperation
from rq.job import Job
from rq.registry import FailedJobRegistry

from distaff import dead
from distaff.clients import connect
from distaff.config import RunConfig
from distaff.consumer import GroupConsumer
from distaff.consuming_steps import Delivery
from distaff.deletion import delete_run
from distaff.keys import RunKeys
from distaff.policy import publish_policy_version
from distaff.runs import read_state
from distaff.types import DeadLetter
from distaff.wire import encode_group
from distaff_producer.admit import Admission
from distaff_producer.restore import Restorer
from distaff_producer.rq_jobs import QueuedJob, queued_job
from distaff_worker.beat import Beater
from distaff_worker.canceled import CanceledItems
from distaff_worker.claim import Claimer, Suspended
from distaff_worker.leases import Counts, Lease
from distaff_worker.rq_schema import EXECUTION_PREFIX, EXECUTIONS_PREFIX, JOB_PREFIX, SUSPENDED, JSONQueue, PoolKeys
from distaff_worker.settle import Settler
from distaff_worker.sweep import Sweeper
from tests.group_support import make_group
from tests.redis_support import running_redis
from tests.settlement_model import WINDOW, Model
from tests.worker_support import make_item

POOL = "p"
KEYS = PoolKeys.of(POOL)
CANCELED = f"rq:canceled:{POOL}"
RUNS = ("a", "a-000000001")
"""The second name begins like a job id of the first."""
WORKERS, GROUPS, MEMBERS = ("w0", "w1", "w2"), ("trainer", "archive"), ("m0", "m1")
COUNTS = Counts(rollouts=2, samples=3, tokens=10, trained_tokens=4, reward_sum=0.5, reward_count=2)
LEASE_S = 3600.0
T = TypeVar("T")

some_run, some_worker = st.sampled_from(RUNS), st.sampled_from(WORKERS)
some_group, some_member = st.sampled_from(GROUPS), st.sampled_from(MEMBERS)
nth = st.integers(0, 30)


def config(run: str) -> RunConfig:
    sections: Any = {"run": {"name": run, "pool": POOL}, "producer": {"window": WINDOW}}
    return RunConfig(**sections)


def pick(values: list[T], n: int) -> T:
    return values[n % len(values)]


@dataclass
class Worker:
    """One worker's parts, and the leases it believes to have."""

    name: str
    claimer: Claimer
    settler: Settler
    sweeper: Sweeper
    canceled: CanceledItems
    beater: Beater = field(init=False)
    hands: dict[str, Lease] = field(default_factory=dict)
    heard: list[str] = field(default_factory=list)

    @classmethod
    def of(cls, client: redis.Redis, name: str) -> Worker:
        names: Any = {"pool": POOL, "worker": name, "worker_key": f"rq:worker:{name}"}
        worker = cls(
            name,
            claimer=Claimer(client, **names, lease_s=LEASE_S),
            settler=Settler(client, **names, give_up=lambda: True),
            sweeper=Sweeper(client, pool=POOL),
            canceled=CanceledItems(client, pool=POOL, worker=name),
        )
        worker.beater = Beater(
            client,
            pool=POOL,
            worker=name,
            lease_s=LEASE_S,
            beat_s=1.0,
            leases=lambda: list(worker.hands.values()),
            on_lost=lambda lease: worker.heard.append(lease.execution_id),
            on_end=lambda: None,
            announce=lambda: None,
            tick=lambda: 0.0,
        )
        return worker


@dataclass
class Member:
    """A member of a consumer group, and what it has not acknowledged."""

    consumer: GroupConsumer
    holds: dict[str, Delivery] = field(default_factory=dict)


class Settlement(RuleBasedStateMachine):
    """See the module."""

    server: redis.Redis

    def __init__(self) -> None:
        super().__init__()
        self.client = self.server
        self.client.flushall()
        self.client.config_set("maxmemory", 0)
        self.model = Model()
        self.workers = {name: Worker.of(self.client, name) for name in WORKERS}
        self.admissions = {run: Admission(self.client, config(run)) for run in RUNS}
        self.sent: dict[str, tuple[list[QueuedJob], int, bool]] = {}
        self.executions: list[tuple[Worker, Lease]] = []
        """Every lease there ever was: any of them may act at any time, as a zombie does."""
        self.members: dict[tuple[str, str, str], Member] = {}
        self.lives: list[str] = []

    # -- the producer

    @initialize()
    def begin(self) -> None:
        self.open_run(RUNS[0])
        self.admit(RUNS[0], 3, False)

    @rule(run=some_run)
    def open_run(self, run: str) -> None:
        """Opening a run that is open joins it."""
        opened = self.admissions[run].open(target=None)
        assert opened.created == (run not in self.model.runs)
        if opened.created:
            life: Any = self.client.hget(RunKeys(run).state, "opened")
            self.model.open(run, life.decode())
            self.lives.append(f"{run} {life.decode()}")
        known = self.model.runs[run]
        assert (opened.cursor, opened.closed) == (known.admitted, known.closed)

    @rule(run=some_run, count=st.integers(1, 4), front=st.booleans())
    def admit(self, run: str, count: int, front: bool) -> None:
        known = self.model.runs.get(run)
        self._send(run, known.admitted if known else 0, count, front)

    @precondition(lambda self: self.sent)
    @rule(n=nth)
    def admit_again(self, n: int) -> None:
        """The reply was lost, or it is another producer: the same batch once more."""
        run = pick(sorted(self.sent), n)
        jobs, expected, front = self.sent[run]
        self._admit(run, jobs, expected, front)

    def _send(self, run: str, expected: int, count: int, front: bool) -> None:
        items = [make_item(run, seq) for seq in range(expected, expected + count)]
        jobs = [
            queued_job(replace(item, priority=int(front)), pool=POOL, group_timeout_s=5, client=self.client)
            for item in items
        ]
        self._admit(run, jobs, expected, front)
        self.sent[run] = (jobs, expected, front)

    def _admit(self, run: str, jobs: list[QueuedJob], expected: int, front: bool) -> None:
        answer = self.admissions[run].admit(jobs, expected=expected, target=None)
        assert answer.status == self.model.admit(run, [job.id for job in jobs], expected=expected, front=front)
        known = self.model.runs.get(run)
        if known:
            assert answer.cursor == known.admitted
            if answer.status == "admitted":
                assert answer.room == WINDOW - known.standing >= 0

    @rule(run=some_run, late=st.booleans())
    def close_run(self, run: str, late: bool) -> None:
        known = self.model.runs.get(run)
        expected = (known.admitted if known else 0) - late
        assert self.admissions[run].close(expected=expected) == self.model.close(run, expected)

    @precondition(lambda self: self.model.runs)
    @rule(n=nth)
    def restore(self, n: int) -> None:
        """What the producer does from time to time."""
        run = pick(sorted(self.model.runs), n)
        assert self._restore(run) == self.model.restore(run)
        assert self._restore(run) == 0

    def _restore(self, run: str) -> int:
        state = read_state(self.client, run)
        assert state is not None
        return Restorer(self.client, run=run, pool=POOL).restore(
            state, lambda seq: queued_job(make_item(run, seq), pool=POOL, group_timeout_s=5, client=self.client)
        )

    @precondition(lambda self: self.model.runs)
    @rule(n=nth, half=st.booleans(), anew=st.booleans())
    def delete_run(self, n: int, half: bool, anew: bool) -> None:
        """half: whoever deletes it is killed after the first step, and jobs, leases and queue entries of it stay behind."""
        run = pick(sorted(self.model.runs), n)
        if half:
            keys = RunKeys(run)
            self.client.unlink(keys.state, keys.config, keys.settled, keys.dead, keys.groups, keys.policy)
            self.model.forget_run(run)
        else:
            assert delete_run(self.client, run, force=True)
            self.model.delete_run(run)
        if anew:
            self.open_run(run)

    # -- workers

    @rule(worker=some_worker, count=st.integers(1, 3), lost=st.sampled_from([False, False, False, True]), refuse=nth)
    def claim(self, worker: str, count: int, lost: bool, refuse: int) -> None:
        """lost: the reply never reaches the worker."""
        refused = [pick(self.lives, refuse)] if refuse < 4 and self.lives else []
        hands = self.workers[worker]
        suspects = sum(lease.suspect for lease in hands.hands.values())
        if self.model.suspended:
            with pytest.raises(Suspended):
                hands.claimer.claim(count, suspects=suspects, refused=refused)
            return
        leases = hands.claimer.claim(count, suspects=suspects, refused=refused)
        assert [lease.job_id for lease in leases] == self.model.claim(count, suspects=suspects, refused=refused)
        for lease in leases:
            self.model.lease(lease.job_id, lease.execution_id)
            self._check_lease(lease)
            if not lost:
                hands.hands[lease.execution_id] = lease
                self.executions.append((hands, lease))

    def _check_lease(self, lease: Lease) -> None:
        job, run = self.model.jobs[lease.job_id], lease.place[0]
        assert (lease.attempts, lease.lost) == (job.attempts, job.lost)
        if run:
            assert lease.life == self.model.runs[run].life
            assert lease.policy_version == self.model.policies.get(run, 0)

    @precondition(lambda self: self.model.keys or self.model.wip)
    @rule(worker=some_worker)
    def beat(self, worker: str) -> None:
        """The owner's leases are extended, the loser is told."""
        hands = self.workers[worker]
        hands.heard.clear()
        hands.beater.beat()
        ours = {name: self.model.beat(lease.job_id, lease.execution_id) for name, lease in hands.hands.items()}
        lost = [name for name, mine in ours.items() if not mine]
        assert sorted(hands.heard) == sorted(lost)
        for name in lost:
            del hands.hands[name]
        listed: Any = self.client.smembers(f"rq:worker:{worker}:executions")
        assert {f"{lease.job_id}:{name}" for name, lease in hands.hands.items()} <= {m.decode() for m in listed}
        if ours:  # a worker with nothing to beat for leaves its list to run out
            assert {member.decode() for member in listed} <= self.model.keys

    @precondition(lambda self: self.model.keys or self.model.wip)
    @rule(n=nth)
    def expire(self, n: int) -> None:
        """A lease runs out."""
        self._expire(pick(sorted({*self.model.keys, *self.model.wip}), n))

    def _expire(self, lease: str) -> None:
        self.client.zadd(KEYS.wip, {lease: 1}, xx=True)
        self.client.delete(EXECUTION_PREFIX + lease)
        self.model.keys.discard(lease)
        if lease in self.model.wip:
            self.model.wip[lease] = True

    @precondition(lambda self: self.model.wip)
    @rule(workers=st.lists(some_worker, min_size=1, max_size=2))
    def sweep(self, workers: list[str]) -> None:
        for worker in workers:
            assert self.workers[worker].sweeper.sweep() == len(self.model.sweep())

    @precondition(lambda self: self.model.canceled)
    @rule(workers=st.lists(some_worker, min_size=1, max_size=2))
    def settle_canceled(self, workers: list[str]) -> None:
        for worker in workers:
            assert self.workers[worker].canceled.settle() == len(self.model.settle_canceled())

    @precondition(lambda self: self.executions)
    @rule(n=nth, twice=st.booleans(), full=st.sampled_from([False, False, False, True]))
    def emit(self, n: int, twice: bool, full: bool) -> None:
        """Of any execution, at any time; twice: the first reply was lost; full: Redis has no memory at first."""
        worker, lease = pick(self.executions, n)
        run, seq = lease.place
        if not run:
            return
        fields = encode_group(make_group(run=run, seq=seq, mode="eval", rollouts=1, turns=1, messages=False))
        if full and not self.model.settle(lease.job_id, lease.execution_id):
            with self._full_redis(), pytest.raises(redis.exceptions.ResponseError, match=r"OOM|maxmemory"):
                worker.settler.emit(lease, fields, COUNTS)
        before = self._entries(run)
        answers = [worker.settler.emit(lease, fields, COUNTS) for _ in range(1 + twice)]
        after = [entry for entry in self._entries(run) if entry not in before]
        verdict = self.model.emit(lease.job_id, lease.execution_id)
        assert answers[0] == verdict
        assert len(after) == (verdict == "emitted")
        if after:
            self.model.appended(run, seq, after[0])
        self._end(worker, lease)
        if twice:
            assert answers[1] == self.model.emit(lease.job_id, lease.execution_id)

    @precondition(lambda self: self.executions)
    @rule(
        n=nth,
        twice=st.booleans(),
        kind=st.sampled_from(["environment_error", "dropped", "stopped"]),
        full=st.booleans(),
    )
    def bury(self, n: int, twice: bool, kind: str, full: bool) -> None:
        """A dead letter: a failure, a dropped group, an operator's stop."""
        worker, lease = pick(self.executions, n)
        status: Literal["failed", "stopped"] = "stopped" if kind == "stopped" else "failed"

        def bury() -> str:
            letter = _letter(lease, kind)
            return worker.settler.bury(lease, letter, text="why", status=status, dropped=kind == "dropped")

        if full and not self.model.settle(lease.job_id, lease.execution_id):
            with self._full_redis(), pytest.raises(redis.exceptions.ResponseError, match=r"OOM|maxmemory"):
                bury()
        for _ in range(1 + twice):
            assert bury() == self.model.bury(lease.job_id, lease.execution_id, kind=kind, status=status)
        self._end(worker, lease)

    @precondition(lambda self: self.executions)
    @rule(n=nth, twice=st.booleans(), reason=st.sampled_from(["handed_back", "retried"]))
    def release(self, n: int, twice: bool, reason: Literal["handed_back", "retried"]) -> None:
        worker, lease = pick(self.executions, n)
        for _ in range(1 + twice):
            answer = worker.settler.release(lease, reason)
            assert answer == self.model.release(lease.job_id, lease.execution_id, reason)
        self._end(worker, lease)

    @staticmethod
    def _end(worker: Worker, lease: Lease) -> None:
        worker.hands.pop(lease.execution_id, None)

    @contextlib.contextmanager
    def _full_redis(self) -> Iterator[None]:
        self.client.config_set("maxmemory", 1)
        try:
            yield
        finally:
            self.client.config_set("maxmemory", 0)

    # -- the operator, and what else happens to Redis

    @precondition(lambda self: self.model.failed & self.model.jobs.keys())
    @rule(n=nth)
    def requeue(self, n: int) -> None:
        """`rq requeue` of a dead letter."""
        name = pick(sorted(self.model.failed & self.model.jobs.keys()), n)
        registry = FailedJobRegistry(queue=JSONQueue(POOL, connection=self.client))
        registry.requeue(name)
        self.model.failed.discard(name)
        self.model.jobs[name].status = "queued"
        self.model.push(name)

    @precondition(lambda self: any(run.letters for run in self.model.runs.values()))
    @rule(n=nth, m=nth, how=st.sampled_from(["retry", "drop", "race"]))
    def dead_letter(self, n: int, m: int, how: str) -> None:
        """`distaff dead retry` and `distaff dead drop`; race: both, with the letter read before."""
        run = pick(sorted(name for name, run in self.model.runs.items() if run.letters), n)
        seq = pick(sorted(self.model.runs[run].letters), m)
        [[letter]] = dead.read(self.client, run, [seq])
        if how != "drop":
            assert dead.Retrier(self.client, run).retry(letter) == self.model.retry(run, seq)
            assert dead.Retrier(self.client, run).retry(letter) == self.model.retry(run, seq) == "underway"
        if how != "retry":
            assert dead.forget(self.client, run, [letter]) == (how == "drop")
        if how == "drop":
            self.model.drop(run, seq)

    @precondition(lambda self: self.model.queue)
    @rule()
    def empty(self) -> None:
        """`rq empty`."""
        JSONQueue(POOL, connection=self.client).empty()  # type: ignore[no-untyped-call]
        for name in self.model.queue:
            self.model.jobs.pop(name, None)
        self.model.queue.clear()

    @precondition(lambda self: self.model.jobs)
    @rule(n=nth)
    def delete_job(self, n: int) -> None:
        """RQ's Job.delete; it breaks off half way when an execution has run out, which is RQ's."""
        name = pick(sorted(self.model.jobs), n)
        executions: Any = self.client.zrange(EXECUTIONS_PREFIX + name, 0, -1)
        status = self.model.jobs[name].status
        self._take_first(name)
        {"failed": self.model.failed, "stopped": self.model.failed, "canceled": self.model.canceled}.get(
            status, set()
        ).discard(name)
        try:
            self._job(name).delete()
        except ValueError:
            if status == "started":
                return
            return
        del self.model.jobs[name]
        for execution in executions:
            self.model.end(name, execution.decode())

    @precondition(lambda self: self.model.jobs)
    @rule(n=nth, raced=st.booleans())
    def cancel(self, n: int, raced: bool) -> None:
        """RQ's Job.cancel; raced: a worker took or settled the item while it was under way, so that it cleaned up too little."""
        name = pick(sorted(self.model.jobs), n)
        job = self.model.jobs[name]
        if raced:
            self.client.hset(JOB_PREFIX + name, "status", "canceled")
            self.client.zadd(CANCELED, {name: 1})
        else:
            executions: Any = self.client.zrange(EXECUTIONS_PREFIX + name, 0, -1)
            try:
                self._job(name).cancel()
            except InvalidJobOperation:
                assert job.status == "canceled"
                return
            except ValueError:
                return
            self._take_first(name)
            self.model.failed.discard(name)
            for execution in executions if job.status == "started" else []:
                self.model.wip.pop(f"{name}:{execution.decode()}", None)
        job.status = "canceled"
        self.model.canceled.add(name)

    @precondition(lambda self: self.model.jobs)
    @rule(n=nth, front=st.booleans())
    def push_again(self, n: int, front: bool) -> None:
        """An id twice on the list: an enqueue that was sent twice, a clumsy operator."""
        name = pick(sorted(self.model.jobs), n)
        (self.client.lpush if front else self.client.rpush)(KEYS.queue, name)
        self.model.push(name, front=front)

    @rule(name=st.sampled_from(["a-1", "a-0000000001", "a-99999999999", "b6a1b7a0", "a-000000001x"]))
    def push_foreign(self, name: str) -> None:
        """A job of somebody else, whose id may look like one of ours."""
        JSONQueue(POOL, connection=self.client).enqueue("os.getpid", job_id=name)
        self.model.foreign(name)

    @rule(what=st.sampled_from(["leases", "scripts", "suspend", "resume"]))
    def wipe(self, what: str) -> None:
        """The registry of leases (`rq info` with a wrong clock), the script cache, `rq suspend` and `rq resume`."""
        match what:
            case "leases":
                self.client.delete(KEYS.wip)
                self.model.wip.clear()
            case "scripts":
                self.client.script_flush()
            case _:
                self.model.suspended = what == "suspend"
                self.client.set(SUSPENDED, 1) if self.model.suspended else self.client.delete(SUSPENDED)

    @precondition(lambda self: any(job.status in ("finished", "failed", "stopped") for job in self.model.jobs.values()))
    @rule(n=nth)
    def forget_job(self, n: int) -> None:
        """The hash of a job that ended runs out."""
        ended = [name for name, job in self.model.jobs.items() if job.status in ("finished", "failed", "stopped")]
        name = pick(sorted(ended), n)
        self.client.delete(JOB_PREFIX + name)
        self.client.zrem(KEYS.failed, name)
        self.model.failed.discard(name)
        del self.model.jobs[name]

    @rule(run=some_run, version=st.integers(0, 9))
    def publish(self, run: str, version: int) -> None:
        known = self.model.policies.get(run, 0)
        assert publish_policy_version(self.client, run, version) == (version >= known)
        self.model.policies[run] = max(version, known)

    def _job(self, name: str) -> Job:
        return Job.fetch(name, connection=self.client, serializer="json")

    def _take_first(self, name: str) -> None:
        if name in self.model.queue:
            self.model.queue.remove(name)

    # -- consumers

    def _member(self, run: str, group: str, member: str) -> Member:
        found = self.members.get((run, group, member))
        if found is None:
            consumer = GroupConsumer(
                run, self.client, group=group, consumer=member, batch=1, block_s=0.01, max_deliveries=1000
            )
            found = self.members[run, group, member] = Member(consumer)
        return found

    @rule(run=some_run, group=some_group, member=some_member)
    def join(self, run: str, group: str, member: str) -> None:
        """A consumer may come before the run."""
        self._member(run, group, member).consumer.join()
        self.model.join(run, group)

    @precondition(lambda self: any(run.stream for run in self.model.runs.values()))
    @rule(n=nth, group=some_group, member=some_member)
    def read(self, n: int, group: str, member: str) -> None:
        run = pick(sorted(name for name, run in self.model.runs.items() if run.stream), n)
        reader = self._member(run, group, member)
        expected = self.model.read(run, group, member, holds=reader.holds)
        if expected is None:
            return
        delivery = next(reader.consumer)
        assert delivery.entry_id == expected
        assert delivery.group.run == run
        assert self.model.runs[run].emitted[delivery.group.seq] == expected
        reader.holds[expected] = delivery

    @precondition(lambda self: any(member.holds for member in self.members.values()))
    @rule(n=nth, m=nth, twice=st.booleans())
    def acknowledge(self, n: int, m: int, twice: bool) -> None:
        run, group, name = pick(sorted(key for key, member in self.members.items() if member.holds), n)
        member = self.members[run, group, name]
        entry = pick(sorted(member.holds), m)
        delivery = member.holds[entry]
        for _ in range(1 + twice):
            assert member.consumer.ack(delivery) == self.model.acknowledge(run, group, entry)
        del member.holds[entry]

    @precondition(lambda self: self.members)
    @rule(n=nth)
    def crash_consumer(self, n: int) -> None:
        del self.members[pick(sorted(self.members), n)]

    # -- what holds after every step

    def _entries(self, run: str) -> list[str]:
        entries: Any = self.client.xrange(RunKeys(run).groups)
        return [entry.decode() for entry, _ in entries]

    @invariant()
    def all_is_well(self) -> None:
        self._redis_is_as_the_model_says()
        self._every_item_is_settled_once_or_in_one_place()
        self._what_is_unread_or_unacknowledged_is_there()

    def _redis_is_as_the_model_says(self) -> None:
        queue: Any = self.client.lrange(KEYS.queue, 0, -1)
        wip: Any = self.client.zrange(KEYS.wip, 0, -1)
        failed: Any = self.client.zrange(KEYS.failed, 0, -1)
        assert [name.decode() for name in queue] == self.model.queue
        assert {lease.decode() for lease in wip} == set(self.model.wip)
        assert {name.decode() for name in failed} == self.model.failed
        pipeline = self.client.pipeline(transaction=False)
        for name in self.model.jobs:
            pipeline.hmget(JOB_PREFIX + name, "status", "distaff_exec", "distaff_attempts", "distaff_lost")
        for job, (status, holder, attempts, lost) in zip(self.model.jobs.values(), pipeline.execute(), strict=True):
            assert (status or b"").decode() == job.status
            assert job.status != "started" or holder.decode() == job.holder
            assert (int(attempts or 0), int(lost or 0)) == (job.attempts, job.lost)

    def _every_item_is_settled_once_or_in_one_place(self) -> None:
        for run, known in self.model.runs.items():
            keys = RunKeys(run)
            state: Any = self.client.hgetall(keys.state)
            letters: Any = self.client.hkeys(keys.dead)
            bits = bytes(self.client.get(keys.settled) or b"")  # type: ignore[arg-type]
            settled = {at * 8 + bit for at, byte in enumerate(bits) for bit in range(8) if byte & 128 >> bit}
            assert {int(seq) for seq in letters} == set(known.letters)
            assert not set(known.letters) & set(known.emitted)
            assert not set(known.forgotten) & (set(known.emitted) | set(known.letters))
            assert settled == {*known.letters, *known.emitted, *known.forgotten} <= set(range(known.admitted))
            counted = {name: int(state.get(name.encode(), 0)) for name in ("admitted", "emitted", "dead", "dropped")}
            assert counted == {
                "admitted": known.admitted,
                "emitted": len(known.emitted),
                "dead": known.dead,
                "dropped": sum(kind == "dropped" for kind in (*known.letters.values(), *known.forgotten.values())),
            }
            assert {name: int(state.get(name.encode(), 0)) for name in known.counters} == known.counters
            assert int(state.get(b"tokens", 0)) == COUNTS.tokens * len(known.emitted)
            assert self._entries(run) == known.stream
            assert known.standing <= WINDOW + known.revived

    def _what_is_unread_or_unacknowledged_is_there(self) -> None:
        for run, groups in self.model.groups.items():
            rows: Any = self.client.xinfo_groups(RunKeys(run).groups)
            assert {row["name"].decode(): row["pending"] for row in rows} == {
                name: len(readers.delivered) for name, readers in groups.items()
            }

    def teardown(self) -> None:
        """One honest worker, one producer and all consumers bring everything to its end."""
        self.client.config_set("maxmemory", 0)
        self.wipe("resume")
        for lease in sorted({*self.model.keys, *self.model.wip}):
            self._expire(lease)
        self.sweep(["w0"])
        self.settle_canceled(["w1"])
        for place, run in enumerate(sorted(self.model.runs)):
            self.restore(place)
            self.close_run(run, False)
        self._work_to_the_end(self.workers["w2"])
        self.all_is_well()
        for known in self.model.runs.values():
            assert len(known.emitted) + known.dead == known.admitted
        assert (self.client.llen(KEYS.queue), self.client.zcard(KEYS.wip)) == (0, 0)
        for run in self.model.runs:
            for group in GROUPS:
                self._read_to_the_end(run, group)
            assert self.client.xlen(RunKeys(run).groups) == 0

    def _work_to_the_end(self, honest: Worker) -> None:
        honest.hands.clear()
        while self.model.queue:
            self.claim(honest.name, 3, False, 30)
            for number, (worker, mine) in enumerate(self.executions):
                if worker is honest and mine.execution_id in honest.hands and mine.place[0]:
                    self.emit(number, False, False)
                elif worker is honest and mine.execution_id in honest.hands:
                    self.bury(number, False, "environment_error", False)

    def _read_to_the_end(self, run: str, group: str) -> None:
        with GroupConsumer(run, self.client, group=group, consumer="last", block_s=0.01, claim_idle_s=0.001) as last:
            for delivery in last:
                last.ack(delivery)


def _letter(lease: Lease, kind: str) -> str:
    run, seq = lease.place
    values: Any = {"item": make_item(run, seq), "kind": kind, "boundary": "reward", "message": "why"}
    return json.dumps(asdict(DeadLetter(**values, attempts=1, first=lease.first, last=lease.first, worker="w")))


def play(examples: int, steps: int) -> None:
    with running_redis() as url, connect(url) as client:
        Settlement.server = client
        run_state_machine_as_test(
            Settlement,
            settings=settings(
                max_examples=examples,
                stateful_step_count=steps,
                deadline=None,
                print_blob=True,
                suppress_health_check=list(HealthCheck),
            ),
        )


def test_any_order_of_steps_settles_every_item_once() -> None:
    """P1, P2, P3, P5, P9: every step of delivery and everything an operator may do to it, against the model."""
    play(examples=60, steps=40)


@pytest.mark.exhaustive
@pytest.mark.timeout(3600)
def test_very_many_orders_of_steps_settle_every_item_once() -> None:
    """As above, for half an hour."""
    play(examples=3000, steps=80)
