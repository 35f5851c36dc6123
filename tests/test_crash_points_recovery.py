"""P4: what a killed worker held is in other hands within two leases, at any length of the lease; the figures are printed."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Literal

import pytest
import redis

from distaff.keys import RunKeys, job_id
from tests.crash_processes import RUN, unsettled
from tests.crash_support import Farm
from tests.harness import oracle
from tests.worker_support import POOL, enqueue, open_run, wait_until

BEATS_A_LEASE = 6
"""As the default settings have it: 30 s and 5 s."""
Second = Literal["alive", "started after the kill"]


@pytest.fixture(scope="module")
def farm() -> Iterator[Farm]:
    """Servers and the process that workers are forked from."""
    with Farm() as opened:
        yield opened


@dataclass(frozen=True, slots=True, kw_only=True)
class Recovery:
    """How long an item of a killed worker was in nobody's hands."""

    lease_s: float
    second: Second
    seconds: float

    def __str__(self) -> str:
        share = self.seconds / self.lease_s
        return f"lease {self.lease_s:g} s, second worker {self.second}: {self.seconds:.2f} s ({share:.2f} leases)"


def recover(farm: Farm, lease_s: float, second: Second) -> Recovery:
    """Kill a worker right after it has beaten, when its lease is longest; the time until the other plays the item."""
    options = {"lease_s": lease_s, "beat_s": lease_s / BEATS_A_LEASE, "idle_wait_s": 0}
    with farm.place() as place:
        open_run(place.client, RUN)
        enqueue(place.client, RUN, 1)
        place.client.hset(RunKeys(RUN).state, "status", "closed")
        first = place.start("worker", name="first", hangs=True, **options)
        wait_until(lambda: first.said == ["0 0 0"], seconds=30, what=first.log)
        other = place.start("worker", name="second", **options) if second == "alive" else None
        wait_until(lambda: other is None or place.client.exists("rq:worker:second"), seconds=30)
        await_beat(place.client, lease_s)
        first.kill()
        killed = time.monotonic()
        other = other or place.start("worker", name="second", **options)
        wait_until(lambda: other.said, seconds=3 * lease_s + 10, what=other.log)
        seconds = time.monotonic() - killed
        assert other.said == ["0 0 1"], "lost once, and no attempt charged"
        wait_until(lambda: unsettled(place.client) == 0)
        oracle.check(place.client, RUN)
    return Recovery(lease_s=lease_s, second=second, seconds=seconds)


def await_beat(client: redis.Redis, lease_s: float) -> None:
    """Return when the lease of the item has just been extended."""

    def ends() -> float:
        leases: Any = client.zrange(f"rq:wip:{POOL}", 0, -1, withscores=True)
        [(_, score)] = leases
        return float(score)

    assert client.hget(f"rq:job:{job_id(RUN, 0)}", "worker_name") == b"first"
    before = ends()
    wait_until(lambda: ends() > before, seconds=lease_s + 5)


def measure(farm: Farm, leases_s: Sequence[float]) -> list[Recovery]:
    """All of them side by side: there is nothing to do but to wait."""
    seconds: tuple[Second, Second] = ("alive", "started after the kill")
    with ThreadPoolExecutor(2 * len(leases_s)) as pool:
        futures = [pool.submit(recover, farm, lease_s, second) for lease_s in leases_s for second in seconds]
        recoveries = [future.result() for future in futures]
    for recovery in recoveries:
        print(f"recovery: {recovery}")
    return recoveries


@pytest.mark.slow
def test_an_item_of_a_killed_worker_is_played_within_two_leases(farm: Farm) -> None:
    """P4: leases of one and of ten seconds, with another worker there and with one that comes after."""
    for recovery in measure(farm, [1.0, 10.0]):
        assert recovery.seconds < 2 * recovery.lease_s, str(recovery)


@pytest.mark.exhaustive
def test_an_item_of_a_killed_worker_is_played_within_two_leases_of_the_default_length(farm: Farm) -> None:
    """P4: thirty seconds."""
    for recovery in measure(farm, [30.0]):
        assert recovery.seconds < 2 * recovery.lease_s, str(recovery)
