"""What `distaff doctor` asks of Redis.

Invariant: writes nothing, touches no queue and no run: INFO, TIME, one CONFIG GET, and commands that cannot change anything (`doctor_rights`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import redis

from distaff.cli import doctor_rights
from distaff.clients import connect, ping, redact_url
from distaff.errors import ConfigurationError, DistaffError
from distaff.findings import Finding, failed, skipped
from distaff.safety import check_eviction, check_protection, check_version

TIMEOUT_S = 5.0
SKEW_S = 1.0
LITTLE_MEMORY = 0.1
"""Of maxmemory, that is left."""
ROLE, VERSION, EVICTION, PERSISTENCE, MEMORY, CLOCK, RIGHTS = (
    f"redis.{name}" for name in ("role", "version", "eviction", "persistence", "memory", "clock", "rights")
)
_READ_BY_INFO = (ROLE, VERSION, EVICTION, PERSISTENCE, MEMORY)
_REST = (*_READ_BY_INFO, CLOCK, RIGHTS)
_APPEND = "redis-cli CONFIG SET appendonly yes (and in redis.conf); docs/durability.md says what each setting keeps"


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """Which server, and for what. names: of the pool and the run whose keys the user needs."""

    url: str
    allow_unprotected: bool
    pool: str
    run: str


def examine(asked: Asked, *, now: Callable[[], float] = time.time) -> Iterator[Finding]:
    """Every finding about Redis. Raises ConfigurationError for a URL that is none."""
    with connect(asked.url, client_name="distaff-doctor", socket_timeout_s=TIMEOUT_S) as client:
        begun = time.monotonic()
        try:
            ping(client, asked.url)
        except DistaffError as error:
            yield failed("redis.reachable", error)
            yield from (skipped(check, "Redis does not answer") for check in ("redis.protection", *_REST))
            return
        taken_s = time.monotonic() - begun
        fact = f"{redact_url(asked.url)} answers in {taken_s * 1000:.0f} ms"
        yield Finding(check="redis.reachable", status="ok", fact=fact, seconds=taken_s)
        yield _protection(client, asked)
        try:
            yield from _server(client, asked.url)
            yield _clock(client, now)
            yield doctor_rights.rights(client, asked.url, pool=asked.pool, run=asked.run)
        except (redis.exceptions.RedisError, OSError) as error:
            mend = "look into the server's log; it answered a moment ago"
            yield failed("redis.answers", error, mend=mend)


def _protection(client: redis.Redis, asked: Asked) -> Finding:
    check = "redis.protection"
    try:
        check_protection(client, asked.url)
    except ConfigurationError as error:
        if not asked.allow_unprotected:
            return failed(check, error)
        fact = "others reach it without a password, which allow_unprotected accepts"
        return Finding(check=check, status="warning", fact=fact, mend="set a password (requirepass, or an ACL user)")
    return Finding(check=check, status="ok", fact="nobody reaches it from elsewhere without a password")


def _server(client: redis.Redis, url: str) -> Iterator[Finding]:
    """What INFO tells."""
    try:
        info: Mapping[str, Any] = client.info()
    except redis.exceptions.NoPermissionError:
        mend = "let the user call INFO (ACL SETUSER ... +info)"
        yield from (skipped(check, "the user may not call INFO", mend=mend) for check in _READ_BY_INFO)
        return
    yield _role(info)
    version = str(info.get("valkey_version") or info.get("redis_version", ""))
    name = "Valkey" if info.get("valkey_version") else "Redis"
    yield _of(VERSION, f"{name} {version}", lambda: check_version(str(info.get("redis_version", "")), url))
    policy = str(info.get("maxmemory_policy", "noeviction"))
    yield _of(EVICTION, f"maxmemory-policy {policy}", lambda: check_eviction(policy, url))
    yield _persistence(client, info)
    yield _memory(info)


def _of(check: str, fact: str, look: Callable[[], None]) -> Finding:
    try:
        look()
    except ConfigurationError as error:
        return failed(check, error)
    return Finding(check=check, status="ok", fact=fact)


def _role(info: Mapping[str, Any]) -> Finding:
    if str(info.get("role")) == "slave":
        fact = f"is a replica of {info.get('master_host')}:{info.get('master_port')} and takes no writes"
        return Finding(check=ROLE, status="failed", fact=fact, mend="give the primary's URL (redis_url)")
    if info.get("cluster_enabled"):
        fact = "is a node of a Redis Cluster, which distaff does not speak"
        return Finding(
            check=ROLE, status="failed", fact=fact, mend="use one server, with replicas where it must not fail"
        )
    return Finding(check=ROLE, status="ok", fact="a primary")


def _persistence(client: redis.Redis, info: Mapping[str, Any]) -> Finding:
    states = ("rdb_last_bgsave_status", "aof_last_write_status", "aof_last_bgrewrite_status")
    broken = [name for name in states if str(info.get(name, "ok")) != "ok"]
    if broken:
        fact = f"its last write to disk failed ({', '.join(broken)}); Redis then refuses to be written to"
        return Finding(
            check=PERSISTENCE, status="failed", fact=fact, mend="look for a full or read-only disk, and into its log"
        )
    if info.get("aof_enabled"):
        return Finding(check=PERSISTENCE, status="ok", fact="append-only file")
    if _snapshots(client):
        fact = "snapshots only: a restart goes back to the last one"
    else:
        fact = "no append-only file: a restart loses queue, results nobody has read, and the run"
    return Finding(check=PERSISTENCE, status="warning", fact=fact, mend=_APPEND)


def _snapshots(client: redis.Redis) -> bool:
    try:
        return bool(client.config_get("save").get("save"))
    except redis.exceptions.ResponseError:  # not allowed, or renamed by whoever hosts it
        return False


def _memory(info: Mapping[str, Any]) -> Finding:
    used, most = int(info.get("used_memory", 0)), int(info.get("maxmemory", 0))
    if not most:
        machine = int(info.get("total_system_memory", 0))
        of = f"; the machine has {_size(machine)}" if machine else ""
        return Finding(check=MEMORY, status="ok", fact=f"{_size(used)} used, no maxmemory{of}")
    left = most - used
    fact = f"{_size(max(0, left))} of {_size(most)} (maxmemory) left"
    mend = "raise maxmemory, lower producer.window, or let consumers acknowledge groups"
    if left <= 0:
        return Finding(check=MEMORY, status="failed", fact=fact, mend=mend)
    tight = left < LITTLE_MEMORY * most
    return Finding(check=MEMORY, status="warning" if tight else "ok", fact=fact, mend=mend if tight else "")


def _size(count: int) -> str:
    return f"{count / (1 << 30):.1f} GiB" if count >= 1 << 30 else f"{count / (1 << 20):.0f} MiB"


def _clock(client: redis.Redis, now: Callable[[], float]) -> Finding:
    before = now()
    try:
        seconds, microseconds = client.time()
    except redis.exceptions.NoPermissionError:
        return skipped(CLOCK, "the user may not call TIME", mend="let the user call TIME (ACL SETUSER ... +time)")
    skew_s = seconds + microseconds / 1e6 - (before + now()) / 2
    fact = f"{abs(skew_s):.1f} s {'ahead of' if skew_s > 0 else 'behind'} this machine's"
    if abs(skew_s) <= SKEW_S:
        return Finding(check=CLOCK, status="ok", fact="as this machine's, within a second")
    mend = "leases are kept on the server's clock, so nothing is lost; set both by NTP, or times in logs do not agree"
    return Finding(check=CLOCK, status="warning", fact=fact, mend=mend)
