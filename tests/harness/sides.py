"""One end of a proxied connection, as asyncio calls it.

Invariant: while one side cannot be written to, the other is not read.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable


class Side(asyncio.Protocol):
    """One transport; what happens on it goes to `on_open`, `on_data` and `on_lost`."""

    def __init__(self, on_open: Callable[[asyncio.Transport], None]) -> None:
        self.on_open = on_open
        self.on_data: Callable[[bytes], None] = lambda data: None
        self.on_lost: Callable[[], None] = lambda: None
        self.other: Side | None = None
        self.transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        if not isinstance(transport, asyncio.Transport):
            raise TypeError(f"not a stream: {transport!r}")
        self.transport = transport
        self.on_open(transport)

    def data_received(self, data: bytes) -> None:
        self.on_data(data)

    def connection_lost(self, exc: Exception | None) -> None:
        self.on_lost()

    def pause_writing(self) -> None:
        if self.other is not None and self.other.transport is not None:
            self.other.transport.pause_reading()

    def resume_writing(self) -> None:
        if self.other is not None and self.other.transport is not None:
            self.other.transport.resume_reading()
