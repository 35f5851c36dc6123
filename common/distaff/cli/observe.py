"""Reads what runs, queues and workers are doing, for `distaff status`.

Invariant: read-only (stock `rq info` is not: it requeues and cleans up while it looks), and safe while everything is at work. RQ's key
names are written out here (RQ 3.0, with its own prefix variable): the command works without rq installed.
"""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import cast

import redis

from distaff.keys import RunKeys, parse_job_id, rq_prefix
from distaff.runs import RunState, list_runs, read_config_json, read_state

SCAN_COUNT = 500
MAX_DEAD_READ = 5_000
"""Dead letters looked at to count them by kind; there may be many and they hold whole items."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunView:
    """One run at one moment."""

    name: str
    pool: str
    mode: str
    status: str
    """ "open", "closed" (nothing more is admitted) or "ended" (and everything is settled)."""
    admitted: int
    target: int | None
    queued: int
    running: int
    settled: int
    emitted: int
    dead: int
    dead_by_kind: dict[str, int]
    retried: int
    lost: int
    rollouts: int
    samples: int
    tokens: int
    trained_tokens: int
    mean_reward: float | None
    window: int
    """Bound on what is queued, running or not yet acknowledged; 0 when unknown."""
    in_window: int
    unacknowledged: int
    policy_version: int | None
    seconds: float
    """Since the run was opened, to its last group if it has ended, else to now."""
    groups_per_s: float
    tokens_per_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerView:
    """One registered worker."""

    name: str
    pool: str
    host: str
    pid: int
    state: str
    ready: bool
    slots: int
    running: int
    heartbeat_age_s: float | None
    loop_lag_ms: float | None
    prefix_share: float | None
    """Of the worker's recent RL turns but first ones, those that extended the exact tokens before; None without any."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """Everything at one moment."""

    time: float
    """Unix seconds on the server's clock."""
    runs: list[RunView]
    pools: dict[str, int]
    """Pool -> jobs waiting on its queue, of all runs."""
    suspended: bool
    """`rq suspend` is in force: no worker takes anything."""
    workers: list[WorkerView]


def observe(client: redis.Redis, *, run: str | None = None, before: Snapshot | None = None) -> Snapshot:
    """Read it all; `run` limits it to one run and its pool. Rates are since `before`, or since the run was opened.

    Raises redis.RedisError.
    """
    now = server_time(client)
    names = [run] if run else list_runs(client)
    earlier = {view.name: view for view in before.runs} if before else {}
    span_s = now - before.time if before else 0.0
    runs = [view for name in names if (view := _run(client, name, now, earlier.get(name), span_s)) is not None]
    workers = _workers(client, now)
    if run:
        workers = [worker for worker in workers if worker.pool in {view.pool for view in runs}]
    pools = sorted({view.pool for view in runs} | {worker.pool for worker in workers})
    return Snapshot(
        time=now,
        runs=runs,
        pools={pool: _queue_length(client, pool) for pool in pools},
        suspended=bool(client.exists(f"{rq_prefix()}:suspended")),
        workers=workers,
    )


def server_time(client: redis.Redis) -> float:
    """Unix seconds on the server's clock, which leases and counters go by."""
    seconds, micros = client.time()
    return seconds + micros / 1e6


def _queue_length(client: redis.Redis, pool: str) -> int:
    return client.llen(f"{rq_prefix()}:queue:{pool}")


