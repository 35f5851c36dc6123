"""Jobs per second of one worker process: ours with 64 slots against the stock `rq worker`, which forks for each job.

Counted between the 10th and the last percent of the jobs, as RQ's own registry of finished jobs shows them. Ours settles each
with a scored group on the stream; the stock worker's jobs return None.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from statistics import median

import redis
from rq import Queue
from tests.redis_support import running_redis
from tests.worker_support import POOL, enqueue, open_run

from benchmarks.processes import role
from benchmarks.results import Figure
from benchmarks.roles import stock_jobs
from distaff.clients import connect

ROUNDS = 2
NAP_S = 0.05
NOTHING_GOAL, NAP_GOAL = 10.0, 40.0
STOCK_JOBS, OUR_JOBS = (200, 60), (3000, 3000)
FINISHED = f"rq:finished:{POOL}"


def run() -> Sequence[Figure]:
    rates: list[tuple[float, float, float, float]] = [
        (
            _stock(stock_jobs.nothing, STOCK_JOBS[0]),
            _ours(0.0, OUR_JOBS[0]),
            _stock(stock_jobs.nap, STOCK_JOBS[1]),
            _ours(NAP_S, OUR_JOBS[1]),
        )
        for _ in range(ROUNDS)
    ]
    nothing = median(ours / stock for stock, ours, _, _ in rates)
    nap = median(ours / stock for _, _, stock, ours in rates)
    columns = [median(column) for column in zip(*rates, strict=True)]
    return [
        Figure(
            what="no-op jobs, ours : rq worker",
            goal=f">= {NOTHING_GOAL:g}",
            result=f"{nothing:.1f}",
            met=nothing >= NOTHING_GOAL,
        ),
        Figure(what="50 ms jobs, ours : rq worker", goal=f">= {NAP_GOAL:g}", result=f"{nap:.1f}", met=nap >= NAP_GOAL),
        Figure(what="no-op jobs/s, ours", result=f"{columns[1]:.0f}"),
        Figure(what="no-op jobs/s, rq worker", result=f"{columns[0]:.0f}"),
        Figure(what="50 ms jobs/s, ours (64 slots: at most 1280)", result=f"{columns[3]:.0f}"),
        Figure(what="50 ms jobs/s, rq worker (at most 20)", result=f"{columns[2]:.1f}"),
    ]


def _stock(function: Callable[[], None], count: int) -> float:
    with _client() as (client, url):
        queue = Queue(POOL, connection=client)
        queue.enqueue_many([Queue.prepare_data(function, result_ttl=600) for _ in range(count)])
        with role("", "worker", POOL, "--url", url, "--quiet", program="rq.cli"):
            return _rate(client, count)


def _ours(nap_s: float, count: int) -> float:
    with _client() as (client, url):
        open_run(client, "run")
        enqueue(client, "run", count)
        with role("job_worker", url, nap_s):
            return _rate(client, count)


@contextmanager
def _client() -> Iterator[tuple[redis.Redis, str]]:
    with running_redis() as url, connect(url) as client:
        yield client, url


def _rate(client: redis.Redis, count: int, *, seconds: float = 120.0) -> float:
    """Jobs per second from a tenth of them to the last."""
    deadline = time.monotonic() + seconds
    first: tuple[float, int] | None = None
    while True:
        done, now = int(client.zcard(FINISHED)), time.monotonic()
        if first is None and done >= count / 10:
            first = now, done
        if done >= count and first:
            return (done - first[1]) / (now - first[0])
        if now > deadline:
            raise TimeoutError(f"{done} of {count} jobs were done in {seconds:.0f} s")
        time.sleep(0.005)
