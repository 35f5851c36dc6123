"""How many more items the window lets in, and how often to ask.

Invariant: queued + running + groups in the stream (unread, or not yet acknowledged by every consumer group) never exceeds the
window through a producer; `admit.lua` checks it again, this is only what to try. Nothing here sleeps past a stop.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import cast

import redis

from distaff.keys import RunKeys
from distaff.runs import RunState

SHORTEST_WAIT_S = 0.01
LONGEST_WAIT_S = 0.5
GROWTH = 1.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """The run's state and the length of its stream, of one moment."""

    state: RunState
    unread: int

    def room(self, window: int) -> int:
        """Items that may be admitted now; negative when the window was smaller than what an operator put back."""
        return window - (self.state.admitted - self.state.settled) - self.unread


def read_standing(client: redis.Redis, run: str) -> Standing | None:
    """Both numbers in one transaction; None when there is no such run."""
    keys = RunKeys(run)
    pipeline = client.pipeline(transaction=True)
    pipeline.hgetall(keys.state)
    pipeline.xlen(keys.groups)
    fields, unread = pipeline.execute()
    if not fields:
        return None
    return Standing(state=RunState.from_hash(cast("dict[bytes, bytes]", fields)), unread=cast("int", unread))


class Pace:
    """Waits that grow from 10 ms to 0.5 s while nothing happens."""

    def __init__(self, stop: threading.Event) -> None:
        self._stop = stop
        self._next_s = SHORTEST_WAIT_S

    def wait(self) -> None:
        """Sleep a little longer than the last time, or until the stop."""
        self._stop.wait(self._next_s)
        self._next_s = min(self._next_s * GROWTH, LONGEST_WAIT_S)

    def reset(self) -> None:
        """Something happened: the next wait is short again."""
        self._next_s = SHORTEST_WAIT_S
