"""4,000 rollouts in flight in the worker processes of one host, the engine answering after two seconds: loop lag and memory.

Lag is what the worker's own metric measures (how late a 50 ms sleep of its loop ends), from the first groups emitted, with all slots
busy, until the queue is empty. Memory is the most that was ever resident, of the worst worker.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from contextlib import ExitStack

from tests.redis_support import running_redis

from benchmarks.farm import admit, wait_until_emitted
from benchmarks.processes import role
from benchmarks.results import Figure
from distaff.clients import connect
from distaff_worker.service import TICK_S

WORKERS = 2
SLOTS = 250
GROUP = 8
GROUPS = 1600
LATENCY_S = 2.0
TOKENS = 64
LAG_GOAL_MS, MEMORY_GOAL_MB = 100.0, 450.0


class Idler:
    """Sleeps like the worker's loop, and does nothing else: what is late here is the machine's doing."""

    def __init__(self) -> None:
        self._lags: list[float] = []
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> Idler:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stop.is_set():
            before = time.monotonic()
            time.sleep(TICK_S)
            self._lags.append(time.monotonic() - before - TICK_S)

    @property
    def p99_s(self) -> float:
        return sorted(self._lags)[int(0.99 * (len(self._lags) - 1))]


def run() -> Sequence[Figure]:
    share = GROUPS // WORKERS
    with ExitStack() as stack:
        url = stack.enter_context(running_redis())
        client = stack.enter_context(connect(url))
        engine = stack.enter_context(role("engine", "--tokens", TOKENS, "--latency-s", LATENCY_S))
        flags = ("--slots", SLOTS, "--first", share // 10, "--last", share - SLOTS - share // 10)
        workers = [
            stack.enter_context(role("farm_worker", url, "--name", f"bench-{n}", *flags)) for n in range(WORKERS)
        ]
        for worker in workers:
            worker.read()
        admit(url, engine.read()["url"], groups=GROUPS, max_tokens=TOKENS)
        with Idler() as idler:
            wait_until_emitted(client, GROUPS // 3, seconds=300)
            playing = GROUP * sum(int(client.hget(f"rq:worker:bench-{n}", "running") or 0) for n in range(WORKERS))
            wait_until_emitted(client, 2 * GROUPS // 3, seconds=300)
        wait_until_emitted(client, GROUPS, seconds=300)
        peak_mb = max(worker.peak_mb for worker in workers)
        for child in (*workers, engine):
            child.stop()
        seen = [worker.read() for worker in workers]
        most = int(engine.read()["max_in_flight"])
    lag_ms = 1000 * max(one["lag_p99_s"] for one in seen)
    rate = GROUP * sum(one["groups"] / one["wall_s"] for one in seen)
    return [
        Figure(
            what="99th percentile of the loop lag, worst worker, ms",
            goal=f"< {LAG_GOAL_MS:g}",
            result=f"{lag_ms:.0f}",
            met=lag_ms < LAG_GOAL_MS,
        ),
        Figure(
            what="peak memory of a worker, MB",
            goal=f"< {MEMORY_GOAL_MB:g}",
            result=f"{peak_mb:.0f}",
            met=peak_mb < MEMORY_GOAL_MB,
        ),
        Figure(what="the same lag in an idle process meanwhile, ms", result=f"{1000 * idler.p99_s:.0f}"),
        Figure(what="rollouts in play, as the workers announced", result=f"{playing}"),
        Figure(what="most requests the engine held at once", result=f"{most}"),
        Figure(what="longest loop lag, ms", result=f"{1000 * max(one['lag_max_s'] for one in seen):.0f}"),
        Figure(what=f"rollouts/s of the {WORKERS} workers together", result=f"{rate:.0f}"),
    ]
