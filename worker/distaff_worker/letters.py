"""Failures and dead letters: what becomes of an item whose group cannot be emitted.

Invariant: every message that leaves here is redacted and bounded.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import cast

from distaff.config import RolloutSection
from distaff.redaction import redact
from distaff.types import DeadKind, DeadLetter, RolloutFailure, RolloutItem, RolloutVerdict
from distaff_worker.leases import Lease
from distaff_worker.outcome import Bury, Outcome, Retry

MESSAGE_LIMIT = 2000
"""Characters."""


class Letters:
    """Writes the dead letters of one worker."""

    def __init__(self, worker: str) -> None:
        self._worker = worker

    def failed(self, limits: RolloutSection, lease: Lease, item: RolloutItem, failure: RolloutFailure) -> Outcome:
        """Another attempt while the failure may pass and attempts are left, else a dead letter."""
        kind = cast(DeadKind, failure.kind)
        if failure.retryable and lease.attempts + 1 < limits.max_attempts:
            return Retry(kind=kind, boundary=failure.boundary, message=_bounded(failure.message))
        return self.bury(lease, item, kind=kind, boundary=failure.boundary, message=failure.message)

    def bury(self, lease: Lease, item: RolloutItem, *, kind: DeadKind, boundary: str, message: str) -> Bury:
        """A dead letter; kind `stopped` and `dropped` say so to RQ and to the run's counters."""
        letter = DeadLetter(
            item=item,
            kind=kind,
            boundary=boundary,
            message=_bounded(message),
            attempts=lease.attempts + 1,
            first=lease.first,
            last=max(lease.server_time, lease.first),
            worker=self._worker,
        )
        return Bury(letter=letter, status="stopped" if kind == "stopped" else "failed", dropped=kind == "dropped")


def too_few(failures: Sequence[RolloutFailure], *, usable: int, size: int, required: int) -> RolloutFailure:
    """One failure that stands for a group with too few usable rollouts: the most frequent kind, the first message of it."""
    kind: RolloutVerdict = Counter(failure.kind for failure in failures).most_common(1)[0][0]
    first = next(failure for failure in failures if failure.kind == kind)
    return RolloutFailure(
        kind=kind,
        boundary=first.boundary,
        message=f"{usable} of {size} rollouts are usable, {required} are needed; {first.message}",
        retryable=any(failure.retryable for failure in failures),
    )


def _bounded(message: str) -> str:
    return redact(message)[:MESSAGE_LIMIT]
