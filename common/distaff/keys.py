"""All Redis key names, in one place.

Invariant: everything that belongs to one run starts with `distaff:run:<run>:`. RQ's own keys are RQ's business
(`distaff_worker.rq_schema`); a job is tied to its item by `job_id`.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass

PREFIX = "distaff"
RUNS = f"{PREFIX}:runs"
"""Set of the names of all runs that were ever opened and not deleted."""

RUN_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}")
"""A run's name is part of RQ job ids, which allow letters, digits, "_" and "-" only."""

MAX_SEQ = 2**32 - 1
"""The last bit a bitmap can have, and so the last item of a run."""

_JOB_ID = re.compile(rf"({RUN_NAME.pattern})-(\d{{9,}})")


@dataclass(frozen=True, slots=True)
class RunKeys:
    """The keys of one run."""

    run: str

    def _key(self, suffix: str) -> str:
        return f"{PREFIX}:run:{self.run}:{suffix}"

    @property
    def config(self) -> str:
        """String: the RunConfig as JSON."""
        return self._key("config")

    @property
    def state(self) -> str:
        """Hash; see STATE_FIELDS."""
        return self._key("state")

    @property
    def groups(self) -> str:
        """Stream of scored groups."""
        return self._key("groups")

    def parked(self, group: str) -> str:
        """Stream of the deliveries a consumer group gave up (undecodable, or delivered too often)."""
        return self._key(f"groups:parked:{group}")

    @property
    def settled(self) -> str:
        """Bitmap: bit `seq` is 1 when the item was emitted or is a dead letter."""
        return self._key("settled")

    @property
    def dead(self) -> str:
        """Hash: seq -> DeadLetter as JSON."""
        return self._key("dead")

    @property
    def policy(self) -> str:
        """Hash: `version` (int) and `published` (Unix seconds)."""
        return self._key("policy")


STATE_FIELDS = {
    "status": '"open" while the producer admits, "closed" when nothing more will come',
    "admitted": "items admitted so far = the seq of the next one (the producer's cursor)",
    "target": "items the producer intends to admit, absent while unknown (infinite)",
    "emitted": "groups appended to the stream",
    "dead": "dead letters (dropped groups included)",
    "dropped": "of these, groups the run's filter refused",
    "retried": "attempts that failed and were put back",
    "lost": "leases that expired and were put back",
    "handed_back": "items a stopping worker put back",
    "rollouts": "rollouts in emitted groups",
    "samples": "samples in emitted groups",
    "tokens": "tokens in emitted groups",
    "trained_tokens": "of these, the ones under the loss mask",
    "reward_sum": "sum of the rewards of scored rollouts (float)",
    "reward_count": "number of scored rollouts",
    "opened": "Unix seconds",
    "closed": "Unix seconds",
}
"""Fields of the hash `RunKeys.state` and what they mean."""


def swept_key(pool: str) -> str:
    """When the expired leases of a pool were looked for last (sweep.lua)."""
    return f"{PREFIX}:swept:{pool}"


def rq_prefix() -> str:
    """What RQ's key names begin with: its own variable RQ_KEY_PREFIX, or "rq"."""
    return os.environ.get("RQ_KEY_PREFIX", "rq")


def job_id(run: str, seq: int) -> str:
    """The RQ job id, which is also the group id: "<run>-<seq, nine digits>"."""
    return f"{run}-{seq:09d}"


def parse_job_id(text: str) -> tuple[str, int] | None:
    """(run, seq) of a job id made by `job_id`, None for any other: also for one that only looks like it ("r-1", "r-0000000001")."""
    match = _JOB_ID.fullmatch(text)
    if match is None or len(match[2]) > len(str(MAX_SEQ)):
        return None
    seq = int(match[2])
    return (match[1], seq) if seq <= MAX_SEQ and job_id(match[1], seq) == text else None
