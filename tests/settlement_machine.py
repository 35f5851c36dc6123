"""The settlement machine: any order of the steps of delivery and of what operators and consumers do, on a real server, next to a model.

Invariant: after every step Redis is as the model says, each item is settled once or in one place, and at the end all come to their end.
"""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from rq.exceptions import InvalidJobOperation
from rq.job import Job
from rq.registry import FailedJobRegistry

from distaff import dead
from distaff.consumer import GroupConsumer
from distaff.keys import RunKeys
from distaff.policy import publish_policy_version
from distaff_worker.rq_schema import EXECUTIONS_PREFIX, JOB_PREFIX, SUSPENDED, JSONQueue
from tests.settlement_delivery import DeliverySteps
from tests.settlement_model import WINDOW
from tests.settlement_support import (
    CANCELED,
    COUNTS,
    GROUPS,
    KEYS,
    POOL,
    RUNS,
    STEPS,
    Member,
    Worker,
    nth,
    pick,
    some_group,
    some_member,
    some_run,
    step,
)


class Settlement(DeliverySteps, RuleBasedStateMachine):
    """See the module. `server` is set by whoever runs it."""

    @rule(data=st.data())
    def take_a_step(self, data: st.DataObject) -> None:
        ready = [step for step in STEPS if step.when(self)]
        name = data.draw(st.sampled_from([step.name for step in ready for _ in range(step.weight)]), label="step")
        [chosen] = [step for step in ready if step.name == name]
        getattr(self, name)(**data.draw(chosen.arguments, label="with"))

    @initialize()
    def begin(self) -> None:
        self.open_run(RUNS[0])
        self.admit(RUNS[0], 3, False)

    # -- the operator, and what else happens to Redis

    @step(weight=6, n=nth, when=lambda self: self.model.failed & self.model.jobs.keys())
    def requeue(self, n: int) -> None:
        """`rq requeue` of a dead letter."""
        name = pick(sorted(self.model.failed & self.model.jobs.keys()), n)
        registry = FailedJobRegistry(queue=JSONQueue(POOL, connection=self.client))
        registry.requeue(name)
        self.model.failed.discard(name)
        self.model.jobs[name].status = "queued"
        self.model.push(name)

    @step(
        weight=5,
        n=nth,
        m=nth,
        how=st.sampled_from(["retry", "drop", "race"]),
        when=lambda self: any(run.letters for run in self.model.runs.values()),
    )
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

    @step(weight=1, when=lambda self: self.model.queue)
    def empty(self) -> None:
        """`rq empty`."""
        JSONQueue(POOL, connection=self.client).empty()  # type: ignore[no-untyped-call]
        for name in self.model.queue:
            self.model.jobs.pop(name, None)
        self.model.queue.clear()

    @step(weight=1, n=nth, when=lambda self: self.model.jobs)
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

    @step(weight=3, n=nth, raced=st.booleans(), when=lambda self: self.model.jobs)
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

    @step(weight=2, n=nth, front=st.booleans(), when=lambda self: self.model.jobs)
    def push_again(self, n: int, front: bool) -> None:
        """An id twice on the list: an enqueue that was sent twice, a clumsy operator."""
        name = pick(sorted(self.model.jobs), n)
        (self.client.lpush if front else self.client.rpush)(KEYS.queue, name)
        self.model.push(name, front=front)

    @step(weight=1, name=st.sampled_from(["a-1", "a-0000000001", "a-99999999999", "b6a1b7a0", "a-000000001x"]))
    def push_foreign(self, name: str) -> None:
        """A job of somebody else, whose id may look like one of ours."""
        JSONQueue(POOL, connection=self.client).enqueue("os.getpid", job_id=name)
        self.model.foreign(name)

    @step(weight=1, what=st.sampled_from(["leases", "scripts", "resume", "resume", "suspend"]))
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

    @step(
        weight=1,
        n=nth,
        when=lambda self: any(job.status in ("finished", "failed", "stopped") for job in self.model.jobs.values()),
    )
    def forget_job(self, n: int) -> None:
        """The hash of a job that ended runs out."""
        ended = [name for name, job in self.model.jobs.items() if job.status in ("finished", "failed", "stopped")]
        name = pick(sorted(ended), n)
        self.client.delete(JOB_PREFIX + name)
        self.client.zrem(KEYS.failed, name)
        self.model.failed.discard(name)
        del self.model.jobs[name]

    @step(weight=1, run=some_run, version=st.integers(0, 9))
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

    @step(weight=1, run=some_run, group=some_group, member=some_member)
    def join(self, run: str, group: str, member: str) -> None:
        """A consumer may come before the run."""
        self._member(run, group, member).consumer.join()
        self.model.join(run, group)

    @step(
        weight=8,
        n=nth,
        group=some_group,
        member=some_member,
        when=lambda self: any(run.stream for run in self.model.runs.values()),
    )
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

    @step(
        weight=6,
        n=nth,
        m=nth,
        twice=st.booleans(),
        when=lambda self: any(member.holds for member in self.members.values()),
    )
    def acknowledge(self, n: int, m: int, twice: bool) -> None:
        run, group, name = pick(sorted(key for key, member in self.members.items() if member.holds), n)
        member = self.members[run, group, name]
        entry = pick(sorted(member.holds), m)
        delivery = member.holds[entry]
        for _ in range(1 + twice):
            assert member.consumer.ack(delivery) == self.model.acknowledge(run, group, entry)
        del member.holds[entry]

    @step(weight=1, n=nth, when=lambda self: self.members)
    def crash_consumer(self, n: int) -> None:
        del self.members[pick(sorted(self.members), n)]

    # -- what holds after every step

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
        for place, run in enumerate(sorted(self.model.runs)):
            self.restore(place)
            self.close_run(run, False)
        self.settle_canceled(["w1"])
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
