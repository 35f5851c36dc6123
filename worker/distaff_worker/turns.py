"""Spreads work that becomes ready all at once over many turns of the event loop.

Invariant: callers pass in the order they came, at most `width` of them in one turn, so that a thousand answers that arrive
together cost the loop a thousand short turns instead of one long one.
"""

from __future__ import annotations

import asyncio
from collections import deque

WIDTH = 3
"""Of half a millisecond each."""


class Turnstile:
    """Used on one loop."""

    def __init__(self, width: int = WIDTH) -> None:
        self._width = width
        self._passed = 0
        self._waiting: deque[asyncio.Future[None]] = deque()

    async def turn(self) -> None:
        """Return now if fewer than `width` callers passed in this turn of the loop, otherwise in a later turn."""
        loop = asyncio.get_running_loop()
        if self._passed == 0 and not self._waiting:
            loop.call_soon(self._next)
        if self._passed < self._width and not self._waiting:
            self._passed += 1
            return
        mine = loop.create_future()
        self._waiting.append(mine)
        await mine

    def _next(self) -> None:
        self._passed = 0
        while self._waiting and self._passed < self._width:
            waiter = self._waiting.popleft()
            if not waiter.done():
                waiter.set_result(None)
                self._passed += 1
        if self._passed:
            asyncio.get_running_loop().call_soon(self._next)
