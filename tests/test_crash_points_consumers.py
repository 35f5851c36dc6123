"""P22, P24: a trainer and an archiver that are killed at any of their Redis commands; every group comes back, and none is given up unseen."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import redis

from distaff.keys import RunKeys
from distaff_consumer.jsonl import read_archive
from tests.crash_processes import RUN
from tests.crash_support import CUTS, KILLS, Farm, Place, Point, Victim
from tests.group_support import append_groups, make_group
from tests.harness.seeds import seed

COUNT = 8
KEYS = RunKeys(RUN)


@pytest.fixture(scope="module")
def farm() -> Iterator[Farm]:
    """A server and the process that victims are forked from."""
    with Farm() as opened:
        yield opened


def lay_out(client: redis.Redis, count: int = COUNT) -> None:
    append_groups(client, (make_group(run=RUN, seq=seq, rollouts=2, tokens=8) for seq in range(count)))


def in_stream(client: redis.Redis) -> list[int]:
    """Groups that are not acknowledged: an acknowledged one is freed."""
    entries: Any = client.xrange(KEYS.groups)
    return [int(fields[b"seq"]) for _, fields in entries]


def check_empty(client: redis.Redis, group: str) -> None:
    """Everything is acknowledged and freed, and nothing was parked."""
    pending: Any = client.xpending(KEYS.groups, group)
    assert (in_stream(client), pending["pending"]) == ([], 0)
    assert not client.exists(KEYS.parked(group))


def got(trainer: Victim) -> list[tuple[int, int]]:
    """(seq, deliveries) of what it got, in order."""
    return [(int(seq), int(deliveries)) for seq, deliveries in map(str.split, trainer.said)]


def a_trainer(place: Place, point: Point | None) -> None:
    """Takes and acknowledges eight groups; an heir, of its name or of another, gets exactly what it had not acknowledged."""
    lay_out(place.client)
    victim = place.strike("trainer", point)
    if not place.struck or (point and point.way in CUTS):
        assert victim.code == 0, "it did not go on by itself"
        assert got(victim) == [(seq, 1) for seq in range(COUNT)], "a lost reply is no delivery"
    left = in_stream(place.client)
    same_name = point is None or point.k % 2 == 0
    named = {"name": "trainer-0", "claim_idle_s": 30} if same_name else {"name": "trainer-1"}
    heir = place.start("trainer", **named)
    assert heir.wait() == 0
    came = [seq for seq, _ in got(heir)]
    assert (came if same_name else sorted(came)) == left, "not what was left, or not in order"
    assert {seq for seq, _ in got(victim)} | set(came) == set(range(COUNT))
    assert len(got(victim)) + len(came) <= COUNT + 1, "more than the one in hand came twice"
    assert all(deliveries <= 2 for _, deliveries in got(heir))
    check_empty(place.client, "trainer")


def an_archiver(place: Place, point: Point | None) -> None:
    """Archives eight groups, three at a time; a second process on the directory ends with each group in it once."""
    lay_out(place.client)
    directory = place.folder / "archive"
    victim = place.strike("archiver", point, directory=str(directory))
    if not place.struck or (point and point.way in CUTS):
        assert victim.code == 0, "it did not go on by itself"
    on_disk = [record["seq"] for record in read_archive(directory)] if directory.is_dir() else []
    acknowledged = set(range(COUNT)) - set(in_stream(place.client))
    assert acknowledged <= set(on_disk), "acknowledged before it was on disk"
    heir = place.start("archiver", directory=str(directory))
    assert heir.wait() == 0
    assert sorted(record["seq"] for record in read_archive(directory)) == list(range(COUNT))
    archived, _, parked, missing = map(int, heir.said[0].split())
    assert (archived, parked, missing) == (COUNT, 0, 0)
    check_empty(place.client, "archive")


def test_a_trainer_killed_at_any_command_gets_its_groups_back_in_order(
    farm: Farm, request: pytest.FixtureRequest
) -> None:
    """P22: before the command is forwarded, and after it was applied and before its reply; every fifth command."""
    farm.enumerate(a_trainer, KILLS, seed=seed(request))


def test_a_trainer_whose_connection_is_cut_at_any_command_gets_each_group_once(
    farm: Farm, request: pytest.FixtureRequest
) -> None:
    """P22: the process lives on and sees each group once, in order; every fifth command."""
    farm.enumerate(a_trainer, CUTS, seed=seed(request))


def test_a_trainer_that_loses_the_reply_to_a_read_gets_its_groups_in_order(
    farm: Farm, request: pytest.FixtureRequest
) -> None:
    """P22: what the lost reply held comes before what the next one holds; every read."""
    farm.enumerate(a_trainer, CUTS, seed=seed(request), only=("XREADGROUP GROUP",))


def test_a_group_at_which_every_trainer_dies_is_parked_alone(farm: Farm) -> None:
    """P22: it comes three times, each time to a process that it kills; those that were fetched with it are not given up with it."""
    poison, most = 3, 3
    with farm.place() as place:
        lay_out(place.client)
        lives: list[Victim] = []
        while not lives or lives[-1].code != 0:
            assert len(lives) <= most, "it came too often"
            lives.append(place.start("trainer", max_deliveries=most, dies_at=poison))
            lives[-1].wait()
        deliveries = [pair for life in lives for pair in got(life)]
        assert [count for seq, count in deliveries if seq == poison] == [1, 2, 3]
        others = [seq for seq, _ in deliveries if seq != poison]
        assert others == [seq for seq in range(COUNT) if seq != poison], "not each of the others once and in order"
        parked: Any = place.client.xrange(KEYS.parked("trainer"))
        assert [int(fields[b"seq"]) for _, fields in parked] == [poison]
        assert in_stream(place.client) == []


def test_an_archiver_killed_at_any_command_has_each_group_once(farm: Farm, request: pytest.FixtureRequest) -> None:
    """P24: nothing is acknowledged that is not on disk; every fifth command."""
    farm.enumerate(an_archiver, KILLS, seed=seed(request))


def test_an_archiver_whose_connection_is_cut_at_any_command_goes_on(farm: Farm, request: pytest.FixtureRequest) -> None:
    """P24: every fifth command."""
    farm.enumerate(an_archiver, CUTS, seed=seed(request))


@pytest.mark.exhaustive
@pytest.mark.timeout(1200)
def test_consumers_killed_or_cut_at_every_command_lose_nothing(farm: Farm, request: pytest.FixtureRequest) -> None:
    """P22, P24: all of them."""
    farm.enumerate(a_trainer, [*KILLS, *CUTS], seed=seed(request), every=1)
    farm.enumerate(an_archiver, [*KILLS, *CUTS], seed=seed(request), every=1)
