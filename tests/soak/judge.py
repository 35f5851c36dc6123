"""What must be true of a farm when the faults have stopped and everything has drained.

Invariant: each check says what it found, none hides another; an empty list is a farm that kept its promises.
"""

from __future__ import annotations

import json
import subprocess
import time
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import redis

from distaff.keys import RunKeys
from distaff_consumer.reading import read_archive
from tests.harness import canaries, processes
from tests.harness.oracle import POOL, check_settled
from tests.process_support import leftovers
from tests.soak.farm import PYTHON, RUN, Farm
from tests.soak.inject import Injector
from tests.soak.recovery import Recovery
from tests.soak.witness import Witness, digest

WORKERS_END_S = 40.0
CRASHES = ("Traceback (most recent call last)", "execution.broke", "play.broke", "loop.failed", "Fatal Python error")
"""What no role may say. Environment code does its worst in processes of its own, and what it raises is a dead letter."""


def violations(farm: Farm, injector: Injector, witness: Witness) -> Iterator[str]:
    """Of a farm whose consumers have ended and whose workers still live; ends the workers."""
    yield from witness.faults
    yield from _held(lambda: _search(farm, injector))
    yield from _workers_end(farm)
    yield from _held(lambda: check_settled(farm.client, RUN, emitted=witness.seqs.values()))
    yield from _freed(farm)
    for name in farm.roles:
        if name.startswith("archiver"):
            yield from _archive(farm, name, witness)
        if name.startswith("trainer"):
            yield from _seen(farm, name, witness)
    for role in farm.roles.values():
        yield from _said(role.name, role.log)


def slow_recoveries(recovery: Recovery, lease_s: float) -> list[str]:
    """Items of a worker that was killed in peace, and that nobody had within two leases."""
    slow = [seconds for seconds in (*recovery.quiet_s, *recovery.queued_s) if seconds >= 2 * lease_s]
    found = [f"an item of a killed worker was taken over after {seconds:.1f} s" for seconds in slow]
    return found + ([f"{recovery.waiting} items of killed workers were never taken over"] if recovery.waiting else [])


def metrics_of(farm: Farm) -> str:
    """What the spared worker's /metrics says, "" when it does not answer."""
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{farm.health_port}/metrics", timeout=2) as answer:
            return str(answer.read(), "utf-8")
    except OSError:
        return ""


def _search(farm: Farm, injector: Injector) -> int:
    """For canaries, everywhere."""
    texts = dict(farm.logs())
    texts["distaff status"] = _command(farm, "status", "--json")
    texts["distaff dead list"] = _command(farm, "dead", "list", "--run", RUN)
    texts["metrics"] = metrics_of(farm)
    texts |= {f"rq info {n}": said for n, said in enumerate(injector.said)}
    folders = [farm.archive_folder(name) for name in farm.roles if name.startswith("archiver")]
    return canaries.assert_nowhere(
        farm.client, texts=texts, folders=folders, pids=[role.pid for role in farm.roles.values() if role.pid]
    )


def _command(farm: Farm, *arguments: str) -> str:
    """What an operator's command says."""
    env = canaries.environment(DISTAFF_REDIS_URL=farm.server.url)
    done = subprocess.run(
        [PYTHON, "-m", "distaff", *arguments], env=env, capture_output=True, text=True, timeout=60, cwd=processes.ROOT
    )
    return done.stdout + done.stderr


def _workers_end(farm: Farm) -> Iterator[str]:
    """On SIGTERM: in time, with 0, and with everything they had started."""
    workers = [role for role in farm.roles.values() if role.name.startswith("worker")]
    for role in workers:
        role.done = True
        if role.child is not None:
            role.child.terminate()
    end = time.monotonic() + WORKERS_END_S
    for role in workers:
        if role.child is None:
            continue
        try:
            code = role.child.wait(max(0.1, end - time.monotonic()))
        except TimeoutError as error:
            yield f"{role.name} did not end on SIGTERM: {error}"
            continue
        if code != 0:
            yield f"{role.name} ended on SIGTERM with {code}: {role.child.log[-1000:]}"
        left = leftovers(role.env["DISTAFF_REDIS_URL"])
        if left:
            yield f"{role.name} left processes behind: {left}"


def _freed(farm: Farm) -> Iterator[str]:
    keys = RunKeys(RUN)
    if left := farm.client.xlen(keys.groups):
        yield f"{left} groups were acknowledged by everybody and not freed, or not acknowledged"
    for key in farm.client.scan_iter(f"{keys.groups}:parked:*"):
        yield f"{farm.client.xlen(key)} groups are parked in {key!r}"


def _archive(farm: Farm, name: str, witness: Witness) -> Iterator[str]:
    """Each emitted group once, and as it was in the stream."""
    records = list(read_archive(farm.archive_folder(name)))
    times = Counter(int(record["seq"]) for record in records)
    emitted = set(witness.seqs.values())
    if doubled := [seq for seq, count in times.items() if count > 1]:
        yield f"{name}: {len(doubled)} groups twice, {doubled[:5]}"
    if missing := emitted - times.keys():
        yield f"{name}: {len(missing)} groups missing, {sorted(missing)[:5]}"
    if strange := times.keys() - emitted:
        yield f"{name}: {len(strange)} groups that never were in the stream, {sorted(strange)[:5]}"
    if changed := [seq for record in records if digest(record) != witness.digests.get(seq := int(record["seq"]))]:
        yield f"{name}: {len(changed)} groups are not what was in the stream, {changed[:5]}"


def _seen(farm: Farm, name: str, witness: Witness) -> Iterator[str]:
    seen = set(map(int, farm.seen_file(name).read_text().split()))
    if missing := set(witness.seqs.values()) - seen:
        yield f"{name} never got {len(missing)} groups, {sorted(missing)[:5]}"


def _said(name: str, log: str) -> Iterator[str]:
    for mark in CRASHES:
        if mark in log:
            at = log.index(mark)
            yield f"{name} said {mark!r} ({log.count(mark)} times): ...{log[max(0, at - 200) : at + 1500]}"


def _held(check: Callable[[], Any]) -> Iterator[str]:
    try:
        check()
    except AssertionError as error:
        yield str(error)


def dead_letters(client: redis.Redis) -> Counter[str]:
    """By kind."""
    letters: Any = client.hvals(RunKeys(RUN).dead)
    return Counter(json.loads(letter)["kind"] for letter in letters)


__all__ = ["POOL", "dead_letters", "metrics_of", "slow_recoveries", "violations"]
