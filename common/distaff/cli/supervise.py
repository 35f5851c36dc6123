"""`distaff run` and `distaff evaluate`: producer, workers and consumer as one process tree.

Invariant: children get their settings from a private file and the Redis URL from their environment, so no secret is in a
command line. The tree ends when the consumer has reached the end of the run, when a child fails, or when it is told to.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import redis

from distaff.cli.declared import PREFIX, key_of, sections
from distaff.cli.embedded import start_redis
from distaff.cli.screen import Screen, Standing, say
from distaff.cli.signals import INTERRUPTED, StopSignal
from distaff.cli.tree import Child, Sink, Tree
from distaff.clients import connect, ping
from distaff.keys import RunKeys
from distaff.runs import RunState, read_state
from distaff.settings import Settings

POLL_S = 0.1
EMBEDDED_DRAIN_S = 3.0
"""Handing items back to a Redis that ends too is of no use to anybody, so workers get little time after Ctrl-C."""
FAILED = 1
GRACE_S = 5.0
"""Above the workers' drain time, to write and close."""
MAX_DEAD_READ = 1_000
MAX_RESTARTS = 10
"""Of workers that were killed (out of memory, a crash in native code), in one run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """How a tree ended."""

    code: int
    state: RunState | None
    dead: list[str]
    """What became of the items that were given up, a line for each of the most frequent reasons."""
    seconds: float


def run(settings: Settings) -> int:
    """Produce, play and archive a run."""
    ended = supervise(settings, ["archive", "--quiet"])
    if ended.state is not None and ended.code in (0, FAILED):
        say(run_summary(settings, ended))
    return ended.code


def evaluate(settings: Settings) -> int:
    """Produce and play the eval split; the consumer prints the report."""
    ended = supervise(settings, ["evaluate", "--attach", "--quiet"], own_output=True)
    if ended.code == FAILED:
        say(dead_summary(ended))
    return ended.code


def supervise(settings: Settings, consumer: Sequence[str], *, own_output: bool = False) -> Ended:
    """Run the tree until its end. Raises ConfigurationError, RedisUnavailable before anything was started."""
    began = time.monotonic()
    settings = with_readable_logs(settings)
    with (
        Screen(settings.log) as screen,
        StopSignal(raise_on_second=False) as stop,
        Tree(sink_of(screen, settings)) as tree,
    ):
        farm = Farm(tree, stop, url=settings.redis_url)
        with connect(farm.url, client_name="distaff-run") as client:
            ping(client, farm.url)
            farm.start_workers(settings)
            code = farm.play(
                client,
                settings,
                consumer,
                own_output=own_output,
                show=lambda state: screen.show(standing(settings, state, began)),
            )
            farm.end()
            state, dead = _read(client, settings.run.name), read_dead(client, settings.run.name)
    if code == 0 and state is not None and not state.emitted and state.dead:
        code = FAILED
    return Ended(code=code, state=state, dead=dead, seconds=time.monotonic() - began)


def with_readable_logs(settings: Settings) -> Settings:
    """Log lines of several processes on one screen: for people, unless JSON was asked for."""
    if settings.log.format != "auto":
        return settings
    return settings.model_copy(update={"log": settings.log.model_copy(update={"format": "console"})})


def sink_of(screen: Screen, settings: Settings) -> Sink:
    """Where children's lines go: with their name before them, or as they are when they are JSON."""
    if settings.log.format == "json":
        return lambda _name, line: screen.line(line)
    return lambda name, line: screen.line(f"{name} | {line}")


