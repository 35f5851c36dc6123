"""A TCP proxy in front of an HTTP server, or of anything else, whose network can fail in every way a network does.

Invariant: bytes pass unchanged and in order until a fault is asked for; a fault does to the client's connection what it says and
nothing more. Lives on a thread of its own.
"""

from __future__ import annotations

import asyncio
import socket
import struct
from types import TracebackType

from tests.harness.lanes import Lane, Weather
from tests.harness.loop_thread import LoopThread
from tests.harness.sides import Side


class ByteProxy:
    """`with ByteProxy(host, port) as proxy`: `proxy.url` is the server as its clients see it."""

    def __init__(self, host: str, port: int, *, scheme: str = "http") -> None:
        self._host, self._upstream_port, self._scheme = host, port, scheme
        self._thread = LoopThread("byte-proxy")
        self._weather = Weather()
        self._links: set[_Link] = set()
        self._server: asyncio.Server | None = None
        self._budget: int | None = None
        self._accepted = 0
        self.port = 0

    def __enter__(self) -> ByteProxy:
        self._thread.start()
        try:
            self._thread.run(self._listen())
        except BaseException:
            self._thread.stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._thread.call(self._close)
        self._thread.stop()

    @property
    def url(self) -> str:
        return f"{self._scheme}://127.0.0.1:{self.port}"

    @property
    def open_connections(self) -> int:
        """Connections that clients have open now."""
        return len(self._links)

    @property
    def accepted(self) -> int:
        """Connections that clients have ever opened."""
        return self._accepted

    def reset(self) -> None:
        """Every connection there is is reset (RST); new ones are welcome."""
        self._thread.call(self._reset)

    def half_open(self) -> None:
        """The server's end of every connection there is is gone and the client is not told; `heal` resets them."""

        def lose() -> None:
            for link in self._links:
                link.lose_server()

        self._thread.call(lose)

    def black_hole(self) -> None:
        """Everything is taken and nothing is passed on, in both directions, until `heal`; connections are accepted."""
        self._change(Weather(hole=True))

    def delay(self, seconds: float) -> None:
        """Every answer comes so much later, until `heal`."""
        self._change(Weather(delay_s=seconds))

    def dribble(self, bytes_per_s: float) -> None:
        """So many bytes a second in each direction of each connection, until `heal`."""
        self._change(Weather(bytes_per_s=bytes_per_s))

    def cut_after(self, n_bytes: int) -> None:
        """Each connection is reset when it has carried so many more bytes of answer, until `heal`."""

        def set_budget() -> None:
            self._budget = n_bytes
            for link in self._links:
                link.budget = n_bytes

        self._thread.call(set_budget)

    def heal(self) -> None:
        """Good weather, no budgets; what was held is passed on, and half-open connections are reset."""

        def clear() -> None:
            self._budget = None
            for link in list(self._links):
                link.budget = None
                if link.server_lost:
                    link.reset()
            self._change(Weather())

        self._thread.call(clear)

    def _change(self, to: Weather) -> None:
        def change() -> None:
            self._weather.hole, self._weather.delay_s, self._weather.bytes_per_s = to.hole, to.delay_s, to.bytes_per_s
            for link in list(self._links):
                link.weather_changed()

        self._thread.call(change)

    def _reset(self) -> None:
        for link in list(self._links):
            link.reset()

    def _close(self) -> None:
        if self._server is not None:
            self._server.close()
        self._reset()

    async def _listen(self) -> None:
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(self._link, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]

    def _link(self) -> asyncio.Protocol:
        self._accepted += 1
        link = _Link(self)
        link.budget = self._budget
        self._links.add(link)
        return link.client

    async def _connect(self, side: Side) -> None:
        await self._thread.loop.create_connection(lambda: side, self._host, self._upstream_port)


class _Link:
    """One client's connection and the one to the server."""

    def __init__(self, proxy: ByteProxy) -> None:
        loop, weather = proxy._thread.loop, proxy._weather
        self._proxy, self._loop = proxy, loop
        self.client, self._server = Side(self._accepted), Side(self._connected)
        self.client.other, self._server.other = self._server, self.client
        self.client.on_data, self._server.on_data = self._asked, self._answered
        self.client.on_lost, self._server.on_lost = self._client_gone, self._server_gone
        self._to_server, self._to_client = Lane(weather, loop, late=False), Lane(weather, loop, late=True)
        self._connecting: asyncio.Task[None] | None = None
        self.budget: int | None = None
        self.server_lost = False

    def weather_changed(self) -> None:
        for lane in (self._to_server, self._to_client):
            lane.clear_up()

    def reset(self) -> None:
        """Both connections end now, the client's with RST."""
        _linger_not(self.client.transport)
        self._to_server.abort()
        self._to_client.abort()

    def lose_server(self) -> None:
        self.server_lost = True
        self._to_server.abort()

    def _accepted(self, transport: asyncio.Transport) -> None:
        transport.pause_reading()
        self._to_client.open(transport)
        self._connecting = self._loop.create_task(self._reach_server())

    async def _reach_server(self) -> None:
        try:
            await self._proxy._connect(self._server)
        except OSError:
            self.reset()

    def _connected(self, transport: asyncio.Transport) -> None:
        if self.client.transport is None or self.client.transport.is_closing():
            transport.abort()
            return
        self._to_server.open(transport)
        self.client.transport.resume_reading()

    def _asked(self, data: bytes) -> None:
        if not self.server_lost:
            self._to_server.send(data)

    def _answered(self, data: bytes) -> None:
        if self.budget is None:
            self._to_client.send(data)
            return
        self._to_client.send(data[: self.budget])
        self.budget -= min(len(data), self.budget)
        if not self.budget:
            self._loop.call_soon(self.reset)

    def _client_gone(self) -> None:
        self._to_client.abort()
        self._to_server.finish()
        self._proxy._links.discard(self)

    def _server_gone(self) -> None:
        if not self.server_lost:
            self._to_client.finish()


def _linger_not(transport: asyncio.Transport | None) -> None:
    """Closing it will send RST."""
    found = transport.get_extra_info("socket") if transport is not None else None
    if found is not None and found.fileno() >= 0:
        found.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
