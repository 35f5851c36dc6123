"""Deletes a run: everything it did to Redis, RQ's part included.

Invariant: the run's own keys go first and together, so that from then on no producer admits, no worker plays and no result is
written for it; what is left after a crash in the middle is found again by calling it again. Other runs on the same
pool are not touched. Part of the base install: RQ's key names are written out here (RQ 3.0), with RQ's own prefix variable.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import cast

import redis

from distaff import scripts
from distaff.errors import ConfigurationError
from distaff.keys import RUNS, RunKeys, parse_job_id, rq_prefix

REGISTRIES = ("wip", "finished", "failed", "deferred", "ready", "scheduled", "canceled")
SCAN_COUNT = 1000


def delete_run(client: redis.Redis, run: str, *, force: bool = False) -> bool:
    """Remove every trace of the run and say whether there was one.

    Raises ConfigurationError when workers are playing items of it, unless `force`: then they lose their leases, and what
    they were playing is thrown away.
    """
    known = bool(client.sismember(RUNS, run)) or bool(client.exists(RunKeys(run).state))
    queues = _queues(client)
    if not force:
        _refuse_leased(client, run, queues)
    keys = RunKeys(run)
    client.unlink(keys.state, keys.config, keys.settled, keys.dead, keys.groups, keys.policy)
    purge = scripts.register(client, "purge_queue")
    for name in queues:
        registries = [f"{rq_prefix()}:{registry}:{name}" for registry in REGISTRIES]
        for registry in registries:
            _remove(client, registry, run)
        purge(keys=[f"{rq_prefix()}:queue:{name}", f"{rq_prefix()}:queues", *registries], args=[run])
    _unlink_all(client, _job_keys(client, run))
    _unlink_all(client, _scan(client, f"{keys.state.removesuffix('state')}*"))
    client.srem(RUNS, run)
    return known


def _queues(client: redis.Redis) -> list[str]:
    beginning = f"{rq_prefix()}:queue:"
    return sorted(key.decode().removeprefix(beginning) for key in _members(client, f"{rq_prefix()}:queues"))


def _members(client: redis.Redis, key: str) -> set[bytes]:
    return cast("set[bytes]", client.smembers(key))


def _refuse_leased(client: redis.Redis, run: str, queues: list[str]) -> None:
    seconds, micros = client.time()
    now = seconds + micros / 1e6
    held = sum(score > now for name in queues for _, score in _entries(client, f"{rq_prefix()}:wip:{name}", run))
    if held:
        raise ConfigurationError(
            f"run {run!r} is being played: workers hold the leases of {held} of its items. Stop the workers and try again, "
            "or delete it by force: what they are playing is then thrown away"
        )


def _entries(client: redis.Redis, key: str, run: str) -> Iterator[tuple[bytes, float]]:
    """Members of a registry that are the run's: "<job id>" or "<job id>:<execution id>"."""
    for member, score in client.zscan_iter(key, match=f"{run}-*", count=SCAN_COUNT):
        if _is_of(member.decode().partition(":")[0], run):
            yield member, score


def _is_of(job: str, run: str) -> bool:
    parsed = parse_job_id(job)
    return parsed is not None and parsed[0] == run


def _remove(client: redis.Redis, key: str, run: str) -> None:
    members = [member for member, _ in _entries(client, key, run)]
    if members:
        client.zrem(key, *members)


def _job_keys(client: redis.Redis, run: str) -> Iterator[bytes]:
    """Job hashes, their results, executions and dependents: "<prefix>:<kind>:<job id>[:<more>]"."""
    beginning = f"{rq_prefix()}:"
    for key in _scan(client, f"{beginning}*:{run}-*"):
        parts = key.decode().removeprefix(beginning).split(":")
        if len(parts) > 1 and _is_of(parts[1], run):
            yield key


def _scan(client: redis.Redis, pattern: str) -> Iterator[bytes]:
    return cast("Iterator[bytes]", client.scan_iter(match=pattern, count=SCAN_COUNT))


def _unlink_all(client: redis.Redis, keys: Iterator[bytes]) -> None:
    batch: list[bytes] = []
    for key in keys:
        batch.append(key)
        if len(batch) == SCAN_COUNT:
            client.unlink(*batch)
            batch.clear()
    if batch:
        client.unlink(*batch)
