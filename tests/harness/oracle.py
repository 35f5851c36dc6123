"""The oracle every fault test ends with: what was admitted is settled exactly once, whole, and nothing is left behind.

Invariant: a run that passes has lost, doubled and stuck nothing. Reads only; never repairs and never waits, so a caller waits for its
event first.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import redis

from distaff.keys import RunKeys, job_id
from distaff.types import ScoredGroup
from distaff.wire import check_group, decode_group
from distaff_worker.rq_schema import EXECUTION_PREFIX, EXECUTIONS_PREFIX, JOB_PREFIX, PoolKeys

POOL = "default"


@dataclass(frozen=True, slots=True, kw_only=True)
class Settled:
    """What became of the items of a run."""

    emitted: list[int]
    """In the order of their seq."""
    dead: list[int]

    def __len__(self) -> int:
        return len(self.emitted) + len(self.dead)


def check(client: redis.Redis, run: str, *, pool: str = POOL, consumed: Iterable[ScoredGroup] | None = None) -> Settled:
    """Everything of `check_settled`, and each group of the stream decodes, fits together, and trains each sampled token once.

    consumed: the groups consumers got, where they have acknowledged them; the stream is then to be empty.
    """
    entries: Any = client.xrange(RunKeys(run).groups)
    groups = [decode_group(fields) for _, fields in entries]
    if consumed is not None:
        assert not groups, f"{len(groups)} groups of run {run} were never acknowledged"
        groups = list(consumed)
    for group in groups:
        check_whole(group)
    return check_settled(client, run, pool=pool, emitted=[group.seq for group in groups])


def check_settled(client: redis.Redis, run: str, *, pool: str = POOL, emitted: Iterable[int] | None = None) -> Settled:
    """Everything admitted is settled exactly once, the counters say so too, and no queue entry, lease or started job is left.

    emitted: numbers of the groups that were delivered; those of the stream's entries unless given. Does not look into the groups.
    """
    keys = RunKeys(run)
    state: Any = client.hgetall(keys.state)
    admitted = int(state.get(b"admitted", 0))
    if emitted is None:
        entries: Any = client.xrange(keys.groups)
        emitted = [int(fields[b"seq"]) for _, fields in entries]
    emitted = sorted(emitted)
    dead = sorted(int(seq) for seq in client.hkeys(keys.dead))
    _check_once(run, admitted, emitted, dead)
    assert client.bitcount(keys.settled) == admitted, f"run {run}: not every settled bit is set, or one too many"
    assert int(state.get(b"emitted", 0)) == len(emitted), f"run {run}: the counter of emitted groups is wrong"
    assert int(state.get(b"dead", 0)) == len(dead), f"run {run}: the counter of dead letters is wrong"
    check_nothing_left(client, pool=pool, runs=[run])
    return Settled(emitted=emitted, dead=dead)


def check_nothing_left(client: redis.Redis, *, pool: str = POOL, runs: Iterable[str] = ()) -> None:
    """No entry of the pool's queue, no lease, no execution, no entry on its way; no job of `runs` that says it is queued or started."""
    pool_keys = PoolKeys.of(pool)
    left = {
        "queued": client.lrange(pool_keys.queue, 0, 9),
        "leased": client.zrange(pool_keys.wip, 0, 9),
        "intermediate": client.lrange(f"{pool_keys.queue}:intermediate", 0, 9),
        "executions": [
            key
            for run in runs
            for prefix in (EXECUTION_PREFIX, EXECUTIONS_PREFIX)
            for key in client.scan_iter(f"{prefix}{run}-*", count=1000)
        ],
        "jobs": [job for run in runs for job in _unfinished(client, run)],
    }
    found = {name: keys for name, keys in left.items() if keys}
    assert not found, f"left behind: {found}"


def check_whole(group: ScoredGroup) -> None:
    """The arrays of a group fit each other, and each token that was sampled in a rollout with a reward is trained exactly once."""
    check_group(group)
    assert len(group.rollouts) > 0, group.group_id
    if group.mode != "rl":
        return
    trained = Counter[int]()
    for sample in group.samples:
        trained[sample.rollout] += int(np.count_nonzero(sample.loss_mask))
    for rollout in group.rollouts:
        sampled = rollout.completion_tokens if rollout.reward is not None else 0
        assert trained[rollout.index] == sampled, (
            f"{group.group_id}: rollout {rollout.index} sampled {sampled} tokens and trains {trained[rollout.index]}"
        )


def _check_once(run: str, admitted: int, emitted: list[int], dead: list[int]) -> None:
    times = Counter([*emitted, *dead])
    wrong = {
        "doubled": sorted(seq for seq, count in times.items() if count > 1),
        "lost": sorted(set(range(admitted)) - times.keys()),
        "never admitted": sorted(times.keys() - set(range(admitted))),
    }
    found = ", ".join(f"{_few(run, seqs)} {name}" for name, seqs in wrong.items() if seqs)
    assert not found, f"run {run}, {admitted} items admitted: {found}"


def _few(run: str, seqs: list[int]) -> str:
    return f"{len(seqs)}" + (f" ({', '.join(job_id(run, seq) for seq in seqs[:10])})" if seqs else "")


def _unfinished(client: redis.Redis, run: str) -> list[tuple[bytes, bytes]]:
    jobs = list(client.scan_iter(f"{JOB_PREFIX}{run}-*", count=1000))
    with client.pipeline(transaction=False) as pipeline:
        for job in jobs:
            pipeline.hget(job, "status")
        statuses = pipeline.execute()
    return [(job, status) for job, status in zip(jobs, statuses, strict=True) if status in (b"queued", b"started")]
