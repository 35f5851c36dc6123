"""A GroupConsumer that says when it is about to wait, so that its owner can write out what it holds, and that can be stopped.

Invariant: nothing read is lost by a stop: what was not acknowledged is delivered again.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, Unpack

import redis

from distaff.consumer import GroupConsumer
from distaff.consuming_steps import Call, ConsumerOptions, Pause, Step


class Stopped(Exception):
    """`stop` was set. Not an error: how the iteration ends."""


class StoppableConsumer(GroupConsumer):
    """before_wait is called in the iterating thread when no group is at hand; it may acknowledge. Iteration raises Stopped."""

    def __init__(
        self,
        run: str,
        client: redis.Redis,
        *,
        stop: threading.Event,
        before_wait: Callable[[], None],
        **options: Unpack[ConsumerOptions],
    ) -> None:
        super().__init__(run, client, **options)
        self._stop = stop
        self._before_wait = before_wait
        self._in_call = False

    def _perform(self, step: Step) -> Any:
        if _waits(step):
            self._announce()
            if self._stop.is_set():
                raise Stopped
        return super()._perform(step)

    def _announce(self) -> None:
        """Not again for a wait inside of what `before_wait` does."""
        if self._in_call:
            return
        self._in_call = True
        try:
            self._before_wait()
        finally:
            self._in_call = False


def _waits(step: Step) -> bool:
    return isinstance(step, Pause) or (isinstance(step, Call) and bool(step.options.get("block")))
