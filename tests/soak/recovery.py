"""How long the items of a killed worker wait until another has them.

Invariant: only reads. An item counts from the kill until it is leased anew; one that is a suspect by then (lost twice or more) is counted
apart, because suspects are made to wait for each other.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import redis

from distaff_worker.rq_schema import JOB_PREFIX, PoolKeys
from tests.soak.roles import Role

LOOK_EVERY_S = 0.1
SUSPECT = 2


@dataclass(slots=True)
class _Orphan:
    job: str
    execution: bytes
    killed: float
    quiet: bool
    queued_s: float | None = None
    crowded: bool = False
    """It had to wait for a slot: every worker was full."""


@dataclass(slots=True)
class Recovery:
    """Seconds, one for each item that was taken over."""

    client: redis.Redis
    pool: str
    workers: Callable[[], list[int]]
    """Pids of all worker processes."""
    queued_s: list[float] = field(default_factory=list)
    """Kill to back on the queue, in quiet."""
    quiet_s: list[float] = field(default_factory=list)
    """Kill to re-dispatch when nothing else was wrong, all other workers were there and some had a free slot."""
    busy_s: list[float] = field(default_factory=list)
    """The same with other faults around, or every slot taken."""
    suspect_s: list[float] = field(default_factory=list)
    _orphans: list[_Orphan] = field(default_factory=list)
    _full: bool = False
    _looked: float = 0.0

    @contextmanager
    def watching(self, role: Role, *, quiet: bool) -> Iterator[None]:
        """Notes what the worker holds, before it is killed inside."""
        held: list[tuple[str, bytes]] = []
        try:
            if role.name.startswith("worker"):
                held = self._held_by(role.pid)
                quiet = quiet and self._others_are_there()
        except redis.RedisError:
            pass  # not one of those that are measured
        yield
        killed = time.monotonic()
        self._orphans += [_Orphan(job, execution, killed, quiet) for job, execution in held]

    def tick(self) -> None:
        if not self._orphans or time.monotonic() < self._looked + LOOK_EVERY_S:
            return
        self._looked = time.monotonic()
        try:
            self._full = not self._has_room()
            self._orphans = [orphan for orphan in self._orphans if not self._found(orphan)]
        except redis.RedisError:
            return

    @property
    def waiting(self) -> int:
        """Items nobody has yet."""
        return len(self._orphans)

    def _registered(self) -> dict[int, bytes]:
        """Pid -> key of every worker that has registered and lives."""
        keys: Any = self.client.smembers("rq:workers")
        pids = {int(key.decode().split(".")[-2]): key for key in keys}
        return {pid: pids[pid] for pid in self.workers() if pid in pids}

    def _has_room(self) -> bool:
        """Whether some worker says it has a free slot."""
        told: Any = [self.client.hmget(key, ["running", "slots"]) for key in self._registered().values()]
        return any(int(running or 0) < int(slots or 0) for running, slots in told)

    def _others_are_there(self) -> bool:
        """Whether every worker of the farm is registered: one that is still starting takes over nothing."""
        return len(self._registered()) == len(self.workers())

    def _held_by(self, pid: int) -> list[tuple[str, bytes]]:
        held = []
        leases: Any = self.client.zrange(PoolKeys.of(self.pool).wip, 0, -1)
        for composite in leases:
            job, _, execution = composite.decode().partition(":")
            name: Any = self.client.hget(f"{JOB_PREFIX}{job}", "worker_name") or b""
            if name.decode().split(".")[-2:-1] == [str(pid)]:
                held.append((job, execution.encode()))
        return held

    def _found(self, orphan: _Orphan) -> bool:
        """Whether there is nothing to wait for any more."""
        status, execution, lost = self.client.hmget(
            f"{JOB_PREFIX}{orphan.job}", ["status", "distaff_exec", "distaff_lost"]
        )
        waited_s = time.monotonic() - orphan.killed
        if status == b"queued":
            orphan.queued_s = waited_s if orphan.queued_s is None else orphan.queued_s
            orphan.crowded = orphan.crowded or self._full
        if (status == b"started" and execution == orphan.execution) or status == b"queued":
            return False
        if status != b"started":
            return True  # settled before the kill, or between two looks
        if int(lost or 0) >= SUSPECT:
            self.suspect_s.append(waited_s)
        else:
            (self.quiet_s if orphan.quiet and not orphan.crowded else self.busy_s).append(waited_s)
        if orphan.quiet:
            self.queued_s.append(orphan.queued_s if orphan.queued_s is not None else waited_s)
        return True
