"""What one environment does to its process reaches neither another environment, nor another member of a pool, nor the worker."""

from __future__ import annotations

import signal

from distaff.settings import WorkerSection
from tests.environment_farm_support import Case, check, play_all
from tests.zoo_v1_rude_support import marks

RUDE = "tests.zoo_v1_rude_support"


async def test_a_rude_environment_marks_its_own_process_only(redis_url: str) -> None:
    """Signal handlers, folder, variables, modules, path, builtins, socket defaults, a blocking sleep: all seven marks in the rude run's
    process, none in its neighbour's and none in the worker's, which still listens to its signals."""
    rude = Case(name="rude", id=RUDE, policy=lambda prompt: "yes", args={"rude": True}, items=4)
    polite = Case(name="polite", id=RUDE, policy=lambda prompt: "yes", items=4)
    played = {one.case.name: one for one in await play_all(redis_url, [rude, polite], "rl")}
    for one in played.values():
        check(one, "rl")
    rewards = {name: [r.reward for g in one.groups for r in g.rollouts] for name, one in played.items()}
    assert rewards == {"rude": [7.0] * 12, "polite": [0.0] * 12}
    assert marks() == []
    assert signal.SIG_IGN not in [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)]


async def test_the_members_of_a_pool_are_processes_of_their_own(redis_url: str) -> None:
    """environment_processes = 2: the groups of one run are played in two processes, each whole in one of them."""
    case = Case(name="pool", id=RUDE, policy=lambda prompt: "yes", items=8, args={"size": 8})
    hosts = WorkerSection(environment_processes=2)
    (played,) = await play_all(redis_url, [case], "rl", hosts=hosts)
    check(played, "rl")
    pids = [{rollout.metrics["pid"] for rollout in group.rollouts} for group in played.groups]
    assert all(len(found) == 1 for found in pids)
    assert len(set().union(*pids)) == 2
