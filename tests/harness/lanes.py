"""One direction of a proxied connection, under the weather of its network: calm, late, slow, or nothing at all.

Invariant: bytes leave in the order they came, and whole; bad weather holds them, and clearing up sends on what was held.
"""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import dataclass

TICK_S = 0.05


@dataclass(slots=True)
class Weather:
    """Of all connections of a proxy. delay_s: of answers only, so that it is what a round trip costs more."""

    hole: bool = False
    delay_s: float = 0.0
    bytes_per_s: float = 0.0

    @property
    def calm(self) -> bool:
        return not (self.hole or self.delay_s or self.bytes_per_s)


class Lane:
    """Writes to one transport. late: the weather's delay applies."""

    def __init__(self, weather: Weather, loop: asyncio.AbstractEventLoop, *, late: bool) -> None:
        self._weather, self._loop, self._late = weather, loop, late
        self._held: deque[tuple[float, bytes]] = deque()
        self._timer: asyncio.TimerHandle | None = None
        self._transport: asyncio.Transport | None = None
        self._finishing = False

    def open(self, transport: asyncio.Transport) -> None:
        self._transport = transport
        self.pump()

    def send(self, data: bytes | bytearray, *, delay_s: float = 0.0) -> None:
        """Write it now if nothing is in the way, else when its turn comes. delay_s: of this piece alone."""
        if not self._held and not delay_s and self._weather.calm and self._transport is not None:
            self._transport.write(data)
            return
        self._held.append((self._loop.time() + delay_s + self._weather.delay_s * self._late, bytes(data)))
        self.pump()

    def finish(self) -> None:
        """Close the transport when everything has been sent."""
        self._finishing = True
        self.pump()

    def abort(self) -> None:
        """Close it now; what is held is lost."""
        self._held.clear()
        self._cancel()
        if self._transport is not None:
            self._transport.abort()

    def clear_up(self) -> None:
        """Nothing that is held is late any more."""
        self._held = deque((0.0, data) for _, data in self._held)
        self.pump()

    def pump(self) -> None:
        """Send what may go, and come back for the rest."""
        self._cancel()
        if self._transport is None or self._weather.hole:
            return
        while self._held:
            due, data = self._held[0]
            if due > self._loop.time():
                self._timer = self._loop.call_at(due, self.pump)
                return
            self._held.popleft()
            if self._weather.bytes_per_s:
                self._send_piece(data)
                return
            self._transport.write(data)
        if self._finishing:
            self._transport.close()

    def _send_piece(self, data: bytes) -> None:
        if self._transport is None:
            return
        size = max(1, int(self._weather.bytes_per_s * TICK_S))
        self._transport.write(data[:size])
        if len(data) > size:
            self._held.appendleft((0.0, data[size:]))
        pause_s = min(size, len(data)) / self._weather.bytes_per_s
        self._timer = self._loop.call_later(pause_s, self.pump)

    def _cancel(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
