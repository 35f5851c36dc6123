"""P1: a farm of real processes under random faults settles every item exactly once. The faults come from a seed, which is printed."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.harness.seeds import replay, seeded
from tests.soak.drive import Result, Soak, run
from tests.soak.farm import FarmOptions
from tests.soak.report import as_table
from tests.soak.schedule import DECK, EVERYBODY, Shape, schedule

ITEMS = 200
SHAPE = Shape(workers=["worker-0", "worker-1"], roles=["producer", "archiver", "trainer"], spared=["worker-0"])


def survive(folder: Path, *, seed: int, seconds: float) -> Result:
    """Two hundred items, two workers, one of each other role: what is wrong afterwards fails the test."""
    farm = FarmOptions(seed=seed, items=ITEMS, workers=2, rate=ITEMS / seconds, lease_s=3.0, spares=False)
    result = run(Soak(farm=farm, seconds=seconds, gap_s=0.8, timed=False), folder)
    print(as_table(result), *result.log, sep="\n")
    assert not result.violations, f"{replay(seed)}\n" + "\n".join(result.violations)
    assert result.state["admitted"] == ITEMS
    assert sum(result.faults.values()) >= seconds / 5
    return result


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_two_hundred_items_survive_twenty_seconds_of_random_faults(
    request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    """Kills, stops, cuts, silence, a Redis that is killed, paused and full, an engine that lies: each item once, in stream and archive."""
    with seeded(request) as seed:
        survive(tmp_path, seed=seed, seconds=20)


@pytest.mark.exhaustive
@pytest.mark.timeout(600)
def test_two_hundred_items_survive_a_minute_of_random_faults(request: pytest.FixtureRequest, tmp_path: Path) -> None:
    """The whole of P1."""
    with seeded(request) as seed:
        survive(tmp_path, seed=seed, seconds=60)


def test_a_schedule_is_replayed_by_its_seed() -> None:
    """The same seed and shape, the same faults; another seed, others."""
    first, again, other = (schedule(seed, seconds=300, shape=SHAPE, gap_s=2, quiet_s=9) for seed in (1, 1, 2))
    assert first == again
    assert first != other


@pytest.mark.parametrize("seed", range(20))
def test_a_schedule_keeps_its_word(seed: int) -> None:
    """Every kind comes, spared processes are never ended, nothing is struck while a fault has it, and quiet is quiet."""
    faults = schedule(seed, seconds=400, shape=SHAPE, gap_s=2, quiet_s=9)
    assert {card.kind for card in DECK} == {fault.kind for fault in faults}
    assert all(fault.at_s + fault.lasts_s <= 400 for fault in faults)
    assert not [fault for fault in faults if fault.kind in ("kill", "drain") and fault.target in SHAPE.spared]
    busy: dict[str, float] = {}
    for fault, after in zip(faults, [*faults[1:], None], strict=True):
        assert fault.at_s >= busy.get(fault.target, 0.0) - 0.001
        busy[fault.target] = fault.at_s + fault.lasts_s
        if fault.quiet:
            assert max(busy.values()) <= fault.at_s + 0.001
            assert after is None or after.at_s > fault.at_s + 8.99
    assert sum(fault.quiet for fault in faults) >= 2
    assert {fault.target for fault in faults} > {EVERYBODY, "redis", "engine"}
