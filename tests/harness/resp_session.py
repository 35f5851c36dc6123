"""One client of the Redis proxy and its connection to the server: which reply belongs to which command.

Invariant: replies come in the order of the commands, but for pushes, which belong to none, and for the confirmations of
SUBSCRIBE and its kind, of which one command has several. Bytes pass unchanged, whole messages at a time.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from tests.harness.lanes import Lane, Weather
from tests.harness.resp import Scanner, arguments, first_word, words
from tests.harness.sides import Side

Connect = Callable[[Callable[[], asyncio.Protocol]], Awaitable[None]]
_CONFIRMED = frozenset((b"subscribe", b"psubscribe", b"ssubscribe", b"unsubscribe", b"punsubscribe", b"sunsubscribe"))
_MESSAGES = frozenset((b"message", b"pmessage", b"smessage"))
_PUSH, _ERROR = ord(">"), ord("-")
SETTLE_S = 5.0
"""How long a break before a command waits for the answers to the commands before it."""


@dataclass(slots=True)
class Fate:
    """What happens to a command: a break (`action`), before it is sent or after it is answered, or a late reply."""

    after: bool
    action: Callable[[], None] | None = None
    delay_s: float = 0.0
    done: threading.Event = field(default_factory=threading.Event)


@dataclass(slots=True)
class _Sent:
    """A command that has no reply yet. confirms: how many confirmations answer it, 0 for all others, which have one reply."""

    name: bytes
    fate: Fate | None = None
    confirms: int = 0


class Session:
    """judge: counts a command, given its first words, and says its fate. ended, failed: what to tell the proxy."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        weather: Weather,
        *,
        connect: Connect,
        judge: Callable[[list[bytes]], Fate | None],
    ) -> None:
        self._loop, self._connect, self._judge = loop, connect, judge
        self.ended: Callable[[], object] = lambda: None
        self.failed: Callable[[BaseException], object] = lambda error: None
        self.client, self._server = Side(self._accepted), Side(self._connected)
        self.client.other, self._server.other = self._server, self.client
        self.client.on_data, self._server.on_data = self._asked, self._answered
        self.client.on_lost, self._server.on_lost = self._client_lost, self._server_lost
        self._to_server, self._to_client = Lane(weather, loop, late=False), Lane(weather, loop, late=True)
        self._requests, self._replies = bytearray(), bytearray()
        self._request_ends, self._reply_ends = Scanner(requests=True), Scanner()
        self._waiting: deque[_Sent] = deque()
        self._subscribed: dict[bytes, set[bytes]] = {}
        self._pushes = False
        self._break: Fate | None = None
        self._over = False
        self._connecting: asyncio.Task[None] | None = None

    def weather_changed(self) -> None:
        """What is held may go now, or must be held differently."""
        for lane in (self._to_server, self._to_client):
            lane.clear_up()

    def cut(self) -> None:
        """Both connections end now."""
        self._over = True
        self._to_server.abort()
        self._to_client.abort()

    def _accepted(self, transport: asyncio.Transport) -> None:
        transport.pause_reading()
        self._to_client.open(transport)
        self._connecting = self._loop.create_task(self._reach_server())

    async def _reach_server(self) -> None:
        try:
            await self._connect(lambda: self._server)
        except OSError:
            self.cut()

    def _connected(self, transport: asyncio.Transport) -> None:
        if self._over or self.client.transport is None or self.client.transport.is_closing():
            transport.abort()
            return
        self._to_server.open(transport)
        self.client.transport.resume_reading()

    def _client_lost(self) -> None:
        self._over = True
        self._to_client.abort()
        if self._server.transport is not None:
            self._server.transport.close()
        self.ended()

    def _server_lost(self) -> None:
        if not self._over:
            self._to_client.send(self._replies)
            self._to_client.finish()
            self._over = True

    def _asked(self, data: bytes) -> None:
        if self._over or self._break is not None:
            return
        self._requests += data
        start = 0
        for end in self._request_ends.ends(self._requests):
            named = words(self._requests, start, end)
            if named:
                fate = self._judge(named)
                if fate is not None and fate.action is not None:
                    self._stop_at(fate, start, end, named)
                    return
                self._waiting.append(self._sent(named, fate, start, end))
            start = end
        if start:
            self._to_server.send(self._requests[:start])
            del self._requests[:start]
            self._request_ends.consumed(start)

    def _stop_at(self, fate: Fate, start: int, end: int, named: list[bytes]) -> None:
        """Send what comes before the break, and nothing more."""
        self._break = fate
        if fate.after:
            self._waiting.append(self._sent(named, fate, start, end))
            self._to_server.send(self._requests[:end])
        else:
            self._to_server.send(self._requests[:start])
            self._loop.call_later(SETTLE_S, self._break_off, fate)
            self._break_if_settled()
        self._requests.clear()

    def _break_if_settled(self) -> None:
        if self._break is not None and not self._break.after and not self._waiting:
            self._break_off(self._break)

    def _break_off(self, fate: Fate) -> None:
        if self._over or fate.action is None:
            return
        self._over = True
        try:
            fate.action()
        except BaseException as error:  # noqa: BLE001 - it is the test's, and raised when the proxy is left
            self.failed(error)
        self._to_client.finish()
        self._to_server.abort()
        fate.done.set()

    def _sent(self, named: list[bytes], fate: Fate | None, start: int, end: int) -> _Sent:
        name = named[0].lower()
        if name not in _CONFIRMED:
            return _Sent(name, fate)
        channels = arguments(self._requests, start, end)
        kind = name.removesuffix(b"subscribe").removesuffix(b"un")
        standing = self._subscribed.setdefault(kind, set())
        if name.endswith(b"unsubscribe"):
            confirms = len(channels) or max(1, len(standing))
            standing.difference_update(channels or list(standing))
        else:
            confirms = len(channels)
            standing.update(channels)
        return _Sent(name, fate, confirms)

    def _answered(self, data: bytes) -> None:
        if self._over:
            return
        self._replies += data
        passed = start = 0
        for end in self._reply_ends.ends(self._replies):
            fate = self._fate_of_reply(start)
            if fate is not None:
                self._to_client.send(self._replies[passed:start])
                passed = start
                if fate.action is not None:
                    self._break_off(fate)
                    return
                self._to_client.send(self._replies[start:end], delay_s=fate.delay_s)
                passed = end
            start = end
        if start:
            if start > passed:
                self._to_client.send(self._replies[passed:start])
            del self._replies[:start]
            self._reply_ends.consumed(start)
        self._break_if_settled()

    def _fate_of_reply(self, start: int) -> Fate | None:
        """The fate of the command that this reply completes; None when it completes none."""
        if self._belongs_to_nobody(start):
            return None
        head = self._waiting[0]
        if head.confirms > 1 and self._replies[start] != _ERROR:
            head.confirms -= 1
            return None
        return self._waiting.popleft().fate

    def _belongs_to_nobody(self, start: int) -> bool:
        """A push or a message; with RESP2 messages are plain arrays, on connections that have subscribed to something."""
        push = self._replies[start] == _PUSH
        if not self._waiting:
            return True
        confirming = self._waiting[0].name in _CONFIRMED
        if not push and (self._pushes or not (confirming or any(self._subscribed.values()))):
            return False
        word = first_word(self._replies, start)
        if word in _CONFIRMED:
            self._pushes = push
            return word != self._waiting[0].name
        return push or word in _MESSAGES
