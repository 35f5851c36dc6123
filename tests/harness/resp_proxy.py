"""A proxy in front of Redis that counts commands and breaks off at any one of them: before it is applied, or after.

Invariant: commands are counted one by one in the order in which they arrive, over all connections; when the proxy breaks off at
command k, every earlier command of that connection was applied and answered, and no later one is. It never changes a byte.

The proxy lives on a thread of its own. An action runs on that thread: everything else that goes through the proxy stands still
meanwhile, and the action must not use the proxy. `CLIENT REPLY OFF` and `MONITOR` are not understood.
"""

from __future__ import annotations

import asyncio
import random
import tempfile
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from hashlib import sha1
from importlib.resources import files
from pathlib import Path
from types import TracebackType
from typing import Literal
from urllib.parse import unquote, urlsplit, urlunsplit

from tests.harness.lanes import Weather
from tests.harness.loop_thread import LoopThread
from tests.harness.resp_session import Fate, Session

When = Literal["before", "after"]
Fault = Literal["cut_before", "cut_reply", "delay"]
LONGEST_DELAY_S = 0.2


@dataclass(slots=True)
class _Faults:
    rate: float
    kinds: Sequence[Fault]
    random: random.Random


@dataclass(slots=True)
class _Seen:
    names: list[str] = field(default_factory=list)
    words: list[str] = field(default_factory=list)
    injected: list[tuple[int, Fault]] = field(default_factory=list)
    errors: list[BaseException] = field(default_factory=list)


