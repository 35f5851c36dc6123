"""P6: a producer may be killed at any of its Redis commands, run again, and run twice at once."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
import redis

from distaff.runs import read_state
from distaff.starting import patiently
from distaff_worker.claim import Claimer
from distaff_worker.rq_schema import decode_job
from distaff_worker.settle import Settler
from tests.crash_processes import RUN, group_of
from tests.crash_support import CUTS, KILLS, Farm, Place, Point, Victim
from tests.harness import oracle
from tests.harness.seeds import seed
from tests.worker_support import POOL

ITEMS = 50
SHARED = 0.25
"""Two producers share the commands as they happen to run, so that many a point is never reached."""


@pytest.fixture(scope="module")
def farm() -> Iterator[Farm]:
    """A server and the process that victims are forked from."""
    with Farm() as opened:
        yield opened


def admitted(client: redis.Redis) -> int:
    """Where the run's cursor stands; 0 when there is no run."""
    state = read_state(client, RUN)
    return state.admitted if state else 0


def report_of(producer: Victim) -> dict[str, Any]:
    """What it told at its end."""
    [line] = producer.said
    report: dict[str, Any] = json.loads(line)
    return report


def settle_all(client: redis.Redis) -> list[int]:
    """Claim and emit everything, as a worker does; the items in the order of the queue."""
    names: dict[str, Any] = {"pool": POOL, "worker": "w", "worker_key": "rq:worker:w"}
    claimer = Claimer(client, **names, lease_s=60)
    leases = patiently(lambda: claimer.claim(2 * ITEMS), role="the test")
    settler = Settler(client, **names)
    for lease in leases:
        group = group_of(decode_job(lease.payload, job_id=lease.job_id))
        assert settler.emit(lease, group.fields, group.counts) == "emitted"
    return [lease.place[1] for lease in leases]


def check_admitted_once(client: redis.Redis) -> None:
    """Every item is on the queue once, in order, and can be played to a whole group; the run is closed."""
    assert settle_all(client) == list(range(ITEMS))
    oracle.check(client, RUN)
    state = read_state(client, RUN)
    assert state is not None
    assert (state.admitted, state.target, state.ended) == (ITEMS, ITEMS, True)


def a_producer(place: Place, point: Point | None) -> None:
    """Admits fifty items; then it is run again, which says how many were there already and admits the others."""
    victim = place.strike("producer", point)
    if not place.struck or (point and point.way in CUTS):
        assert victim.code == 0, "it did not go on by itself"
        report = report_of(victim)
        assert (report["admitted"], report["already_there"], report["elsewhere"]) == (ITEMS, 0, 0)
    there = admitted(place.client)
    again = place.start("producer")
    assert again.wait() == 0
    report = report_of(again)
    assert (report["already_there"], report["admitted"], report["elsewhere"]) == (there, ITEMS - there, 0)
    assert (report["total"], report["restored"], report["closed"]) == (ITEMS, 0, True)
    check_admitted_once(place.client)


def two_producers(place: Place, point: Point | None) -> None:
    """Both admit the same run, two items at a time; one is killed, and what the other counted adds up."""
    with place.striking("producer", point, batch=2) as victim:
        other = place.start("producer", batch=2)
        assert other.wait() == 0
        victim.wait()
    report = report_of(other)
    assert report["already_there"] + report["admitted"] + report["elsewhere"] == report["total"] == ITEMS
    if victim.code == 0:
        assert report_of(victim)["admitted"] + report["admitted"] == ITEMS
    check_admitted_once(place.client)


def test_a_producer_killed_at_any_command_is_continued_exactly(farm: Farm, request: pytest.FixtureRequest) -> None:
    """P6: before the command is forwarded, and after it was applied and before its reply; every fifth command."""
    farm.enumerate(a_producer, KILLS, seed=seed(request))


def test_a_producer_whose_connection_is_cut_at_any_command_goes_on(farm: Farm, request: pytest.FixtureRequest) -> None:
    """P6: it admits everything itself and counts each item once, also those whose reply was lost; every fifth command."""
    farm.enumerate(a_producer, CUTS, seed=seed(request))


def test_two_producers_at_once_of_which_one_is_killed_admit_every_item_once(
    farm: Farm, request: pytest.FixtureRequest
) -> None:
    """P6: every fifth command."""
    farm.enumerate(two_producers, KILLS, seed=seed(request), reach=SHARED)


@pytest.mark.exhaustive
@pytest.mark.timeout(1200)
def test_producers_killed_or_cut_at_every_command_admit_every_item_once(
    farm: Farm, request: pytest.FixtureRequest
) -> None:
    """P6: all of them."""
    farm.enumerate(a_producer, [*KILLS, *CUTS], seed=seed(request), every=1)
    farm.enumerate(two_producers, KILLS, seed=seed(request), every=1, reach=SHARED)
