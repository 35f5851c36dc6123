"""What a role asks of Redis before its work begins, repeated while Redis, which answered a moment ago, does not.

Invariant: only what may be sent twice goes through here. A Redis that was never there is not waited for: that is `clients.ping`'s to say.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import TypeVar

from redis import exceptions

from distaff.clients import may_pass
from distaff.errors import RedisUnavailable
from distaff.redaction import redact

BUDGET_S = 30.0
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.05, 2.0

T = TypeVar("T")


def patiently(
    step: Callable[[], T], *, role: str, give_up: Callable[[], bool] = lambda: False, budget_s: float = BUDGET_S
) -> T:
    """The outcome of `step`. role: for the message, "the worker". give_up: asked between two tries; True ends the waiting.

    Raises RedisUnavailable when Redis has not come back within `budget_s`, and at once what does not pass by waiting.
    """
    end, pause_s = time.monotonic() + budget_s, FIRST_PAUSE_S
    while True:
        try:
            return step()
        except (exceptions.RedisError, OSError) as error:
            if not may_pass(error):
                raise
            if give_up() or time.monotonic() >= end:
                raise RedisUnavailable(
                    f"Redis went away while {role} started ({type(error).__name__}: {redact(str(error))}). Nothing was begun: "
                    "start it again when Redis is back"
                ) from error
        time.sleep(pause_s * random.uniform(0.5, 1.0))  # noqa: S311 - jitter
        pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
