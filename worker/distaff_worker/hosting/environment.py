"""The environment of a run as the worker plays it: loaded in host processes, which are replaced when they die or grow.

Invariant: the rollouts of a group are played and scored in one host. A group whose host was lost is told whether its own code was to blame.
"""

from __future__ import annotations

import asyncio
import itertools
import resource
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Literal

import structlog

from distaff.config import EnvironmentSection
from distaff.environments.protocol import Episode, ModelFactory, Score
from distaff.types import JSON, Split
from distaff_worker.hosting.launcher import Launcher
from distaff_worker.hosting.process import HostOptions, HostProcess, Loss

log = structlog.get_logger(__name__)
STRAYS, TASKS = 50, 20_000
"""Pieces of code left behind in a host, and tasks alive there, after which it is replaced."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HostingOptions:
    """How many hosts a run has in one worker, and when one is replaced; see WorkerSection in `distaff.settings`."""

    processes: int = 1
    max_groups: int = 0
    """0: never for that reason."""
    growth_bytes: int = 1 << 30
    host: HostOptions = field(default_factory=HostOptions)


class Place:
    """Where one group is played and scored. `loss` is set when the host has gone meanwhile."""

    def __init__(self, host: HostProcess, group: int) -> None:
        self._host, self._group = host, group
        self._rollouts: list[int] = []

    @property
    def loss(self) -> Loss | None:
        return self._host.loss

    @property
    def blamed(self) -> bool:
        """The host was lost by this group's code."""
        return self.loss is not None and self._group in self.loss.blamed

    async def play(self, task: Mapping[str, JSON], model_for: ModelFactory) -> Episode:
        """As `Environment.play`."""
        episode = await self._host.play(self._group, task, model_for)
        if episode.handle is not None:
            self._rollouts.append(episode.handle)
        return episode

    async def row(self, split: Split, index: int) -> tuple[int | None, dict[str, JSON] | None]:
        """Rows of the split (None: no end), and row `index` (None past the end). Raises EnvironmentFailure."""
        return await self._host.row(split, index)

    async def score(self, episodes: Sequence[Episode], *, timeout_s: float) -> list[list[Score]]:
        """As `Environment.score`. Raises DeadlineExceeded; EnvironmentFailure when the host is gone."""
        return await self._host.score(self._group, [episode.handle for episode in episodes], timeout_s=timeout_s)

    async def verdict(self) -> None:
        """Returns when the host turns, or is gone: what timed out while it stood still may be another group's fault."""
        await self._host.verdict()

    def leave(self) -> None:
        """Nothing more is asked of this group's rollouts."""
        self._host.forget(self._rollouts)


@dataclass(slots=True, eq=False)
class _Member:
    host: HostProcess
    base_bytes: int
    """Its memory after loading."""
    places: int = 0
    groups: int = 0
    retired: bool = False


class HostedEnvironment:
    """Made by `open`. on_end: told why a host has ended: blocked, crashed, retired."""

    def __init__(
        self, launcher: Launcher, section: EnvironmentSection, options: HostingOptions, *, on_end: Callable[[str], None]
    ) -> None:
        self._launcher, self._section, self._options, self._on_end = launcher, section, options, on_end
        self._members: list[_Member] = []
        self._starting = asyncio.Lock()
        self._closing: set[asyncio.Task[None]] = set()
        self._groups = itertools.count(1)
        self.id, self.version = "", ""
        self.api: Literal["classic", "v1"] = "classic"

    @classmethod
    async def open(
        cls, launcher: Launcher, section: EnvironmentSection, options: HostingOptions, *, on_end: Callable[[str], None]
    ) -> HostedEnvironment:
        """Loaded in a first host. Raises EnvironmentLoadError, ConfigurationError."""
        hosted = cls(launcher, section, options, on_end=on_end)
        await hosted._start()
        return hosted

    @asynccontextmanager
    async def place(self) -> AsyncIterator[Place]:
        """A place for one group, in the host that has the fewest. Raises EnvironmentLoadError when one had to be started and could not."""
        member = await self._member()
        member.places += 1
        member.groups += 1
        place = Place(member.host, next(self._groups))
        try:
            yield place
        finally:
            place.leave()
            member.places -= 1
            self._review(member)

    async def _member(self) -> _Member:
        async with self._starting:
            fit = [member for member in self._members if not member.retired]
            if len(fit) < self._options.processes and all(member.places for member in fit):
                fit.append(await self._start())
        return min(fit, key=lambda member: member.places)

    async def _start(self) -> _Member:
        host = HostProcess(self._launcher, self._options.host, on_end=self._ended)
        identity = await host.start(self._section.model_dump(mode="json"))
        self.id, self.version, self.api = identity["id"], identity["version"], identity["api"]
        member = _Member(host, base_bytes=identity["rss_bytes"])
        self._members.append(member)
        log.info("environment.loaded", environment=self.id, version=self.version, host=host.pid)
        return member

    def _ended(self, host: HostProcess) -> None:
        self._members = [member for member in self._members if member.host is not host]
        if host.loss is not None and host.loss.reason != "closed":
            self._on_end(host.loss.reason)

    def _review(self, member: _Member) -> None:
        """Take a host that has grown out of service; it ends with its last group."""
        if member.host.loss is None and not member.retired and (reason := self._overgrown(member)):
            member.retired = True
            log.info("environment.retired", host=member.host.pid, reason=reason, groups=member.groups)
            self._on_end("retired")
        if member.retired and not member.places and member in self._members:
            self._members.remove(member)
            closing = asyncio.get_running_loop().create_task(member.host.close())
            self._closing.add(closing)
            closing.add_done_callback(self._closing.discard)

    def _overgrown(self, member: _Member) -> str:
        options, usage = self._options, member.host.usage
        if usage["rss_bytes"] > member.base_bytes + options.growth_bytes:
            return "memory"
        if usage["fds"] > _most_files() // 2:
            return "open files"
        if member.host.strays > STRAYS or usage["tasks"] > TASKS:
            return "code left behind"
        return "groups" if options.max_groups and member.groups >= options.max_groups else ""

    async def close(self) -> None:
        hosts = [member.host for member in self._members]
        await asyncio.gather(*(host.close() for host in hosts), *self._closing)


def _most_files() -> int:
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return soft if soft != resource.RLIM_INFINITY else 1 << 20