class RespProxy:
    """`with RespProxy(server.url) as proxy`: whoever connects to `proxy.url` speaks to the server through it.

    tcp: listen on a free port of 127.0.0.1 instead of on a socket. An error that an action raised is raised at the end.
    """

    def __init__(self, upstream_url: str, *, tcp: bool = False) -> None:
        self._upstream = urlsplit(upstream_url)
        self._tcp = tcp
        self._folder = tempfile.TemporaryDirectory(prefix="dt")
        self._thread = LoopThread("resp-proxy")
        self._weather = Weather()
        self._seen = _Seen()
        self._fates: dict[int, Fate] = {}
        self._awaited: dict[tuple[str, int], Fate] = {}
        self._faults: _Faults | None = None
        self._sessions: set[Session] = set()
        self._scripts = _script_names()
        self._server: asyncio.Server | None = None
        self.url = ""

    def __enter__(self) -> RespProxy:
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
        self._folder.cleanup()
        if self._seen.errors and value is None:
            raise self._seen.errors[0]

    @property
    def count(self) -> int:
        """Commands seen until now."""
        return len(self._seen.names)

    @property
    def names(self) -> list[str]:
        """Their names in order; command k is `names[k - 1]`."""
        return self._seen.names[:]

    @property
    def words(self) -> list[str]:
        """As `names`, with the first argument; of our own scripts their name: "EVALSHA emit"."""
        return self._seen.words[:]

    @property
    def injected(self) -> list[tuple[int, Fault]]:
        """The random faults until now: (number of the command, what happened to it)."""
        return self._seen.injected[:]

    @property
    def connections(self) -> int:
        """Clients connected now."""
        return len(self._sessions)

    def at(self, k: int, action: Callable[[], None], *, when: When) -> threading.Event:
        """Break off at command k (the first is 1): call `action` once, then cut the client's connection.

        before: k is never sent to the server. after: the server has answered k, and the client never learns it. Commands that
        came behind k on its connection are neither sent nor counted. Returns an event that is set when it has happened.
        """
        fate = Fate(after=when == "after", action=action)
        self._thread.call(lambda: self._fates.update({k: fate}))
        return fate.done

    def at_word(self, word: str, n: int, action: Callable[[], None], *, when: When) -> threading.Event:
        """As `at`, for the n-th command (the first is 1) that `words` calls `word`."""
        fate = Fate(after=when == "after", action=action)
        self._thread.call(lambda: self._awaited.update({(word, n): fate}))
        return fate.done

    def cut_reply(self, k: int) -> threading.Event:
        """Command k is applied, and its client's connection cut instead of answered."""
        return self.at(k, lambda: None, when="after")

    def faults(self, seed: int, *, rate: float, kinds: Sequence[Fault] = ("cut_before", "cut_reply", "delay")) -> None:
        """From now on each command suffers one of `kinds` with probability `rate`, until `heal`."""
        faults = _Faults(rate, kinds, random.Random(seed))
        self._thread.call(lambda: setattr(self, "_faults", faults))

    def black_hole(self) -> None:
        """Everything is taken and nothing is passed on, in both directions, until `heal`; connections stay open."""
        self._change(Weather(hole=True))

    def delay(self, seconds: float) -> None:
        """Every reply comes so much later, until `heal`."""
        self._change(Weather(delay_s=seconds))

    def dribble(self, bytes_per_s: float) -> None:
        """So many bytes a second in each direction of each connection, until `heal`."""
        self._change(Weather(bytes_per_s=bytes_per_s))

    def heal(self) -> None:
        """Good weather and no random faults; what was held is passed on. What was armed with `at` stays armed."""

        def clear() -> None:
            self._faults = None
            self._change(Weather())

        self._thread.call(clear)

    def cut_all(self) -> None:
        """Cut every connection there is; new ones are welcome."""
        self._thread.call(self._cut)

    def retarget(self, upstream_url: str) -> None:
        """Cut every connection; new ones reach another server: what a failover looks like to clients of one address."""

        def turn() -> None:
            self._upstream = urlsplit(upstream_url)
            self._cut()

        self._thread.call(turn)

    def _change(self, to: Weather) -> None:
        def change() -> None:
            self._weather.hole, self._weather.delay_s, self._weather.bytes_per_s = to.hole, to.delay_s, to.bytes_per_s
            for session in list(self._sessions):
                session.weather_changed()

        self._thread.call(change)

    def _cut(self) -> None:
        for session in list(self._sessions):
            session.cut()

    def _close(self) -> None:
        if self._server is not None:
            self._server.close()
        self._cut()

    async def _listen(self) -> None:
        loop = asyncio.get_running_loop()
        login = self._upstream.netloc.rpartition("@")[0]
        login = f"{login}@" if login else ""
        query = self._upstream.query
        if self._tcp:
            self._server = await loop.create_server(self._session, "127.0.0.1", 0)
            place = f"127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
            path = "" if self._upstream.scheme == "unix" else self._upstream.path
            self.url = urlunsplit(("redis", f"{login}{place}", path, query, ""))
        else:
            socket = str(Path(self._folder.name) / "p.sock")
            self._server = await loop.create_unix_server(self._session, socket)
            query = query if self._upstream.scheme == "unix" else f"db={self._upstream.path.strip('/') or 0}"
            self.url = f"unix://{login}{socket}?{query}"

    def _session(self) -> asyncio.Protocol:
        session = Session(self._thread.loop, self._weather, connect=self._connect, judge=self._judge)
        session.ended = lambda: self._sessions.discard(session)
        session.failed = self._seen.errors.append
        self._sessions.add(session)
        return session.client

    async def _connect(self, factory: Callable[[], asyncio.Protocol]) -> None:
        loop = self._thread.loop
        if self._upstream.scheme == "unix":
            await loop.create_unix_connection(factory, unquote(self._upstream.path))
        else:
            await loop.create_connection(factory, self._upstream.hostname or "127.0.0.1", self._upstream.port or 6379)

    def _judge(self, words: list[bytes]) -> Fate | None:
        """Count one command and say what is to happen to it."""
        name = words[0].decode("latin-1").upper()
        first = words[1].decode("latin-1") if len(words) > 1 else ""
        self._seen.names.append(name)
        self._seen.words.append(f"{name} {self._scripts.get(first, first[:60])}".rstrip())
        number = len(self._seen.names)
        fate = self._fates.pop(number, None)
        if fate is None and self._awaited:
            word = self._seen.words[-1]
            fate = self._awaited.pop((word, self._seen.words.count(word)), None)
        return fate if fate is not None or self._faults is None else self._throw(number, self._faults)

    def _throw(self, number: int, faults: _Faults) -> Fate | None:
        if faults.random.random() >= faults.rate:
            return None
        kind = faults.random.choice(list(faults.kinds))
        self._seen.injected.append((number, kind))
        if kind == "delay":
            return Fate(after=True, delay_s=faults.random.uniform(0, LONGEST_DELAY_S))
        return Fate(after=kind == "cut_reply", action=lambda: None)


def _script_names() -> dict[str, str]:
    """SHA1 -> name of each of our scripts, so that what was seen can be read."""
    folder = files("distaff").joinpath("lua")
    return {
        sha1(entry.read_bytes(), usedforsecurity=False).hexdigest(): entry.name.removesuffix(".lua")
        for entry in folder.iterdir()
        if entry.name.endswith(".lua")
    }
