"""P18: wrong clocks are harmless: workers hours ahead and behind, and operators whose `rq info` goes by their own."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import redis
from rq.registry import StartedJobRegistry
from rq.suspension import resume, suspend

from distaff.cli.main import main
from distaff.cli.observe import observe, server_time
from distaff.config import RunConfig
from distaff.dead import summaries
from distaff.keys import RunKeys, job_id
from distaff_worker.claim import Claimer
from distaff_worker.rq_schema import JSONQueue
from distaff_worker.settle import Settler
from tests.harness.processes import Child, start
from tests.skew_support import hours_ahead, skewed
from tests.skew_worker import RUN
from tests.worker_support import POOL, check_oracle, emit_of, enqueue, make_item, open_run, wait_until

QUEUE_CLASS = "distaff_worker.rq_schema.JSONQueue"


def opened(client: redis.Redis, count: int) -> RunKeys:
    """A closed run of so many items."""
    keys = open_run(client, RUN)
    client.set(keys.config, RunConfig.model_validate({"run": {"name": RUN, "pool": POOL}}).model_dump_json())
    enqueue(client, RUN, count)
    client.hset(keys.state, mapping={"status": "closed", "opened": server_time(client)})
    return keys


def worker(
    stack: ExitStack,
    url: str,
    name: str,
    environ: dict[str, str],
    *,
    seconds: float,
    lease_s: float = 2.0,
    slots: int = 4,
) -> Child:
    argv = [sys.executable, "-m", "tests.skew_worker", url, name, str(seconds), str(lease_s), str(slots)]
    return stack.enter_context(start(argv, env=environ))


def clock_of(child: Child) -> float:
    """Hours that the process is ahead of us."""
    child.wait_for("clock ", seconds=60)
    return hours_ahead(float(child.log.split("clock ")[1].split()[0]))


def players(client: redis.Redis, keys: RunKeys) -> set[str]:
    entries: Any = client.xrange(keys.groups)
    return {fields[b"worker"].decode() for _, fields in entries}


def leases(client: redis.Redis) -> dict[bytes, float]:
    """Composite id -> Unix seconds of its end."""
    pairs: Any = client.zrange(f"rq:wip:{POOL}", 0, -1, withscores=True)
    return dict(pairs)


def test_workers_hours_ahead_and_behind_settle_a_run_beside_one_on_time(
    client: redis.Redis, redis_url: str, tmp_path: Path
) -> None:
    """Nothing is recovered that is held, what is shown makes sense while they work, and every item is settled once."""
    keys = opened(client, 60)
    suspend(client)
    with ExitStack() as stack:
        children = {
            name: worker(stack, redis_url, name, environ, seconds=0.25)
            for name, environ in {
                "ahead": skewed(tmp_path, 2),
                "behind": skewed(tmp_path, -2),
                "on-time": {},
            }.items()
        }
        assert {name: clock_of(child) for name, child in children.items()} == {"ahead": 2, "behind": -2, "on-time": 0}
        wait_until(lambda: client.scard("rq:workers") == 3, seconds=60)
        resume(client)
        wait_until(lambda: len(players(client, keys)) == 3, seconds=30, what="a worker did not play")
        snapshot = observe(client)
        ages = {view.name: view.heartbeat_age_s for view in snapshot.workers}
        assert ages.keys() == children.keys()
        assert all(age is not None and 0 <= age < 5 for age in ages.values()), ages
        assert all(-1 < end_s - server_time(client) < 3 for end_s in leases(client).values())
        for name, child in children.items():
            assert child.wait(60) == 0, (name, child.log)
    check_oracle(client, RUN)
    state: Any = client.hgetall(keys.state)
    assert state.get(b"lost", b"0") == b"0"
    assert int(state[b"emitted"]) == 54
    now = server_time(client)
    letters = summaries(client, RUN)
    assert len(letters) == 6
    for letter in letters:
        assert now - 120 < letter.first < letter.last < now + 1, letter
    [run] = observe(client).runs
    assert 0 < run.seconds < 120


@pytest.mark.parametrize("hours", [2, -2])
def test_what_a_dead_worker_held_is_recovered_in_time_by_one_with_a_wrong_clock(
    hours: float, client: redis.Redis, redis_url: str, tmp_path: Path
) -> None:
    """Neither at once (ahead) nor in two hours (behind): when the lease is over by the server's clock."""
    keys = opened(client, 1)
    with ExitStack() as stack:
        victim = worker(stack, redis_url, "victim", {}, seconds=600)
        wait_until(lambda: client.zcard(f"rq:wip:{POOL}") == 1, seconds=60)
        other = worker(stack, redis_url, "other", skewed(tmp_path, hours), seconds=0.0)
        wait_until(lambda: client.exists("rq:worker:other"), seconds=60)
        wait_until(lambda: client.hget("rq:worker:other", "ready") == b"1", seconds=20)
        victim.stop()
        held = next(iter(leases(client).values()))
        assert client.hget(keys.state, "lost") is None
        wait_until(lambda: client.xlen(keys.groups) == 1, seconds=20)
        recovered = server_time(client)
        victim.kill()
        assert other.wait(30) == 0, other.log
    assert 0 <= recovered - held < 3
    assert client.hget(keys.state, "lost") == b"1"
    check_oracle(client, RUN)


