"""Values the delivery steps (claim, beat, settle, sweep) exchange. Data only."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Literal

from distaff.keys import parse_job_id

Settlement = Literal["emitted", "buried", "released", "already", "settled", "lost", "gone"]
"""What a settling script answered. emitted, buried, released, already: ours. settled, lost, gone: somebody else's by now."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Lease:
    """One claimed job: ours until it is settled or the lease runs out."""

    job_id: str
    execution_id: str
    payload: bytes
    """The job's data field, not yet decoded: it may be anybody's."""
    attempts: int
    """Attempts that failed before."""
    lost: int
    """Times it was lost with its worker before."""
    first: float
    """Unix seconds of the first claim."""
    policy_version: int
    """Published policy version at the moment of the claim."""
    claimed: float
    """time.monotonic() of the claim."""
    at: float
    """Unix seconds of the claim, on the server's clock as all times that are stored or shown."""
    life: str = ""
    """When its run was opened: one that was deleted and opened anew under the same name is another run."""

    @property
    def place(self) -> tuple[str, int]:
        """(run, seq) of the item, ("", 0) for a job that is none of ours."""
        return parse_job_id(self.job_id) or ("", 0)

    @property
    def server_time(self) -> float:
        """Unix seconds now on the server's clock, as far as the claim told."""
        return self.at + time.monotonic() - self.claimed

    @property
    def suspect(self) -> bool:
        """Lost so often that it may be what kills workers; a worker plays one such item at a time (claim.lua)."""
        return self.lost >= 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Counts:
    """What a group adds to its run's counters."""

    rollouts: int
    samples: int
    tokens: int
    trained_tokens: int
    reward_sum: float
    reward_count: int