def _run(client: redis.Redis, name: str, now: float, earlier: RunView | None, span_s: float) -> RunView | None:
    state = read_state(client, name)
    if state is None:
        return None
    config = json.loads(read_config_json(client, name) or "{}")
    pool = str(config.get("run", {}).get("pool", "default"))
    running = _running(client, name, pool)
    unacknowledged = client.xlen(RunKeys(name).groups)
    seconds = max((_last_work(client, name, state) if state.ended else now) - state.opened, 0.001)
    since_s = span_s if earlier and span_s > 0 else seconds
    outstanding = max(state.admitted - state.settled, 0)
    return RunView(
        name=name,
        pool=pool,
        mode=str(config.get("run", {}).get("mode", "")),
        status="ended" if state.ended else state.status,
        admitted=state.admitted,
        target=state.target,
        queued=max(outstanding - running, 0),
        running=running,
        settled=state.settled,
        emitted=state.emitted,
        dead=state.dead,
        dead_by_kind=_dead_by_kind(client, name) if state.dead else {},
        retried=state.retried,
        lost=state.lost,
        rollouts=state.rollouts,
        samples=state.samples,
        tokens=state.tokens,
        trained_tokens=state.trained_tokens,
        mean_reward=state.reward_sum / state.reward_count if state.reward_count else None,
        window=int(config.get("producer", {}).get("window", 0)),
        in_window=outstanding + unacknowledged,
        unacknowledged=unacknowledged,
        policy_version=_policy_version(client, name),
        seconds=seconds,
        groups_per_s=_rate(state.emitted, earlier.emitted if earlier else 0, since_s),
        tokens_per_s=_rate(state.tokens, earlier.tokens if earlier else 0, since_s),
    )


def _last_work(client: redis.Redis, run: str, state: RunState) -> float:
    """When an ended run did its last: it closed, or its last group came. The stream remembers that also when the group is freed."""
    closed = state.closed or state.opened
    try:
        last = cast("dict[str, bytes]", client.xinfo_stream(RunKeys(run).groups))["last-generated-id"]
    except redis.exceptions.ResponseError:
        return closed
    return max(closed, int(last.partition(b"-")[0]) / 1000)


def _rate(count: int, before: int, seconds: float) -> float:
    return max(count - before, 0) / seconds


def _running(client: redis.Redis, run: str, pool: str) -> int:
    """Leased items of the run. Members of the registry are "<job id>:<execution id>"."""
    members = client.zscan_iter(f"{rq_prefix()}:wip:{pool}", match=f"{run}-*", count=SCAN_COUNT)
    parsed = (parse_job_id(member.decode().partition(":")[0]) for member, _ in members)
    return sum(1 for job in parsed if job is not None and job[0] == run)


def _dead_by_kind(client: redis.Redis, run: str) -> dict[str, int]:
    kinds: Counter[str] = Counter()
    for _, letter in client.hscan_iter(RunKeys(run).dead, count=SCAN_COUNT):
        kinds[str(json.loads(letter).get("kind", "unknown"))] += 1
        if kinds.total() >= MAX_DEAD_READ:
            break
    return dict(kinds.most_common())


def _policy_version(client: redis.Redis, run: str) -> int | None:
    version = cast("bytes | None", client.hget(RunKeys(run).policy, "version"))
    return None if version is None else int(version)


def _workers(client: redis.Redis, now: float) -> list[WorkerView]:
    keys = sorted(cast("set[bytes]", client.smembers(f"{rq_prefix()}:workers")))
    pipeline = client.pipeline(transaction=False)
    for key in keys:
        pipeline.hgetall(key)
    views = [_worker(key, fields, now) for key, fields in zip(keys, pipeline.execute(), strict=True) if fields]
    return sorted(views, key=lambda view: (view.pool, view.name))


def _worker(key: bytes, raw: dict[bytes, bytes], now: float) -> WorkerView:
    fields = {name.decode(): value.decode("utf-8", "replace") for name, value in raw.items()}
    return WorkerView(
        name=key.decode().removeprefix(f"{rq_prefix()}:worker:"),
        pool=fields.get("pool") or fields.get("queues", ""),
        host=fields.get("hostname", ""),
        pid=int(_number(fields.get("pid")) or 0),
        state=fields.get("state", ""),
        ready=fields.get("ready") == "1",
        slots=int(_number(fields.get("slots")) or 1),
        running=int(_number(fields.get("running")) or 0),
        heartbeat_age_s=_age(fields.get("last_heartbeat", ""), now),
        loop_lag_ms=_number(fields.get("loop_lag_ms")),
        prefix_share=_number(fields.get("prefix_share")),
    )


def _number(text: str | None) -> float | None:
    try:
        return None if text is None else float(text)
    except ValueError:
        return None


def _age(text: str, now: float) -> float | None:
    try:
        beat = datetime.fromisoformat(text.replace("Z", "+00:00"))
    except ValueError:
        return None
    beat = beat if beat.tzinfo else beat.replace(tzinfo=UTC)
    return max(now - beat.timestamp(), 0.0)
