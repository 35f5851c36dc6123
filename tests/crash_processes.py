"""Real processes to be killed: a worker, a producer, a trainer and an archiver, each forked from a process that has imported everything.

Invariant: each plays its role with the farm's own classes, in a process group of its own, and writes what it has to tell to a file line by
line, so that what it said before it was killed is there. The process that forks plays no role, and ends with whoever started it.

Run as a program (`python -m tests.crash_processes`) it reads one request a line from stdin and answers each with one line:
{"role": ..., "folder": ..., "options": {...}} with {"pid": ...}, and {"reap": pid} with {"code": ...}.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from distaff import GroupConsumer
from distaff.clients import connect
from distaff.runs import read_state
from distaff.types import DeadLetter, RolloutItem
from distaff.wire import encode_group
from distaff_consumer import archive_command
from distaff_producer.produce import Producer
from distaff_worker import service as service_module
from distaff_worker.leases import Counts, Lease
from distaff_worker.metrics import Metrics
from distaff_worker.outcome import Bury, Emit, Outcome, Retry
from distaff_worker.service import Service
from distaff_worker.service_options import ServiceOptions
from tests.archive_process import PlainArchive
from tests.group_support import make_group
from tests.producer_support import Numbers, config
from tests.worker_support import POOL, ScriptedPlayer, until

RUN = "run-1"
RETRIED, BURIED, HANDED_BACK = 2, 3, 4
"""Items that end otherwise than by a group at once; see `worker`."""
IDLE_WAIT_S = 0.2
"""In place of the worker's second, which every point would wait for at its end; 0 leaves it at that."""


class Voice:
    """Appends lines to a file; what was said is on file when `say` returns."""

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)

    def say(self, *words: object) -> None:
        os.write(self._file, (" ".join(map(str, words)) + "\n").encode())


def worker(
    voice: Voice,
    *,
    url: str,
    name: str,
    direct: str = "",
    hangs: bool = False,
    idle_wait_s: float = IDLE_WAIT_S,
    **options: Any,
) -> None:
    """A worker on RUN until the run has ended. Item RETRIED fails once, BURIED is a dead letter, the others give a group.

    direct: URL past the proxy; given, the worker plays HANDED_BACK until it has beaten for it and all else is settled, then sends itself
    SIGTERM. hangs: every item is played for ever.
    """
    service_module.IDLE_WAIT_S = idle_wait_s or service_module.IDLE_WAIT_S
    watching = connect(direct or url)

    async def play(lease: Lease, item: RolloutItem) -> Outcome:
        voice.say(item.seq, lease.attempts, lease.lost)
        if hangs:
            await asyncio.sleep(600)
        if direct and item.seq == HANDED_BACK:
            await _all_but_this_is_done(lease)
            os.kill(os.getpid(), signal.SIGTERM)
            await asyncio.sleep(600)
        return _outcome(lease, item, name)

    async def _all_but_this_is_done(lease: Lease) -> None:
        key, place = f"rq:wip:{POOL}", f"{lease.job_id}:{lease.execution_id}"
        first = watching.zscore(key, place)
        await until(lambda: watching.zscore(key, place) != first, seconds=60)
        await until(lambda: unsettled(watching) == 1, seconds=60)

    values: dict[str, Any] = {"pool": POOL, "name": name, "slots": 8, "lease_s": 0.6, "beat_s": 0.1, "drain_s": 0.05}
    with connect(url) as client, connect(url, socket_timeout_s=1.0) as beats:
        service = Service(
            client,
            options=ServiceOptions(**{**values, **options}),
            player=ScriptedPlayer(play),
            metrics=Metrics(),
            beats=beats,
            done=lambda: unsettled(client) == 0,
        )
        asyncio.run(service.run())


def producer(voice: Voice, *, url: str, rows: int = 50, **options: Any) -> None:
    """Produces RUN; says the report's numbers as JSON."""
    settings = config(run={"name": RUN, "pool": POOL}, **{"shuffle": False, "batch": 8, **options})
    report = Producer(settings, url, Numbers(rows=rows)).run()
    voice.say(json.dumps(asdict(report)))


