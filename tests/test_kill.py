"""P2, P4: a worker process that is killed mid-group loses and doubles nothing, and its item is soon in other hands."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import redis

from distaff.keys import RunKeys, job_id
from distaff_worker.rq_schema import JOB_PREFIX
from tests.farm_support import groups_of, make_worker, produce, run_config, says, settled
from tests.process_support import leftovers
from tests.scripted_engine import Ask, Reply, ScriptedEngine
from tests.worker_support import check_oracle, until

LEASE_S = 2.0
ROOT = Path(__file__).parent.parent


def start_worker(url: str, *flags: str, environment: Mapping[str, str] | None = None) -> subprocess.Popen[bytes]:
    """`distaff work` in a process group of its own."""
    command = [sys.executable, "-m", "distaff", "work", "--redis-url", url, "--worker.lease-s", str(LEASE_S), *flags]
    variables = {**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1", **(environment or {})}
    return subprocess.Popen(command, cwd=ROOT, env=variables, start_new_session=True)


def kill(process: subprocess.Popen[bytes]) -> None:
    os.killpg(process.pid, signal.SIGKILL)
    process.wait(10)


async def test_a_group_of_a_killed_worker_is_emitted_once_by_another(redis_url: str, client: redis.Redis) -> None:
    """Killed with four requests in the air; a second worker, already there, starts the item anew within two leases."""
    go = asyncio.Event()
    calls: list[float] = []

    async def script(ask: Ask) -> Reply:
        if ask.sampling.get("max_tokens") != 1:
            calls.append(time.monotonic())
            await go.wait()
        return says(f"number {ask.number}")

    async with ScriptedEngine(script=script) as engine:
        await produce(redis_url, run_config(engine.url, environment={"args": {"rows": 1, "turns": 1}}))
        victim = start_worker(redis_url)
        try:
            await until(lambda: len(calls) == 4, seconds=60, what="the first worker did not start the group")
            service, _ = make_worker(redis_url, name="second", lease_s=LEASE_S, beat_s=0.3)
            second = asyncio.create_task(service.run())
            await until(lambda: client.exists("rq:worker:second"))
        finally:
            await asyncio.to_thread(kill, victim)
        killed = time.monotonic()
        job = f"{JOB_PREFIX}{job_id('run-1', 0)}"
        await until(lambda: client.hget(job, "worker_name") == b"second", what="nobody took the item over")
        recovery_s = time.monotonic() - killed
        await until(lambda: len(calls) == 8, seconds=30)
        go.set()
        await until(lambda: settled(client, "run-1"))
        service._stop("test")
        await second
    assert recovery_s < 2 * LEASE_S
    [group] = groups_of(client, "run-1")
    assert group.worker == "second"
    assert group.attempt == 2
    assert len(group.samples) == 4
    check_oracle(client, "run-1")


async def test_thirty_items_survive_a_kill(redis_url: str, client: redis.Redis) -> None:
    """P1 in small: thirty items, a worker killed while it plays four at once, each item settled once."""

    async def script(ask: Ask) -> Reply:
        await asyncio.sleep(0.3 if ask.sampling.get("max_tokens") != 1 else 0)
        return says(f"number {ask.number % 2}")

    async with ScriptedEngine(script=script) as engine:
        limits = {"group_size": 2, "max_lost": 50}
        config = run_config(engine.url, environment={"args": {"rows": 30, "turns": 2}}, rollouts=limits)
        await produce(redis_url, config)
        keys = RunKeys("run-1")
        victim = start_worker(redis_url, "--worker.slots", "4")
        try:
            await until(lambda: client.xlen(keys.groups) >= 5, seconds=60)
        finally:
            await asyncio.to_thread(kill, victim)
        assert 5 <= client.xlen(keys.groups) < 30
        last = start_worker(redis_url, "--worker.exit-when-done", "true")
        try:
            assert await asyncio.to_thread(last.wait, 90) == 0
        finally:
            if last.poll() is None:
                kill(last)
    check_oracle(client, "run-1")
    state: Any = client.hgetall(keys.state)
    assert int(state[b"lost"]) >= 1


async def test_a_killed_worker_leaves_no_process_behind(redis_url: str, client: redis.Redis) -> None:
    """P17: kill -9 of the worker alone, while environment code blocks in a process of its own: the kernel ends that one too."""
    mark = f"LEFTOVER_{os.getpid()}_{time.monotonic_ns()}"
    async with ScriptedEngine(script=lambda ask: says("number 1")) as engine:
        arguments = {"rows": 1, "every": "expression"}
        await produce(redis_url, run_config(engine.url, environment={"id": "tests.fault_env", "args": arguments}))
        worker = start_worker(redis_url, environment={"MARK": mark})
        try:
            await until(lambda: len(leftovers(mark)) >= 3, seconds=60, what="worker, zygote and host")
            await until(lambda: any(processor_s(pid) > 1 for pid in hosts_of(mark, worker.pid)), seconds=60)
        finally:
            worker.kill()
            worker.wait(10)
    await until(lambda: not leftovers(mark), what="processes are left")


def hosts_of(mark: str, worker: int) -> list[int]:
    """Pids of the worker's host processes: each leads a session of its own."""
    return [pid for pid in leftovers(mark) if pid != worker and os.getsid(pid) == pid]


def processor_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@pytest.mark.slow
async def test_an_item_that_aborts_the_process_becomes_a_dead_letter_and_the_others_go_on(
    redis_url: str, client: redis.Redis
) -> None:
    """P13: the process of its environment dies with each attempt, the worker goes on; then the item is given up, and no other with it."""

    async def script(ask: Ask) -> Reply:
        return says("number 1")

    async with ScriptedEngine(script=script) as engine:
        args = {"rows": 12, "turns": 1, "fault": "abort", "every": 100}
        limits = {"group_size": 2}
        await produce(redis_url, run_config(engine.url, environment={"args": args}, rollouts=limits))
        worker = start_worker(redis_url, "--worker.exit-when-done", "true", "--worker.slots", "4")
        try:
            assert await asyncio.to_thread(worker.wait, 90) == 0
        finally:
            if worker.poll() is None:
                kill(worker)
    letters: Any = client.hgetall(RunKeys("run-1").dead)
    assert list(letters) == [b"0"]
    letter = json.loads(letters[b"0"])
    assert (letter["kind"], letter["boundary"], letter["attempts"]) == ("environment_error", "process", 3)
    assert "SIGABRT" in letter["message"]
    assert "marker_env.py" in letter["message"]
    check_oracle(client, "run-1")
