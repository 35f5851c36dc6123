"""One step of a consumer, repeated while Redis is away.

Invariant: only steps that may be sent twice go through here. An error that does not heal by waiting is raised at once.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

from redis import exceptions

from distaff.clients import is_full, is_refusal, may_pass, refusal
from distaff.consuming_steps import Call, Pause, RunScript, Steps
from distaff.errors import RedisUnavailable

_FIRST_PAUSE_S = 0.05
_LONGEST_PAUSE_S = 2.0


def until_answered(
    step: Call | RunScript,
    *,
    budget_s: float,
    clock: Callable[[], float],
    full: bool,
    on_failure: Callable[[], None],
    user: str = "the user of this connection",
) -> Steps[Any]:
    """The reply to `step`, with pauses that double and jitter; `on_failure` is called after each try that failed.

    user: as whom, for the message. full: let a full server's error through, which is otherwise waited out.
    Raises RedisUnavailable (refused credentials; no answer within `budget_s` of the first failure), ResponseError.
    """
    give_up, pause_s = None, _FIRST_PAUSE_S
    while True:
        try:
            return (yield step)
        except (exceptions.RedisError, OSError) as error:
            if is_refusal(error):
                raise RedisUnavailable(f"Redis {refusal(error, user)}") from None
            if not may_pass(error) or (full and is_full(error)):
                raise
            problem = type(error).__name__
        on_failure()
        now = clock()
        give_up = give_up or now + budget_s
        if now >= give_up:
            raise RedisUnavailable(
                f"Redis gave no usable answer for more than {budget_s:g} s ({problem}); nothing is lost: start "
                "the consumer again when it is back, or raise reconnect_s"
            ) from None
        yield Pause(pause_s * (0.5 + random.random()))  # noqa: S311 - jitter
        pause_s = min(pause_s * 2, _LONGEST_PAUSE_S)