def trainer(voice: Voice, *, url: str, name: str = "trainer-0", dies_at: int = -1, **options: Any) -> None:
    """Takes and acknowledges one group after the other, as a training loop does; says "seq deliveries" before it acknowledges.

    dies_at: number of the group that kills it.
    """
    settings: dict[str, Any] = {"batch": 3, "block_s": 0.05, "claim_idle_s": 0.3, **options}
    with GroupConsumer(RUN, url, consumer=name, **settings) as consumer:
        for delivery in consumer:
            voice.say(delivery.group.seq, delivery.deliveries)
            if delivery.group.seq == dies_at:
                os.kill(os.getpid(), signal.SIGKILL)
            consumer.ack(delivery)


def archiver(voice: Voice, *, url: str, directory: str) -> None:
    """Archives RUN to its end, a new file every few groups; says how many groups of it were written twice over."""
    report = archive_command.run(RUN, redis_url=url, archive=PlainArchive(Path(directory), rotate_bytes=20_000))
    voice.say(report.archived, report.duplicates, report.parked, report.missing)


ROLES: Mapping[str, Callable[..., None]] = {
    "worker": worker,
    "producer": producer,
    "trainer": trainer,
    "archiver": archiver,
}


def unsettled(client: Any) -> int:
    """Items of RUN that are admitted and not settled; -1 when there is no such run."""
    state = read_state(client, RUN)
    return -1 if state is None else state.admitted - state.settled


def _outcome(lease: Lease, item: RolloutItem, worker: str) -> Outcome:
    if item.seq == RETRIED and lease.attempts == 0:
        return Retry(kind="engine_error", boundary="engine", message="scripted")
    if item.seq == BURIED:
        where: dict[str, Any] = {"kind": "environment_error", "boundary": "tool", "message": "scripted"}
        attempts = lease.attempts + 1
        letter = DeadLetter(item=item, attempts=attempts, first=lease.first, last=time.time(), worker=worker, **where)
        return Bury(letter=letter)
    return group_of(item)


def group_of(item: RolloutItem) -> Emit:
    """A whole group for `item`, made up."""
    group = make_group(run=item.run, seq=item.seq, rollouts=2, tokens=8)
    numbers = group.statistics
    counts = Counts(
        rollouts=numbers.rollouts,
        samples=len(group.samples),
        tokens=numbers.tokens,
        trained_tokens=numbers.trained_tokens,
        reward_sum=numbers.reward_mean * numbers.scored,
        reward_count=numbers.scored,
    )
    return Emit(fields=encode_group(group), counts=counts, size_bytes=1, reward_mean=numbers.reward_mean)


def main() -> None:
    """Fork what is asked for until stdin ends, then kill what is left."""
    children: set[int] = set()
    for line in sys.stdin:
        request = json.loads(line)
        if "reap" in request:
            _, status = os.waitpid(request["reap"], 0)
            children.discard(request["reap"])
            answer = {"code": os.waitstatus_to_exitcode(status)}
        else:
            pid = os.fork()
            if pid == 0:
                _be(request["role"], Path(request["folder"]), request["options"])
            with contextlib.suppress(OSError):  # it may have done so itself, or be gone
                os.setpgid(pid, pid)
            children.add(pid)
            answer = {"pid": pid}
        print(json.dumps(answer), flush=True)
    for pid in children:
        os.killpg(pid, signal.SIGKILL)


def _be(role: str, folder: Path, options: Mapping[str, Any]) -> None:
    """Play the role in this (forked) process, and end it."""
    code = 1
    try:
        os.setpgid(0, 0)
        log = os.open(folder / "log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        for descriptor in (1, 2):
            os.dup2(log, descriptor)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        ROLES[role](Voice(folder / "said"), **options)
        code = 0
    except Exception:  # noqa: BLE001 - a forked process must never return into the loop that forked it
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    main()
