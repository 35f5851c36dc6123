"""What playing an item may end in. Data only; `settle` carries it out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol, TypeAlias

from distaff.types import DeadKind, DeadLetter, RolloutItem
from distaff_worker.leases import Counts, Lease


@dataclass(frozen=True, slots=True, kw_only=True)
class Emit:
    """A scored group, encoded."""

    fields: Mapping[Any, Any]
    """Of the stream entry."""
    counts: Counts
    size_bytes: int
    reward_mean: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Bury:
    """Give the item up."""

    letter: DeadLetter
    status: Literal["failed", "stopped"] = "failed"
    dropped: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Retry:
    """One attempt failed; the item goes to the back of the queue."""

    kind: DeadKind
    boundary: str
    message: str


Outcome: TypeAlias = Emit | Bury | Retry


class Player(Protocol):
    """Turns a leased item into an outcome. Used from one event loop, many items at once."""

    async def open(self) -> None: ...

    async def play(self, lease: Lease, item: RolloutItem) -> Outcome:
        """Raises FatalRun when this worker cannot play the run at all; CancelledError passes through, cleaned up."""
        ...

    async def close(self) -> None: ...
