"""Enumerates crash points: one role's process behind a proxy that counts its Redis commands, struck at each k-th of them.

Invariant: every point has a Redis of its own that was empty before, scripts included, and a victim process of its own; a failure names the point and
how to play it again. Never judges a point: the scene it is given does that.
"""

from __future__ import annotations

import json
import os
import queue
import select
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self

import redis

from distaff.clients import connect
from tests.harness.resp_proxy import RespProxy
from tests.redis_support import running_redis

ROOT = Path(__file__).parent.parent
AT_ONCE = 6
"""Points played side by side, each on a server of its own; most of a point's time is waiting for a lease."""
EVERY = 5
PATIENCE_S = 60.0

Way = Literal["kill before", "kill after", "cut reply", "flush scripts"]
"""What happens at command k: the process group is killed before it is forwarded, or after it was applied and before its reply; the
connection is cut in place of the reply; all scripts are forgotten and the connection is cut before the command is forwarded."""
KILLS: tuple[Way, ...] = ("kill before", "kill after")
CUTS: tuple[Way, ...] = ("cut reply", "flush scripts")


@dataclass(frozen=True, slots=True)
class Point:
    """One strike at the k-th command, the first being 1, or at the k-th of those that RespProxy calls `word`."""

    way: Way
    k: int
    word: str = ""

    def __str__(self) -> str:
        return f"{self.way}:{self.k}" + (f":{self.word}" if self.word else "")


@dataclass(slots=True)
class Victim:
    """One forked process; see `crash_processes`."""

    pid: int
    folder: Path
    zygote: Zygote
    pidfd: int
    code: int | None = None
    """Exit code, negative for a signal; None while it lives."""
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def kill(self) -> None:
        """SIGKILL to the whole process group; returns when it is dead."""
        if self.code is None:
            os.killpg(self.pid, signal.SIGKILL)
            self.wait(10)

    def wait(self, seconds: float = PATIENCE_S) -> int:
        """The exit code. Fails with the log when it does not end in time."""
        ended, _, _ = select.select([self.pidfd], [], [], seconds) if self.code is None else ([1], [], [])
        assert ended, f"process {self.pid} has not ended in {seconds} s:\n{self.log}"
        with self._lock:
            if self.code is None:
                self.code = self.zygote.reap(self.pid)
        return self.code

    @property
    def said(self) -> list[str]:
        path = self.folder / "said"
        return path.read_text().splitlines() if path.exists() else []

    @property
    def log(self) -> str:
        return (self.folder / "log").read_text()[-6000:]


