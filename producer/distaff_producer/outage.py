"""What the producer does while Redis is away, full or failing over: it waits and asks again, within a budget.

Invariant: only errors that may pass are waited for. A full Redis is waited for without end, since it is the consumers that
make room; every other outage has a budget.
"""

from __future__ import annotations

import random
import threading
import time

import redis
import structlog

from distaff.clients import is_full, is_refusal, may_pass, redact_url
from distaff.errors import RedisUnavailable
from distaff.redaction import redact

FIRST_WAIT_S = 0.1
LONGEST_WAIT_S = 5.0

log = structlog.get_logger(__name__)


class Outage:
    """One outage after another: `wait` in each failure, `over` after each success."""

    def __init__(self, url: str, *, budget_s: float, stop: threading.Event) -> None:
        self._url = redact_url(url)
        self._budget_s = budget_s
        self._stop = stop
        self._since: float | None = None
        self._wait_s = FIRST_WAIT_S

    def over(self) -> None:
        """Redis answered."""
        if self._since is not None:
            log.info("redis.recovered", url=self._url, seconds=round(time.monotonic() - self._since, 3))
        self._since = None
        self._wait_s = FIRST_WAIT_S

    def wait(self, error: redis.exceptions.RedisError) -> None:
        """Wait before the next try. Raises RedisUnavailable when `error` will not pass or the budget is used up."""
        if not may_pass(error):
            mend = "give its user the rights of docs/acl.md" if is_refusal(error) else "mend it"
            raise RedisUnavailable(
                f"Redis at {self._url} refuses a command of the producer: {redact(str(error))}. The run stays open; {mend} and "
                "produce again: it goes on where it stands"
            ) from None
        started = self._since is None
        self._since = time.monotonic() if self._since is None else self._since
        if started:
            log.warning("redis.lost", url=self._url, error=type(error).__name__, detail=redact(str(error)))
        away_s = time.monotonic() - self._since
        if away_s > self._budget_s and not is_full(error):
            raise RedisUnavailable(
                f"Redis at {self._url} has not answered for {away_s:.0f} s ({type(error).__name__}). The run stays open; start "
                "Redis and produce again: it goes on where it stands"
            ) from None
        self._stop.wait(self._wait_s * random.uniform(0.5, 1.0))  # noqa: S311 - jitter
        self._wait_s = min(self._wait_s * 2, LONGEST_WAIT_S)