@pytest.mark.parametrize("hours", [48, -48])
def test_a_wrong_clock_forgets_no_failed_job(hours: float, client: redis.Redis, redis_url: str, tmp_path: Path) -> None:
    """The worker's housekeeping of RQ's registries goes by the server's clock: failed jobs can be requeued for as long as they are kept."""
    opened(client, 1)
    kept, expired = job_id("other", 1), job_id("other", 2)
    client.zadd(f"rq:failed:{POOL}", {kept: server_time(client) + 3600, expired: server_time(client) - 3600})
    with ExitStack() as stack:
        child = worker(stack, redis_url, "w", skewed(tmp_path, hours), seconds=0.5)
        assert child.wait(60) == 0, child.log
    assert client.zrange(f"rq:failed:{POOL}", 0, -1) == [kept.encode()]


def infos(stack: ExitStack, url: str, folder: Path) -> Iterator[Child]:
    """Two operators, an hour ahead and an hour behind, each looking again and again, with time for an item to be played in between."""
    look = [sys.executable, "-m", "rq.cli", "info", "-r", "-u", url, "--queue-class", QUEUE_CLASS]
    for hours in (1, -1):
        loop = ["sh", "-c", 'while :; do "$@" >/dev/null; sleep 1; done', "sh", *look]
        yield stack.enter_context(start(loop, env=skewed(folder / str(hours), hours)))


@pytest.mark.slow
def test_two_operators_with_wrong_clocks_look_all_the_time_and_nothing_is_lost_or_doubled(
    client: redis.Redis, redis_url: str, tmp_path: Path
) -> None:
    """`rq info` requeues by its own clock what runs; 150 items are each settled once all the same, by their own workers."""
    keys = opened(client, 150)
    client.config_resetstat()
    with ExitStack() as stack:
        looking = list(infos(stack, redis_url, tmp_path))
        wait_until(lambda: _looks(client) >= 2, seconds=60)
        workers = [
            worker(stack, redis_url, f"w{number}", {}, seconds=0.7, lease_s=12.0, slots=8) for number in range(2)
        ]
        for child in workers:
            assert child.wait(100) == 0, child.log[-2000:]
        assert all(child.code is None for child in looking), [child.log for child in looking]
    assert _requeued(client) > 5, "no `rq info` ever requeued what a worker was playing: this test tested nothing"
    wait_until(lambda: client.llen(f"rq:queue:{POOL}") == 0, seconds=5)
    check_oracle(client, RUN)
    assert client.hget(keys.state, "emitted") == b"135"


def _looks(client: redis.Redis) -> int:
    """How often `rq info` counted the failed jobs; nobody else does."""
    return int(client.info("commandstats").get("cmdstat_zcard", {}).get("calls", 0)) // 3


def _requeued(client: redis.Redis) -> int:
    """Items that RQ's own clean-up put back: it counts a retry down."""
    left: list[Any] = [client.hget(f"rq:job:{job_id(RUN, seq)}", "retries_left") for seq in range(150)]
    return sum(value not in (None, b"1000000") for value in left)


def test_an_item_that_rq_info_gave_to_another_is_emitted_by_one(client: redis.Redis) -> None:
    """An operator an hour ahead requeues what runs; whoever holds it in the end emits it, and the other's result is refused."""
    keys = opened(client, 1)
    names: dict[str, Any] = {
        name: {"pool": POOL, "worker": name, "worker_key": f"rq:worker:{name}"} for name in ("w1", "w2")
    }
    [first] = Claimer(client, **names["w1"], lease_s=30).claim(1)
    StartedJobRegistry(queue=JSONQueue(POOL, connection=client)).cleanup(time.time() + 3600)
    [second] = Claimer(client, **names["w2"], lease_s=30).claim(1)
    emitted = emit_of(make_item(RUN, 0))
    one, two = (Settler(client, pool=POOL, worker=name, worker_key=f"rq:worker:{name}") for name in names)
    assert one.emit(first, emitted.fields, emitted.counts) == "lost"
    assert two.emit(second, emitted.fields, emitted.counts) == "emitted"
    assert one.emit(first, emitted.fields, emitted.counts) == "settled"
    StartedJobRegistry(queue=JSONQueue(POOL, connection=client)).cleanup(time.time() + 3600)
    assert client.xlen(keys.groups) == 1
    check_oracle(client, RUN)


def test_dead_letters_are_listed_with_times_that_make_sense(
    client: redis.Redis, redis_url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A letter of a worker two hours ahead is not from the future."""
    opened(client, 10)
    with ExitStack() as stack:
        child = worker(stack, redis_url, "w", skewed(tmp_path, 2), seconds=0.05)
        assert child.wait(60) == 0, child.log
    assert main(["dead", "list", RUN, "--json", "--redis-url", redis_url]) == 0
    [letter] = json.loads(capsys.readouterr().out)["letters"]
    assert abs(letter["last"] - time.time()) < 60
    assert letter["last"] >= letter["first"]
