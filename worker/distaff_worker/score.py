"""Score groups on an event loop of their own thread, with a deadline.

Invariant: a reward function that blocks holds up neither the worker's loop nor, for longer than one deadline, the scoring of other
groups: a loop that stands still is left behind with its thread, and the groups that were waiting on it are scored
again, each alone on a thread of its own, so that the one to blame fails by itself.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from concurrent.futures import Future

import structlog

from distaff.environments.protocol import Environment, Episode, Score
from distaff.errors import DeadlineExceeded

log = structlog.get_logger(__name__)
PING_S = 1.0

Scores = list[list[Score]]


class _LoopThread:
    """A daemon thread that runs an event loop until it is stopped."""

    def __init__(self, name: str) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        asyncio.set_event_loop(self.loop)
        self.loop.run_forever()
        self.loop.run_until_complete(self.loop.shutdown_asyncgens())
        self.loop.close()

    def stop(self) -> None:
        self.loop.call_soon_threadsafe(self.loop.stop)

    async def answers(self) -> bool:
        """The loop turns within PING_S."""
        ping: Future[None] = asyncio.run_coroutine_threadsafe(asyncio.sleep(0), self.loop)
        done, _ = await asyncio.wait({asyncio.wrap_future(ping)}, timeout=PING_S)
        return bool(done)


class Scorer:
    """Scores groups; `score` is called from the worker's loop."""

    def __init__(self) -> None:
        self._shared = _LoopThread("distaff-score")
        self.abandoned = 0
        """Threads left behind with code that did not end."""

    async def score(self, environment: Environment, episodes: Sequence[Episode], *, timeout_s: float) -> Scores:
        """The environment's scores of one group. Raises DeadlineExceeded after `timeout_s` (after twice that when another
        group's code had blocked the shared thread)."""
        shared = self._shared
        scores = await self._on(shared, environment, episodes, timeout_s)
        if scores is not None:
            return scores
        if await shared.answers():
            raise DeadlineExceeded(f"scoring took longer than {timeout_s:g} s")
        self._leave(shared)
        alone = _LoopThread("distaff-score-alone")
        scores = await self._on(alone, environment, episodes, timeout_s)
        if await alone.answers():
            alone.stop()
        else:
            self.abandoned += 1
        if scores is None:
            raise DeadlineExceeded(f"scoring blocked its thread for longer than {timeout_s:g} s")
        return scores

    def close(self) -> None:
        self._shared.stop()

    def _leave(self, shared: _LoopThread) -> None:
        if self._shared is shared:
            self.abandoned += 1
            log.error("scorer.abandoned", abandoned=self.abandoned)
            self._shared = _LoopThread("distaff-score")

    @staticmethod
    async def _on(
        thread: _LoopThread, environment: Environment, episodes: Sequence[Episode], timeout_s: float
    ) -> Scores | None:
        """None when the deadline passed."""
        future: Future[Scores] = asyncio.run_coroutine_threadsafe(_score(environment, episodes), thread.loop)
        wrapped = asyncio.wrap_future(future)
        try:
            done, _ = await asyncio.wait({wrapped}, timeout=timeout_s)
        except asyncio.CancelledError:
            future.cancel()
            raise
        if not done:
            future.cancel()
            return None
        return wrapped.result()


async def _score(environment: Environment, episodes: Sequence[Episode]) -> Scores:
    return await environment.score(episodes)
