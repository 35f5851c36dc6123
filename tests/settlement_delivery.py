"""The steps of the settlement machine that producers and workers take, each held against the model.

A lost reply is a step whose answer is thrown away and that is then sent again. Leases run out without waiting: the score in the registry
is put into the past and the execution key is deleted, which is what time does.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, Literal

import pytest
import redis
from hypothesis import strategies as st

from distaff.deletion import delete_run
from distaff.keys import RunKeys
from distaff.runs import read_state
from distaff.wire import encode_group
from distaff_producer.admit import Admission
from distaff_producer.restore import Restorer
from distaff_producer.rq_jobs import QueuedJob, queued_job
from distaff_worker.claim import Suspended
from distaff_worker.leases import Lease
from distaff_worker.rq_schema import EXECUTION_PREFIX
from tests.group_support import make_group
from tests.settlement_model import WINDOW, Model
from tests.settlement_support import (
    COUNTS,
    KEYS,
    POOL,
    RUNS,
    WORKERS,
    Member,
    Worker,
    config,
    letter_of,
    nth,
    of_them,
    pick,
    some_run,
    some_worker,
    step,
)
from tests.worker_support import make_item


class DeliverySteps:
    """Steps of producers and workers; a method is one step, and asserts that it answers as the model says."""

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

    @step(weight=2, run=some_run)
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

    @step(weight=10, run=some_run, count=st.integers(1, 4), front=st.booleans())
    def admit(self, run: str, count: int, front: bool) -> None:
        known = self.model.runs.get(run)
        self._send(run, known.admitted if known else 0, count, front)

    @step(weight=3, n=nth, when=lambda self: self.sent)
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

    @step(weight=1, run=some_run, late=st.sampled_from([True, True, False]))
    def close_run(self, run: str, late: bool) -> None:
        known = self.model.runs.get(run)
        expected = (known.admitted if known else 0) - late
        assert self.admissions[run].close(expected=expected) == self.model.close(run, expected)

    @step(weight=4, n=nth, when=lambda self: self.model.runs)
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

    @step(
        weight=1,
        n=nth,
        half=st.booleans(),
        anew=st.sampled_from([True, True, True, False]),
        when=lambda self: self.model.runs,
    )
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

    @step(
        weight=10,
        worker=some_worker,
        count=st.integers(1, 3),
        lost=st.sampled_from([False, False, False, True]),
        refuse=nth,
    )
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

    @step(weight=8, worker=some_worker, when=lambda self: self.model.keys or self.model.wip)
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

    @step(weight=2, n=of_them, when=lambda self: self.model.keys or self.model.wip)
    def expire(self, n: int) -> None:
        """A lease runs out."""
        self._expire(pick(sorted({*self.model.keys, *self.model.wip}, key=self.model.order.__getitem__), n))

    def _expire(self, lease: str) -> None:
        self.client.zadd(KEYS.wip, {lease: 1}, xx=True)
        self.client.delete(EXECUTION_PREFIX + lease)
        self.model.keys.discard(lease)
        if lease in self.model.wip:
            self.model.wip[lease] = True

    @step(weight=10, n=of_them, worker=some_worker, when=lambda self: self.executions)
    def lose(self, n: int, worker: str) -> None:
        """The way most items come to be played twice: the lease runs out, another worker has the item; the first one lives on."""
        lease = f"{pick(self.executions, n)[1].job_id}:{pick(self.executions, n)[1].execution_id}"
        if lease in self.model.wip:
            self._expire(lease)
            self.sweep([worker])
            self.claim(worker, 1, False, 30)

    @step(
        weight=10,
        worker=some_worker,
        kind=st.sampled_from(["", "", "environment_error", "dropped"]),
        when=lambda self: self.model.queue and not self.model.suspended,
    )
    def play(self, worker: str, kind: str) -> None:
        """What happens most of the time: one item from the queue to its end."""
        known = len(self.executions)
        self.claim(worker, 1, False, 30)
        if len(self.executions) > known:
            own = bool(self.executions[-1][1].place[0])
            if kind or not own:
                self.bury(len(self.executions) - 1, False, kind or "environment_error", False)
            else:
                self.emit(len(self.executions) - 1, False, False)

    @step(weight=3, workers=st.lists(some_worker, min_size=1, max_size=2), when=lambda self: self.model.wip)
    def sweep(self, workers: list[str]) -> None:
        for worker in workers:
            assert self.workers[worker].sweeper.sweep() == len(self.model.sweep())

    @step(weight=4, workers=st.lists(some_worker, min_size=1, max_size=2), when=lambda self: self.model.canceled)
    def settle_canceled(self, workers: list[str]) -> None:
        for worker in workers:
            assert self.workers[worker].canceled.settle() == len(self.model.settle_canceled())

    @step(
        weight=14,
        n=of_them,
        twice=st.booleans(),
        full=st.sampled_from([False, False, False, True]),
        when=lambda self: self.executions,
    )
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

    @step(
        weight=6,
        n=of_them,
        twice=st.booleans(),
        kind=st.sampled_from(["environment_error", "dropped", "stopped"]),
        full=st.booleans(),
        when=lambda self: self.executions,
    )
    def bury(self, n: int, twice: bool, kind: str, full: bool) -> None:
        """A dead letter: a failure, a dropped group, an operator's stop."""
        worker, lease = pick(self.executions, n)
        status: Literal["failed", "stopped"] = "stopped" if kind == "stopped" else "failed"

        def bury() -> str:
            letter = letter_of(lease, kind)
            return worker.settler.bury(lease, letter, text="why", status=status, dropped=kind == "dropped")

        if full and not self.model.settle(lease.job_id, lease.execution_id):
            with self._full_redis(), pytest.raises(redis.exceptions.ResponseError, match=r"OOM|maxmemory"):
                bury()
        for _ in range(1 + twice):
            assert bury() == self.model.bury(lease.job_id, lease.execution_id, kind=kind, status=status)
        self._end(worker, lease)

    @step(
        weight=5,
        n=of_them,
        twice=st.booleans(),
        reason=st.sampled_from(["handed_back", "retried"]),
        when=lambda self: self.executions,
    )
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

    def _entries(self, run: str) -> list[str]:
        entries: Any = self.client.xrange(RunKeys(run).groups)
        return [entry.decode() for entry, _ in entries]
