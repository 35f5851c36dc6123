"""Reading, listing and deleting runs, and which Redis is refused."""

from __future__ import annotations

import subprocess
import sys
import time
from dataclasses import fields

import pytest
import redis

from distaff.clients import connect
from distaff.errors import ConfigurationError
from distaff.keys import STATE_FIELDS, RunKeys
from distaff.runs import RunState, delete_run, list_runs, read_config_json, read_state
from distaff.safety import check_redis
from distaff_producer.produce import Producer
from tests.producer_support import Numbers, config, queued_seqs


def test_the_state_has_every_documented_field(client: redis.Redis) -> None:
    """Each field of STATE_FIELDS is read, as a number where it is one."""
    assert [field.name for field in fields(RunState)] == list(STATE_FIELDS)
    values: dict[str, str | int | float] = {name: number for number, name in enumerate(STATE_FIELDS, start=1)}
    values.update(status="closed", reward_sum=0.5)
    client.hset(RunKeys("r").state, mapping=values)  # type: ignore[arg-type]
    state = read_state(client, "r")
    assert state is not None
    assert {name: getattr(state, name) for name in STATE_FIELDS} == values


def test_counters_that_are_not_there_yet_are_zero(client: redis.Redis) -> None:
    """A run that was just opened has zeros, no end and no close."""
    client.hset(RunKeys("r").state, "status", "open")
    state = read_state(client, "r")
    assert state is not None
    assert (state.status, state.target, state.closed, state.admitted, state.reward_sum) == ("open", None, None, 0, 0.0)
    assert not state.ended


def test_a_run_ended_when_it_is_closed_and_all_is_settled(client: redis.Redis) -> None:
    """Neither the close nor the last settled item alone is the end."""
    key = RunKeys("r").state
    client.hset(key, mapping={"status": "open", "admitted": 3, "emitted": 2, "dead": 1})
    ended = []
    for name, value in (("status", "open"), ("status", "closed"), ("dead", "0")):
        client.hset(key, name, value)
        state = read_state(client, "r")
        ended.append(state is not None and state.ended)
    assert ended == [False, True, False]


def test_runs_that_do_not_exist_are_none(client: redis.Redis) -> None:
    """Asking for an unknown run, listing none and deleting none are no errors."""
    assert read_state(client, "r") is None
    assert read_config_json(client, "r") is None
    assert list_runs(client) == []
    assert delete_run(client, "r") is False


def leave_traces(client: redis.Redis, run: str, pool: str = "p") -> None:
    """What RQ, the workers and the consumers leave behind of a run."""
    job = f"{run}-000000000"
    for registry in ("finished", "failed", "canceled", "scheduled", "deferred", "ready"):
        client.zadd(f"rq:{registry}:{pool}", {job: 1})
    client.zadd(f"rq:wip:{pool}", {f"{job}:e1": time.time() - 5})
    client.hset(f"rq:execution:{job}:e1", "id", "e1")
    client.zadd(f"rq:executions:{job}", {"e1": 1})
    client.xadd(f"rq:results:{job}", {"a": "b"})
    client.sadd(f"rq:job:{job}:dependents", "x")
    keys = RunKeys(run)
    client.xadd(keys.groups, {"a": "b"})
    client.setbit(keys.settled, 3, 1)
    client.hset(keys.dead, "3", "{}")
    client.hset(keys.policy, "version", 1)
    client.set(f"distaff:run:{run}:something-new", "1")