class Zygote(AbstractContextManager["Zygote"]):
    """The process that all victims are forked from. Used from any thread."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.crash_processes"],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT), "OPENBLAS_NUM_THREADS": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._lock = threading.Lock()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.communicate(timeout=10)

    def start(self, role: str, folder: Path, **options: Any) -> Victim:
        """Fork a process that plays `role`; `folder` is made for what it says."""
        folder.mkdir(parents=True)
        (folder / "log").touch()
        pid = int(self._ask({"role": role, "folder": str(folder), "options": options})["pid"])
        return Victim(pid, folder, self, os.pidfd_open(pid))

    def reap(self, pid: int) -> int:
        return int(self._ask({"reap": pid})["code"])

    def _ask(self, request: dict[str, Any]) -> dict[str, Any]:
        with self._lock:
            if self._process.stdin is None or self._process.stdout is None:
                raise RuntimeError("no pipes")
            print(json.dumps(request), file=self._process.stdin, flush=True)
            answer: dict[str, Any] = json.loads(self._process.stdout.readline())
            return answer


@dataclass(slots=True)
class Place:
    """Where one point is played: an empty server, a folder, and processes that end with it."""

    url: str
    client: redis.Redis
    folder: Path
    zygote: Zygote
    started: list[Victim] = field(default_factory=list)
    commands: int = 0
    """Sent by the victims of this place through their proxies."""
    words: list[str] = field(default_factory=list)
    """The commands themselves; see RespProxy."""
    struck: bool = False
    """The strike has come to pass."""

    def start(self, role: str, **options: Any) -> Victim:
        """A process that talks to Redis directly (unless `options` has another url)."""
        victim = self.zygote.start(role, self.folder / str(len(self.started)), **{"url": self.url, **options})
        self.started.append(victim)
        return victim

    def strike(self, role: str, point: Point | None, **options: Any) -> Victim:
        """A process behind a proxy, struck at `point`; returns when it has ended."""
        with self.striking(role, point, **options) as victim:
            victim.wait()
        if point is not None and point.way in KILLS and self.struck:
            assert victim.code == -signal.SIGKILL, f"struck, and ended with {victim.code}"
        return victim

    @contextmanager
    def striking(self, role: str, point: Point | None, **options: Any) -> Iterator[Victim]:
        """As `strike`, while it lives."""
        victim: Future[Victim] = Future()
        with RespProxy(self.url) as proxy:
            strikes: dict[Way, Callable[[], None]] = {
                "kill before": lambda: victim.result(PATIENCE_S).kill(),
                "kill after": lambda: victim.result(PATIENCE_S).kill(),
                "flush scripts": self._forget_scripts,
                "cut reply": lambda: None,
            }
            done = _arm(proxy, point, strikes[point.way]) if point else None
            victim.set_result(self.start(role, url=proxy.url, **options))
            try:
                yield victim.result()
            finally:
                self.commands, self.words = proxy.count, proxy.words
                self.struck = point is not None and done is not None and _seen(self.words, point) and done.wait(10)

    def _forget_scripts(self) -> None:
        self.client.script_flush()


Scene = Callable[[Place, Point | None], None]
"""Plays one role to its end with a strike (None: without), lets fresh processes finish, and asserts what must hold."""


class Farm(AbstractContextManager["Farm"]):
    """As many Redis servers as points are played at once, and a zygote."""

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            self._urls: queue.Queue[str] = queue.Queue()
            for _ in range(AT_ONCE):
                self._urls.put(stack.enter_context(running_redis()))
            self._zygote = stack.enter_context(Zygote())
            self._folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="crash")))
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    @contextmanager
    def place(self) -> Iterator[Place]:
        """An empty server; what was started on it is killed at the end."""
        url = self._urls.get(timeout=PATIENCE_S)
        with connect(url) as client:
            client.flushall()
            client.script_flush()
            place = Place(url, client, Path(tempfile.mkdtemp(dir=self._folder)), self._zygote)
            try:
                yield place
            finally:
                for victim in place.started:
                    victim.kill()
                    os.close(victim.pidfd)
                self._urls.put(url)

    def enumerate(
        self,
        scene: Scene,
        ways: Sequence[Way],
        *,
        seed: int,
        every: int = EVERY,
        only: Collection[str] = (),
        reach: float = 0.75,
    ) -> str:
        """Play `scene` once untouched and then at each `every`-th command in each way; one line that says what was played.

        only: strike every one of these commands, as the untouched play had them, and no other. reach: the share of the points that must come to pass, so that the test cannot pass by never striking.
        Fails with every point at which the scene failed. FAULT_POINT="<way>:<k>[:<word>]" plays that point alone.
        """
        with self.place() as place:
            scene(place, None)
            commands, words = place.commands, place.words
        if only and "FAULT_POINT" not in os.environ:
            points = [Point(way, n, word) for way in ways for word in only for n in range(1, words.count(word) + 1)]
        else:
            points = _points(commands, ways, seed=seed, every=every)
        began = time.monotonic()
        with ThreadPoolExecutor(AT_ONCE) as pool:
            outcomes = list(pool.map(lambda point: self._play(scene, point), points))
        problems = [f"{point}: {problem}" for point, (_, problem) in zip(points, outcomes, strict=True) if problem]
        struck = sum(struck for struck, _ in outcomes)
        report = (
            f"{scene.__name__.strip('_')}: {commands} commands ({len(set(words))} kinds), {len(points)} points "
            f"({', '.join(ways)}; {', '.join(only) or f'every {every} from seed {seed}'}), {struck} struck, {time.monotonic() - began:.0f} s"
        )
        print(report)
        assert not problems, "\n\n".join(
            [f"{len(problems)} of {len(points)} points failed (FAULT_SEED={seed})", *problems]
        )
        assert struck >= reach * len(points), f"too few points were reached: {report}"
        return report

    def _play(self, scene: Scene, point: Point) -> tuple[bool, str]:
        with self.place() as place:
            try:
                scene(place, point)
            except Exception as error:  # noqa: BLE001 - every point is played and told of
                logs = "\n".join(
                    f"-- {victim.folder.name}, code {victim.code}\n{victim.log}" for victim in place.started
                )
                return (
                    place.struck,
                    f"{type(error).__name__}: {error}\ncommands: {_around(place.words, point)}\n{logs}",
                )
            return place.struck, ""


def _arm(proxy: RespProxy, point: Point, action: Callable[[], None]) -> threading.Event:
    when: Literal["before", "after"] = "before" if point.way in ("kill before", "flush scripts") else "after"
    if point.word:
        return proxy.at_word(point.word, point.k, action, when=when)
    return proxy.at(point.k, action, when=when)


def _around(words: Sequence[str], point: Point) -> Sequence[str]:
    """What was sent shortly before and after the strike."""
    places = [at for at, word in enumerate(words) if not point.word or word == point.word]
    at = places[point.k - 1] if point.k <= len(places) else len(words)
    return words[max(0, at - 6) : at + 3]


def _seen(words: Sequence[str], point: Point) -> bool:
    """The command to be struck was sent."""
    return (words.count(point.word) if point.word else len(words)) >= point.k


def _points(commands: int, ways: Sequence[Way], *, seed: int, every: int) -> list[Point]:
    if wanted := os.environ.get("FAULT_POINT"):
        way, k, *word = wanted.split(":")
        return [Point(known, int(k), *word) for known in ways if known == way]
    return [Point(way, k) for n, way in enumerate(ways) for k in range(1 + (seed + n) % every, commands + 1, every)]
