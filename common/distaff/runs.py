"""What a run is doing, read from Redis: for status displays, the producer and the evaluation.

Invariant: a run is read in one command, so that its numbers belong together. Writes nothing; `delete_run` lives in
`distaff.deletion`. Part of the base install: no pydantic, no rq.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, cast

import redis

from distaff.deletion import delete_run
from distaff.keys import RUNS, RunKeys

__all__ = ["RunState", "RunStatus", "delete_run", "list_runs", "read_config_json", "read_state"]

RunStatus = Literal["open", "closed"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunState:
    """The hash `RunKeys.state`; `distaff.keys.STATE_FIELDS` says what each field means."""

    status: RunStatus
    admitted: int
    target: int | None
    """None while unknown: an infinite taskset without a limit."""
    emitted: int
    dead: int
    dropped: int
    retried: int
    lost: int
    handed_back: int
    rollouts: int
    samples: int
    tokens: int
    trained_tokens: int
    reward_sum: float
    reward_count: int
    opened: float
    """Unix seconds, on the server's clock."""
    closed: float | None
    """As `opened`; None while the run is open."""

    @property
    def settled(self) -> int:
        """Items that came to their end, as a group or as a dead letter."""
        return self.emitted + self.dead

    @property
    def ended(self) -> bool:
        """Nothing more will be admitted and everything admitted is settled."""
        return self.status == "closed" and self.settled >= self.admitted

    @classmethod
    def from_hash(cls, fields: Mapping[bytes, bytes]) -> RunState:
        """From the hash as redis-py returns it; an absent counter is 0."""

        def integer(name: str) -> int:
            return int(fields.get(name.encode(), 0))

        def number(name: str) -> float:
            return float(fields.get(name.encode(), 0))

        return cls(
            status="closed" if fields.get(b"status") == b"closed" else "open",
            admitted=integer("admitted"),
            target=integer("target") if b"target" in fields else None,
            emitted=integer("emitted"),
            dead=integer("dead"),
            dropped=integer("dropped"),
            retried=integer("retried"),
            lost=integer("lost"),
            handed_back=integer("handed_back"),
            rollouts=integer("rollouts"),
            samples=integer("samples"),
            tokens=integer("tokens"),
            trained_tokens=integer("trained_tokens"),
            reward_sum=number("reward_sum"),
            reward_count=integer("reward_count"),
            opened=number("opened"),
            closed=number("closed") if b"closed" in fields else None,
        )


def read_state(client: redis.Redis, run: str) -> RunState | None:
    """The run's state, None when there is no such run."""
    fields = cast("dict[bytes, bytes]", client.hgetall(RunKeys(run).state))
    return RunState.from_hash(fields) if fields else None


def read_config_json(client: redis.Redis, run: str) -> str | None:
    """The run's configuration as it was stored, None when there is no such run."""
    stored = cast("bytes | None", client.get(RunKeys(run).config))
    return None if stored is None else stored.decode()


def list_runs(client: redis.Redis) -> list[str]:
    """Names of all runs that were opened and not deleted, sorted."""
    return sorted(name.decode() for name in cast("set[bytes]", client.smembers(RUNS)))
