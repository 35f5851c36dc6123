"""What the producer says of its work: progress while it runs, a report at the end, and the count behind both.

Invariant: every advance of the run's cursor is counted once, as ours or as another producer's.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Phase = Literal["admitting", "window full", "waiting for groups", "closed"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """Where the run stands, for a display."""

    run: str
    phase: Phase
    """ "window full": consumers or workers are behind. "waiting for groups": all is admitted, and groups may still be dropped."""
    admitted: int
    target: int | None
    """None while there is no end: an infinite taskset without a limit."""
    emitted: int
    dead: int
    dropped: int
    unread: int
    """Groups in the stream that a consumer group still has to acknowledge."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProduceReport:
    """What one call did."""

    run: str
    admitted: int
    """By this call."""
    already_there: int
    """When this call began."""
    elsewhere: int
    """By another producer while this call ran."""
    restored: int
    """Items that were admitted before, had got lost from the queue and were put back by this call."""
    replaced: int
    """Items admitted in the run so far in place of dropped groups."""
    total: int
    """Items in the run."""
    was_closed: bool
    """The run was closed before this call, which admitted nothing."""
    closed: bool
    """The run is closed: nothing more will come. False when the call was stopped."""
    seconds: float

    def summary(self) -> str:
        """The report in one line."""
        back = f"{self.restored} put back on the queue"
        if self.was_closed:
            done = back if self.restored else "nothing to do"
            return f"run {self.run} was closed already, with {self.total} items: {done}"
        parts = [f"{self.admitted} admitted now", f"{self.already_there} were there already"]
        parts += [back] if self.restored else []
        parts += [f"{self.elsewhere} by another producer"] if self.elsewhere else []
        parts += [f"{self.replaced} in place of dropped groups"] if self.replaced else []
        end = "closed" if self.closed else "still open: produce again to go on"
        return f"run {self.run} has {self.total} items ({', '.join(parts)}) and is {end}"


class Tally:
    """Counts who admitted what, from the cursor alone: also for a batch whose reply was lost."""

    def __init__(self, cursor: int) -> None:
        self.already_there = cursor
        self.cursor = cursor
        self.admitted = 0
        self.elsewhere = 0
        self._in_doubt = 0

    def sending(self, count: int) -> None:
        """A batch of `count` items is on its way; until the cursor is seen again it may have been admitted or not."""
        self._in_doubt = count

    def refused(self) -> None:
        """The batch on its way was answered, and not admitted."""
        self._in_doubt = 0

    def follow(self, cursor: int) -> None:
        """The cursor was seen: its advance is ours as far as we sent it, another producer's beyond that.

        A cursor that went back (Redis lost the end of its log) takes from ours: those items are admitted again.
        """
        moved = cursor - self.cursor
        ours = min(moved, self._in_doubt)
        self.admitted += ours
        self.elsewhere += moved - ours
        self._in_doubt = 0
        self.cursor = cursor