def test_a_deleted_run_leaves_nothing_and_the_others_everything(client: redis.Redis, redis_url: str) -> None:
    """Keys, jobs, queue entries and registry entries of the run are gone; those of runs with similar names stay."""
    others = ["r-x", "rr", "r-000000001"]
    for run in others:
        Producer(config(run={"name": run}), redis_url, Numbers(rows=2)).run()
        leave_traces(client, run)
    client.zrem("rq:wip:p", *[f"{run}-000000000:e1" for run in others])
    before = {key: client.dump(key) for key in client.scan_iter()}
    Producer(config(), redis_url, Numbers(rows=3)).run()
    leave_traces(client, "r")
    assert list_runs(client) == sorted([*others, "r"])
    assert delete_run(client, "r") is True
    assert {key: client.dump(key) for key in client.scan_iter()} == before
    assert len(queued_seqs(client)) == 6
    for run in others:
        assert delete_run(client, run)
    assert client.keys() == []


def test_a_run_that_is_being_played_is_deleted_only_by_force(client: redis.Redis, redis_url: str) -> None:
    """A live lease protects the run; an expired one does not."""
    Producer(config(), redis_url, Numbers(rows=3)).run()
    client.zadd("rq:wip:p", {"r-000000001:e": time.time() + 60})
    before = {key: client.dump(key) for key in client.scan_iter()}
    with pytest.raises(ConfigurationError, match="workers hold the leases of 1 of its items"):
        delete_run(client, "r")
    assert {key: client.dump(key) for key in client.scan_iter()} == before
    assert delete_run(client, "r", force=True)
    assert client.keys() == []


def test_reading_runs_needs_the_base_install_only() -> None:
    """`distaff.runs` loads none of the roles' libraries."""
    heavy = "rq verifiers openai transformers pydantic structlog zstandard"
    program = f"import sys, distaff.runs; print([name for name in {heavy.split()!r} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"


def test_the_test_server_is_safe(client: redis.Redis, redis_url: str) -> None:
    """A local server with the default policy passes."""
    check_redis(client, redis_url)


@pytest.mark.parametrize(
    "url", ["redis://redis:6379/0", "redis://10.1.2.3:6379", "rediss://redis.example:6379", "redis://:@h:1"]
)
def test_a_redis_of_others_without_a_password_is_refused(url: str) -> None:
    """P27: not on this machine and no password: refused before anything is sent."""
    with pytest.raises(ConfigurationError, match="without a password"):
        check_redis(connect(url), url)


@pytest.mark.parametrize(
    "url",
    [
        "redis://:secret@10.1.2.3:6379",
        "redis://u:secret@h:1",
        "redis://h:1?password=secret",
        "redis://localhost:1",
        "redis://127.3.2.1:1",
        "redis://[::1]:1",
    ],
)
def test_a_password_or_this_machine_is_protection_enough(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A password, wherever it stands in the URL, or a loopback address passes."""
    opened = connect(url)
    monkeypatch.setattr(opened, "info", lambda section: {"redis_version": "7.0.0", "maxmemory_policy": "noeviction"})
    check_redis(opened, url)


@pytest.mark.parametrize(
    ("version", "accepted"), [("6.2.14", False), ("7.0.0", True), ("7.2.4", True), ("10.1.0", True), ("", False)]
)
def test_an_old_server_is_refused(version: str, accepted: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before 7.0 the scripts do not run; the message says what is needed."""
    opened = connect("redis://localhost:1")
    monkeypatch.setattr(opened, "info", lambda section: {"redis_version": version})
    if accepted:
        check_redis(opened, "redis://localhost:1")
        return
    with pytest.raises(ConfigurationError, match=r"7\.0 or newer is needed"):
        check_redis(opened, "redis://localhost:1")


def test_a_server_that_may_not_be_asked_is_accepted(client: redis.Redis, redis_url: str) -> None:
    """An ACL without INFO skips the checks instead of refusing the server."""
    rules = ("reset", "on", ">pw", "~*", "+@all", "-info")
    client.execute_command("ACL", "SETUSER", "quiet", *rules)  # type: ignore[no-untyped-call]
    try:
        url = redis_url.replace("unix://", "unix://quiet:pw@")
        with connect(url) as opened:
            check_redis(opened, url)
    finally:
        client.execute_command("ACL", "DELUSER", "quiet")  # type: ignore[no-untyped-call]
