"""`distaff status` tells what is there and changes nothing."""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

import pytest
import redis
from rq.suspension import resume, suspend

from distaff.cli.main import main
from distaff.cli.observe import observe, server_time
from distaff.config import RunConfig
from distaff.keys import RUNS, RunKeys, job_id

Capture = pytest.CaptureFixture[str]


@pytest.fixture
def farm(client: redis.Redis) -> Callable[[str], RunKeys]:
    """Opens a run as the roles leave it in Redis: 10 of 20 admitted, 6 settled, 3 leased, 1 group unacknowledged."""

    def make(run: str) -> RunKeys:
        keys = RunKeys(run)
        config = RunConfig.model_validate({"run": {"name": run, "pool": f"pool-{run}"}, "producer": {"window": 50}})
        client.sadd(RUNS, run)
        client.set(keys.config, config.model_dump_json())
        state: dict[Any, Any] = {
            "status": "open",
            "admitted": 10,
            "target": 20,
            "emitted": 4,
            "dead": 2,
            "tokens": 4000,
        }
        state |= {"opened": server_time(client) - 100, "rollouts": 16, "reward_sum": 8.0, "reward_count": 16}
        client.hset(keys.state, mapping=state)
        for seq, kind in ((0, "timeout"), (1, "scoring_error")):
            client.hset(keys.dead, str(seq), json.dumps({"kind": kind, "item": {}}))
        for seq in (6, 7, 8):
            client.zadd(f"rq:wip:pool-{run}", {f"{job_id(run, seq)}:abc{seq}": 1e12})
        client.zadd(f"rq:wip:pool-{run}", {f"{job_id(run + '-other', 1)}:abc": 1e12})
        client.rpush(f"rq:queue:pool-{run}", job_id(run, 9), "somebody-else")
        client.xadd(keys.groups, {"group": b""})
        _register(client, f"w-{run}", f"pool-{run}")
        return keys

    return make


def _register(client: redis.Redis, name: str, pool: str) -> None:
    beat = datetime.fromtimestamp(server_time(client) - 4, UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
    fields: dict[Any, Any] = {"hostname": "h1", "pid": 77, "queues": pool, "state": "busy", "last_heartbeat": beat}
    fields |= {"pool": pool, "running": 3, "slots": 64, "ready": 1, "loop_lag_ms": 2.5, "prefix_share": 0.875}
    client.hset(f"rq:worker:{name}", mapping=fields)
    client.sadd("rq:workers", f"rq:worker:{name}")


def test_a_run_is_shown_as_it_stands(client: redis.Redis, farm: Callable[[str], RunKeys]) -> None:
    """Counts, kinds of dead letters, rates since the run was opened, use of the window; jobs of other runs are not counted."""
    farm("a")
    snapshot = observe(client)
    (run,) = snapshot.runs
    assert (run.status, run.admitted, run.target, run.settled, run.emitted, run.dead) == ("open", 10, 20, 6, 4, 2)
    assert (run.running, run.queued) == (3, 1)
    assert run.dead_by_kind == {"timeout": 1, "scoring_error": 1}
    assert (run.window, run.in_window, run.unacknowledged) == (50, 5, 1)
    assert run.mean_reward == 0.5
    assert run.groups_per_s == pytest.approx(0.04, rel=0.05)
    assert run.tokens_per_s == pytest.approx(40, rel=0.05)
    assert snapshot.pools == {"pool-a": 2}
    (worker,) = snapshot.workers
    assert (worker.name, worker.host, worker.pid, worker.slots, worker.running) == ("w-a", "h1", 77, 64, 3)
    assert worker.ready
    assert worker.prefix_share == 0.875
    assert worker.heartbeat_age_s == pytest.approx(4, abs=1)


def test_rates_are_those_since_the_last_look(client: redis.Redis, farm: Callable[[str], RunKeys]) -> None:
    """--watch shows the present, not the average."""
    keys = farm("a")
    before = observe(client)
    client.hincrby(keys.state, "emitted", 3)
    client.hincrby(keys.state, "tokens", 300)
    after = observe(client, before=before)
    span_s = after.time - before.time
    assert after.runs[0].groups_per_s == pytest.approx(3 / span_s)
    assert after.runs[0].tokens_per_s == pytest.approx(300 / span_s)


def test_a_run_that_ended_keeps_its_rates(client: redis.Redis, farm: Callable[[str], RunKeys]) -> None:
    """An hour later it is still the speed it had: to its last group, also a freed one, and not to the end of admission, which is long before."""
    keys = farm("a")
    opened = float(client.hget(keys.state, "opened") or 0)
    client.hset(keys.state, mapping={"status": "closed", "admitted": 6, "closed": opened + 0.01})
    client.delete(keys.groups)
    client.xdel(keys.groups, client.xadd(keys.groups, {"group": b""}, id=f"{int((opened + 2) * 1000)}-0"))
    run = observe(client).runs[0]
    assert run.status == "ended"
    assert run.groups_per_s == pytest.approx(2.0, rel=0.01)
    client.delete(keys.groups)
    assert observe(client).runs[0].seconds == pytest.approx(0.01, rel=0.01)


def test_looking_changes_nothing(client: redis.Redis, farm: Callable[[str], RunKeys]) -> None:
    """Every key has the same content afterwards; stock `rq info` cannot say so."""
    farm("a")
    farm("b")
    before = {key: client.dump(key) for key in client.keys("*")}
    observe(client)
    observe(client, run="a")
    assert {key: client.dump(key) for key in client.keys("*")} == before


def test_one_run_may_be_asked_for(
    client: redis.Redis, redis_url: str, farm: Callable[[str], RunKeys], capsys: Capture
) -> None:
    """--run limits runs, pools and workers; --json is one object."""
    farm("a")
    farm("b")
    assert main(["status", "--redis-url", redis_url, "--run", "b", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert [run["name"] for run in shown["runs"]] == ["b"]
    assert [worker["name"] for worker in shown["workers"]] == ["w-b"]
    assert shown["pools"] == {"pool-b": 2}


def test_the_tables_hold_what_a_person_looks_for(
    redis_url: str, farm: Callable[[str], RunKeys], capsys: Capture
) -> None:
    """A line for the run and one for the worker, not wrapped in a pipe."""
    farm("a")
    assert main(["status", "--redis-url", redis_url]) == 0
    lines = capsys.readouterr().out.splitlines()
    run_line = next(line for line in lines if line.startswith("a "))
    assert "6/20" in run_line
    assert "2 (timeout 1, scoring_error 1)" in run_line
    assert "5/50" in run_line
    worker_line = next(line for line in lines if line.startswith("w-a "))
    assert "3/64" in worker_line
    assert "yes" in worker_line


def test_suspended_workers_are_said_to_be(client: redis.Redis, redis_url: str, capsys: Capture) -> None:
    """Otherwise a farm that `rq suspend` holds looks idle."""
    for stopped in (True, False):
        suspend(client) if stopped else resume(client)
        assert main(["status", "--redis-url", redis_url]) == 0
        assert ("suspended" in capsys.readouterr().out) is stopped


def test_an_empty_server_and_an_unknown_run_are_said_plainly(redis_url: str, capsys: Capture) -> None:
    """No runs is no error; a wrong name is one."""
    assert main(["status", "--redis-url", redis_url]) == 0
    assert "no runs" in capsys.readouterr().out
    assert main(["status", "--redis-url", redis_url, "--run", "nope"]) == 2
    assert "there is no run 'nope'" in capsys.readouterr().err
