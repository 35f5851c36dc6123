"""`distaff doctor` on Redis: what is set well passes, what would lose data is named with its mend, and nothing is changed by looking."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import redis

from distaff.acl import Names
from distaff.cli.doctor_redis import Asked, examine
from distaff.errors import ConfigurationError
from distaff.findings import Finding
from tests.acl_support import as_user, guarded_redis
from tests.engines_support import free_port
from tests.harness.servers import KINDS, Kind, RedisServer

CHECKS = {
    f"redis.{name}"
    for name in ("reachable", "protection", "role", "version", "eviction", "persistence", "memory", "clock", "rights")
}


def findings(url: str, *, run: str = "run", pool: str = "default", **options: Any) -> dict[str, Finding]:
    asked = Asked(url=url, allow_unprotected=False, pool=pool, run=run)
    return {finding.check: finding for finding in examine(asked, **options)}


@pytest.mark.parametrize("kind", KINDS)
def test_a_server_as_the_compose_file_sets_it_passes_and_is_left_as_it_was(kind: Kind, tmp_path: Path) -> None:
    """Every check is ok, no key is there afterwards, and no command has changed anything."""
    with RedisServer(tmp_path, kind=kind, aof=True) as server:
        client = server.client()
        client.set("theirs", "kept")
        before: Any = client.info("persistence")
        found = findings(server.url)
        after: Any = client.info("persistence")
        assert {finding.status for finding in found.values()} == {"ok"}, found
        assert set(found) == CHECKS
        assert after["rdb_changes_since_last_save"] == before["rdb_changes_since_last_save"]
        assert client.keys() == [b"theirs"]


def test_no_server_is_one_failure_and_the_rest_is_skipped() -> None:
    """With the mend; without the password."""
    found = findings(f"redis://:canary-password@127.0.0.1:{free_port()}/0")
    assert found["redis.reachable"].status == "failed"
    assert "--redis-url" in found["redis.reachable"].mend
    assert {finding.status for check, finding in found.items() if check != "redis.reachable"} == {"skipped"}
    assert set(found) == CHECKS
    assert not any("canary" in f"{finding.fact}{finding.mend}" for finding in found.values())


def test_a_url_that_is_none_is_a_configuration_error() -> None:
    """Exit code 2 belongs to it."""
    with pytest.raises(ConfigurationError, match="scheme"):
        findings("http://localhost")


@pytest.mark.parametrize(
    ("settings", "check", "status", "fact", "mend"),
    [
        (
            {"maxmemory-policy": "allkeys-lru"},
            "eviction",
            "failed",
            "allkeys-lru",
            "CONFIG SET maxmemory-policy noeviction",
        ),
        ({"appendonly": "no", "save": ""}, "persistence", "warning", "a restart loses", "appendonly yes"),
        ({"appendonly": "no", "save": "3600 1"}, "persistence", "warning", "snapshots only", "appendonly yes"),
        ({"maxmemory": "1"}, "memory", "failed", "0 MiB of", "raise maxmemory"),
        ({"replicaof": "127.0.0.1 1"}, "role", "failed", "a replica of 127.0.0.1", "primary"),
    ],
)
def test_settings_that_would_lose_work_are_named(
    settings: dict[str, str], check: str, status: str, fact: str, mend: str, tmp_path: Path
) -> None:
    """Each with its mend, and every other check is still made."""
    with RedisServer(tmp_path, config={"appendonly": "yes", **settings}) as server:
        found = findings(server.url)
    wrong = found[f"redis.{check}"]
    assert (wrong.status, fact in wrong.fact, mend in wrong.mend) == (status, True, True), wrong
    assert {finding.status for name, finding in found.items() if name != wrong.check} <= {"ok"}, found
    assert set(found) == CHECKS


def test_little_memory_is_a_warning(tmp_path: Path) -> None:
    """Before it is an error."""
    with RedisServer(tmp_path, aof=True) as server:
        server.client().setrange("much", 64 << 20, b"x")
        used: Any = server.client().info("memory")
        server.client().config_set("maxmemory", str(int(used["used_memory"] * 1.05)))
        memory = findings(server.url)["redis.memory"]
    assert (memory.status, "window" in memory.mend) == ("warning", True)


def test_clocks_that_differ_are_a_warning(client: redis.Redis, redis_url: str) -> None:
    """The server's is the one that counts."""
    clock = findings(redis_url, now=lambda: time.time() - 90)["redis.clock"]
    assert clock.status == "warning"
    assert "90.0 s ahead of" in clock.fact


@pytest.mark.parametrize("kind", KINDS)
def test_rights_are_told_without_using_them(kind: Kind, tmp_path: Path) -> None:
    """A worker's user is known as one, a monitor's cannot play and is told what it lacks; the run and queue that are there stay as they are."""
    with guarded_redis(tmp_path, kind=kind) as (url, admin):
        admin.lpush("rq:queue:default", "an-item")
        admin.hset("distaff:run:run:state", "status", "open")
        found = {
            role: findings(as_user(url, role))["redis.rights"] for role in ("producer", "worker", "monitor", "default")
        }
        assert admin.lrange("rq:queue:default", 0, -1) == [b"an-item"]
        assert admin.hgetall("distaff:run:run:state") == {b"status": b"open"}
        assert len(admin.keys()) == 2
    assert {role: finding.status for role, finding in found.items()} == {
        "producer": "ok",
        "worker": "ok",
        "monitor": "failed",
        "default": "ok",
    }
    assert "may do what worker do" in found["worker"].fact
    assert "producer and worker" in found["default"].fact
    assert "as worker it lacks evalsha" in found["monitor"].fact
    assert "distaff acl" in found["monitor"].mend


def test_rights_on_other_runs_and_pools_are_no_rights(tmp_path: Path) -> None:
    """Users that may only use one pool and runs of one name, asked for these and for others."""
    names = Names(pool="mine", runs="team-")
    with guarded_redis(tmp_path, names=names) as (url, _):
        worker = as_user(url, "worker")
        asked = {
            (run, pool): findings(worker, run=run, pool=pool)["redis.rights"].status
            for run, pool in (("team-1", "mine"), ("other", "mine"), ("team-1", "default"))
        }
    assert list(asked.values()) == ["ok", "failed", "failed"]


def test_a_user_that_may_not_ask_is_told_so(tmp_path: Path) -> None:
    """INFO is denied to a monitor: skipped, with the mend, and the other checks are made."""
    with guarded_redis(tmp_path) as (url, _):
        found = findings(as_user(url, "monitor"))
    assert found["redis.version"].status == "skipped"
    assert "+info" in found["redis.version"].mend
    assert found["redis.clock"].status == "ok"
