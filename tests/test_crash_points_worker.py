"""P2: a worker that is killed at any of its Redis commands loses and doubles nothing; one whose connection is cut there goes on by itself."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import redis

from distaff.keys import RunKeys
from distaff.runs import read_state
from distaff.starting import patiently
from distaff_worker.claim import Claimer
from tests.crash_processes import BURIED, RUN, unsettled
from tests.crash_support import CUTS, KILLS, Farm, Place, Point
from tests.harness import oracle
from tests.harness.seeds import seed
from tests.worker_support import POOL, enqueue, open_run, wait_until

ITEMS = 6
KEYS = RunKeys(RUN)


@pytest.fixture(scope="module")
def farm() -> Iterator[Farm]:
    """A server and the process that victims are forked from."""
    with Farm() as opened:
        yield opened


def lay_out(client: redis.Redis) -> None:
    """Six items of a closed run; a worker that is gone holds the first, and its lease has run out."""
    open_run(client, RUN)
    enqueue(client, RUN, ITEMS)
    client.hset(KEYS.state, "status", "closed")
    gone = Claimer(client, pool=POOL, worker="gone", worker_key="rq:worker:gone", lease_s=0.001)
    assert len(patiently(lambda: gone.claim(1), role="the test")) == 1


def a_worker(place: Place, point: Point | None) -> None:
    """Plays, retries, buries, sweeps and beats; then it is told to stop, hands one item back and ends. An heir plays what is left."""
    lay_out(place.client)
    victim = place.strike("worker", point, name="victim", direct=place.url)
    state = read_state(place.client, RUN)
    assert state is not None
    if not place.struck or (point and point.way in CUTS):
        assert victim.code == 0, "it did not go on by itself"
        assert state.settled == ITEMS - 1
        assert state.handed_back >= 1
    heir = place.start("worker", name="heir")
    wait_until(lambda: unsettled(place.client) == 0, seconds=30, what="the heir did not settle the rest")
    heir.kill()
    settled = oracle.check(place.client, RUN)
    assert settled.dead == [BURIED]
    counters: Any = place.client.hgetall(KEYS.state)
    assert counters[b"retried"] == b"1", "an attempt was charged twice, or not at all"


@pytest.mark.slow
def test_a_worker_killed_at_any_command_loses_and_doubles_nothing(farm: Farm, request: pytest.FixtureRequest) -> None:
    """P2: before the command is forwarded, and after it was applied and before its reply; every fifth command."""
    farm.enumerate(a_worker, KILLS, seed=seed(request))


@pytest.mark.slow
def test_a_worker_whose_connection_is_cut_at_any_command_goes_on(farm: Farm, request: pytest.FixtureRequest) -> None:
    """P5: a lost reply, and scripts that are forgotten meanwhile, cost a repetition; every fifth command."""
    farm.enumerate(a_worker, CUTS, seed=seed(request))


def test_a_settlement_whose_reply_is_lost_is_neither_lost_nor_repeated(
    farm: Farm, request: pytest.FixtureRequest
) -> None:
    """P5: every emit, dead letter, retry and hand-back, cut off before it is applied or after."""
    settling = ("EVALSHA emit", "EVALSHA bury", "EVALSHA release")
    farm.enumerate(a_worker, CUTS, seed=seed(request), only=settling)


@pytest.mark.exhaustive
@pytest.mark.timeout(1200)
def test_a_worker_killed_or_cut_at_every_command_loses_and_doubles_nothing(
    farm: Farm, request: pytest.FixtureRequest
) -> None:
    """P2, P5: all of them."""
    farm.enumerate(a_worker, [*KILLS, *CUTS], seed=seed(request), every=1)
