"""Roll out: play one task once, within a deadline.

Invariant: returns an Episode whatever the environment does, at the latest UNWIND_S after the deadline; code that swallows its
cancellation is left behind, counted, and what it returns later is thrown away.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Protocol

import structlog

from distaff.environments.protocol import Episode, ModelFactory, failed_episode
from distaff.types import JSON, RolloutFailure

log = structlog.get_logger(__name__)
UNWIND_S = 5.0


class Playable(Protocol):
    """The part of an Environment that plays."""

    async def play(self, task: Mapping[str, JSON], model_for: ModelFactory) -> Episode: ...


class Roller:
    """Plays rollouts on the worker's loop."""

    def __init__(self) -> None:
        self._strays: set[asyncio.Task[Episode]] = set()

    @property
    def strays(self) -> int:
        """Rollouts that ignored their cancellation and still run."""
        return len(self._strays)

    async def play(
        self, environment: Playable, task: Mapping[str, JSON], model_for: ModelFactory, *, timeout_s: float
    ) -> Episode:
        """One episode; past the deadline, one with a `timeout` failure. Raises only CancelledError, after cleaning up."""
        play = asyncio.get_running_loop().create_task(environment.play(task, model_for))
        try:
            await asyncio.wait({play}, timeout=timeout_s)
        except asyncio.CancelledError:
            await self._unwind(play)
            raise
        if play.done() and not play.cancelled():
            return play.result()
        await self._unwind(play)
        return failed_episode(
            RolloutFailure(kind="timeout", boundary="deadline", message=f"the rollout took longer than {timeout_s:g} s")
        )

    async def _unwind(self, play: asyncio.Task[Episode]) -> None:
        play.cancel()
        await asyncio.wait({play}, timeout=UNWIND_S)
        if not play.done():
            log.error("rollout.left_behind", strays=len(self._strays) + 1)
            self._strays.add(play)
            play.add_done_callback(self._strays.discard)