class Farm:
    """Redis, workers, and for each run a producer and a consumer, in one tree."""

    def __init__(self, tree: Tree, stop: StopSignal, *, url: str = "") -> None:
        """Without a `url` a Redis of its own is started. Raises ConfigurationError, RedisUnavailable."""
        self._tree, self._stop = tree, stop
        self.url = url
        self._server: Child | None = None
        if not url:
            self._server, self.url = start_redis(tree)
        self._env = child_environment(self.url)
        self._workers: list[Child] = []
        self._worker_file = tree.folder / "worker.json"
        self._recycles = False
        self._grace_s = GRACE_S
        self._restarts = 0
        self._named = 0

    def start_workers(self, settings: Settings) -> None:
        """As many as the settings say; they serve every run of the pool."""
        drain_s = settings.worker.drain_s
        if self._server is not None:
            drain_s = min(drain_s, EMBEDDED_DRAIN_S)
        self._grace_s = drain_s + GRACE_S
        self._recycles = settings.worker.max_groups > 0 or settings.worker.max_rss_bytes > 0
        write_settings(self._worker_file, settings, drain_s=drain_s)
        for _ in range(settings.worker.processes):
            self._start_worker()

    def play(
        self,
        client: redis.Redis,
        settings: Settings,
        consumer: Sequence[str],
        *,
        show: Callable[[RunState], None],
        own_output: bool = False,
    ) -> int:
        """Produce one run and consume it to its end; returns the exit code of the whole.

        The consumer is started when there is a run to read.
        """
        file = self._tree.folder / f"{settings.run.name}.run.json"
        write_settings(file, settings, drain_s=settings.worker.drain_s)
        self._role("producer", ["produce", "--quiet"], file)
        reader: Child | None = None
        while not self._stop.event.is_set():
            failed = self._failure()
            if failed is not None:
                return failed
            state = _read(client, settings.run.name)
            if state is not None:
                show(state)
                if reader is None:
                    reader = self._role(consumer[0], consumer, file, own_output=own_output)
            if reader is not None and reader.code == 0:
                return 0
            time.sleep(POLL_S)
        return INTERRUPTED

    def end(self) -> None:
        """Stop everything but Redis, orderly; a second Ctrl-C hurries."""
        patience = max(self._stop.count, 1)
        others = [child for child in self._tree.children if child is not self._server]
        self._tree.stop(others, grace_s=self._grace_s, hurry=lambda: self._stop.count > patience)

    def _role(self, name: str, arguments: Sequence[str], file: Path, *, own_output: bool = False) -> Child:
        command = [sys.executable, "-m", "distaff", *arguments, str(file)]
        return self._tree.start(name, command, env=self._env, own_output=own_output)

    def _start_worker(self) -> None:
        self._named += 1
        self._workers.append(self._role(f"worker-{self._named}", ["work"], self._worker_file))

    def _failure(self) -> int | None:
        """The exit code that ends the run, if a child says so; replaces workers that may be replaced."""
        for child in list(self._tree.children):
            code = child.code
            if code is None or (code == 0 and child is not self._server and child not in self._workers):
                continue
            if child in self._workers and self._replace(child, code):
                continue
            child.drained()
            self._tree.report(child.name, f"ended with exit code {code}")
            return code if code > 0 else FAILED
        return None

    def _replace(self, worker: Child, code: int) -> bool:
        """Start another worker for one that was killed, told to end by somebody, or has played its share."""
        planned = code == 0 and self._recycles
        if code > 0 or (not planned and self._restarts >= MAX_RESTARTS):
            return False
        self._workers.remove(worker)
        self._tree.stop([worker], grace_s=0)
        if not planned:
            self._restarts += 1
            how = f"killed by signal {-code}" if code else "ended by itself"
            self._tree.report(
                worker.name, f"{how}; another one is started ({self._restarts} of at most {MAX_RESTARTS})"
            )
        self._start_worker()
        return True


def write_settings(path: Path, settings: Settings, *, drain_s: float) -> None:
    """The settings as children read them; readable by this user only, without the Redis URL."""
    data = settings.model_dump(mode="json")
    del data["redis_url"]
    data["worker"] |= {"drain_s": drain_s, "burst": False, "exit_when_done": False}  # the tree says when they end
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8") as file:
        json.dump(data, file)


def child_environment(redis_url: str) -> dict[str, str]:
    """Our environment without settings (they are in the file), with the Redis URL."""
    kept = {name: value for name, value in os.environ.items() if not _is_setting(name)}
    return {**kept, f"{PREFIX}REDIS_URL": redis_url, "PYTHONUNBUFFERED": "1"}


def _is_setting(name: str) -> bool:
    if not name.upper().startswith(PREFIX):
        return False
    path = name[len(PREFIX) :].lower().replace("__", ".")
    return key_of(path) is not None or path in sections() or path == "config"


def _read(client: redis.Redis, run: str) -> RunState | None:
    try:
        return read_state(client, run)
    except (redis.exceptions.RedisError, OSError):
        return None  # an outage is the children's to wait for


def standing(settings: Settings, state: RunState, began: float) -> Standing:
    total = state.target if state.status == "open" else state.admitted
    parts = [f"{state.dead} dead"] if state.dead else []
    if state.reward_count:
        parts.append(f"reward {state.reward_sum / state.reward_count:.3f}")
    if state.tokens:
        parts.append(f"{state.tokens / max(time.monotonic() - began, 0.001):,.0f} tokens/s")
    return Standing(f"run {settings.run.name}", state.settled, total, ", ".join(parts))


def read_dead(client: redis.Redis, run: str) -> list[str]:
    """The most frequent reasons for dead letters, a line each; an embedded Redis takes the letters with it."""
    reasons: Counter[str] = Counter()
    try:
        for _, raw in client.hscan_iter(RunKeys(run).dead, count=100):
            letter = json.loads(raw)
            reasons[f"{letter['kind']} ({letter['boundary']}): {letter['message'][:300]}"] += 1
            if reasons.total() >= MAX_DEAD_READ:
                break
    except (redis.exceptions.RedisError, OSError):
        return []
    return [f"{count} x {reason}" for reason, count in reasons.most_common(3)]


def run_summary(settings: Settings, ended: Ended) -> str:
    """What `distaff run` says at the end."""
    state = ended.state
    if state is None:
        return ""
    mean = f"{state.reward_sum / state.reward_count:.3f}" if state.reward_count else "none"
    text = (
        f"run {settings.run.name}: {state.emitted} groups, {state.rollouts} rollouts, {state.samples} samples, "
        f"{state.tokens} tokens ({state.trained_tokens} trained), mean reward {mean}, {state.dead} dead letters, "
        f"{ended.seconds:.1f} s\narchive: {settings.archive.folder(settings.run.name)}"
    )
    return "\n".join([text, dead_summary(ended)]) if ended.dead else text


def dead_summary(ended: Ended) -> str:
    """Why items were given up."""
    return "\n".join(["dead letters:", *(f"  {line}" for line in ended.dead)])
