"""Environment code that blocks, crashes, allocates or leaks costs its own item and nobody else's: it runs in a process that can be killed."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from typing import Any

import pytest
import redis

from distaff.config import RunConfig
from distaff.errors import FatalRun
from distaff.keys import RunKeys
from distaff.settings import WorkerSection
from distaff_worker.metrics import Metrics
from tests.farm_support import groups_of, launcher, make_worker, produce, run_config, says, settled, tokenizer
from tests.harness.processes import children
from tests.scripted_engine import Record, ScriptedEngine
from tests.worker_support import check_oracle, until

ROWS = 12
BAD = 5


def faulty(url: str, fault: str, *, where: str = "reward", rows: int = ROWS, **limits: Any) -> RunConfig:
    """A run in which row BAD misbehaves."""
    arguments: dict[str, Any] = {"rows": rows, "faults": {str(BAD): fault}, "where": where}
    arguments["turns"] = 2 if where == "step" else 1
    values = {"group_size": 2, "max_attempts": 1, "score_timeout_s": 1.5, "block_timeout_s": 1.5, **limits}
    return run_config(url, environment={"id": "tests.fault_env", "args": arguments}, rollouts=values)


async def play(
    url: str, config: RunConfig, client: redis.Redis, *, hosts: WorkerSection | None = None, seconds: float = 60
) -> Metrics:
    """The run to its end on one worker with short leases; nothing may be lost or handed back."""
    await produce(url, config)
    service, metrics = make_worker(url, hosts=hosts, lease_s=3.0, beat_s=0.5)
    task = asyncio.create_task(service.run())
    try:
        await until(lambda: settled(client, "run-1"), seconds=seconds, what="the run did not settle")
    finally:
        service._stop("test")
        await asyncio.wait_for(task, 30)
    check_oracle(client, "run-1")
    state = client.hgetall(RunKeys("run-1").state)
    assert state.get(b"lost") is None
    assert state.get(b"handed_back") is None
    return metrics


def prompt(record: Record) -> str:
    return str(tokenizer().decode(record.ask.prompt_ids))


def letters(client: redis.Redis) -> dict[int, dict[str, Any]]:
    found: Any = client.hgetall(RunKeys("run-1").dead)
    return {int(seq): json.loads(text) for seq, text in found.items()}


def count(metrics: Metrics, name: str, **labels: str) -> float:
    return metrics.registry.get_sample_value(f"{name}_total", labels) or 0.0


@pytest.mark.parametrize("fault", ["sleep", "spin", "expression", "power_tower"])
async def test_a_reward_that_blocks_is_killed_and_costs_nobody_else_anything(
    redis_url: str, client: redis.Redis, fault: str
) -> None:
    """P15: a sleep, an endless loop, a regular-expression and a sympy bomb in a reward: one dead letter that says where it stood."""
    async with ScriptedEngine(script=lambda ask: says("number 1")) as engine:
        metrics = await play(redis_url, faulty(engine.url, fault), client)
        answered = max(record.ended for record in engine.records if f"row {BAD}," in prompt(record))
    assert [group.seq for group in groups_of(client, "run-1")] == [n for n in range(ROWS) if n != BAD]
    letter = letters(client)[BAD]
    assert (letter["kind"], letter["boundary"]) == ("timeout", "reward")
    assert "fault_env.py" in letter["message"]
    assert letter["last"] - (answered + time.time() - time.monotonic()) < 1.5 + 6, (
        "its deadline, and some seconds to see that"
    )
    assert count(metrics, "distaff_environment_processes_ended", reason="blocked") == 1


@pytest.mark.parametrize("fault", ["spin", "expression"])
async def test_a_step_that_blocks_is_killed_and_costs_nobody_else_anything(
    redis_url: str, client: redis.Redis, fault: str
) -> None:
    """P15: the loop that plays all rollouts stands still; whose code it is that blocks is known from outside."""
    async with ScriptedEngine(script=lambda ask: says("number 1")) as engine:
        await play(redis_url, faulty(engine.url, fault, where="step"), client)
    assert [group.seq for group in groups_of(client, "run-1")] == [n for n in range(ROWS) if n != BAD]
    letter = letters(client)[BAD]
    assert (letter["kind"], letter["boundary"]) == ("timeout", "step")
    assert "fault_env.py" in letter["message"]


@pytest.mark.parametrize(
    ("fault", "where", "how"),
    [
        ("segmentation_fault", "reward", "SIGSEGV"),
        ("abort", "step", "SIGABRT"),
        ("exit", "setup", "exit code 7"),
        ("exit", "reward", "exit code 7"),
    ],
)
async def test_code_that_ends_its_process_is_one_dead_letter(
    redis_url: str, client: redis.Redis, fault: str, where: str, how: str
) -> None:
    """P13: a segmentation fault, an abort and an exit take the process of the environment along, not the worker and no other item."""
    async with ScriptedEngine(script=lambda ask: says("number 1")) as engine:
        metrics = await play(redis_url, faulty(engine.url, fault, where=where), client)
    assert [group.seq for group in groups_of(client, "run-1")] == [n for n in range(ROWS) if n != BAD]
    letter = letters(client)[BAD]
    assert (letter["kind"], letter["boundary"]) == ("environment_error", "process")
    assert how in letter["message"]
    assert count(metrics, "distaff_environment_processes_ended", reason="crashed") == 1


async def test_an_item_that_exhausts_memory_gets_a_memory_error_and_the_others_go_on(
    redis_url: str, client: redis.Redis
) -> None:
    """P13: what the process may allocate is bounded; the item's own code is told, and named in its dead letter."""
    hosts = WorkerSection(environment_memory_bytes=400 << 20)
    async with ScriptedEngine(script=lambda ask: says("number 1")) as engine:
        await play(redis_url, faulty(engine.url, "allocate", score_timeout_s=20), client, hosts=hosts)
    assert [group.seq for group in groups_of(client, "run-1")] == [n for n in range(ROWS) if n != BAD]
    letter = letters(client)[BAD]
    assert letter["kind"] == "scoring_error"
    assert "MemoryError" in letter["message"]


@pytest.mark.slow
async def test_items_that_leak_are_played_in_processes_that_are_replaced(redis_url: str, client: redis.Redis) -> None:
    """P16: 200 items leave tasks, files and memory behind: the processes they are in are replaced, the worker's own memory is bounded."""
    hosts = WorkerSection(environment_growth_bytes=30 << 20)
    before = len(os.listdir("/proc/self/fd")), rss_bytes()

    async def script(ask: Any) -> Any:
        await asyncio.sleep(0.3)  # a process that grows is seen at its next answer to a ping, one a second
        return says("number 1")

    async with ScriptedEngine(script=script) as engine:
        arguments = {"rows": 200, "turns": 1, "every": "leak"}
        config = run_config(
            engine.url,
            environment={"id": "tests.fault_env", "args": arguments},
            rollouts={"group_size": 2},
            producer={"window": 1000},
        )
        metrics = await play(redis_url, config, client, hosts=hosts, seconds=100)
    assert len(groups_of(client, "run-1")) == 200
    assert count(metrics, "distaff_environment_processes_ended", reason="retired") >= 2
    assert len(os.listdir("/proc/self/fd")) - before[0] < 40
    assert rss_bytes() - before[1] < 150 << 20


def rss_bytes(pid: int | str = "self") -> int:
    with open(f"/proc/{pid}/statm") as statm:
        return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.parametrize(
    ("fault", "expected"),
    [("abort", "SIGABRT"), ("exit", "exit code 7"), ("spin", r"longer than 2 s to load.*load_timeout_s")],
)
async def test_an_environment_that_dies_or_hangs_while_it_loads_is_refused(
    redis_url: str, client: redis.Redis, fault: str, expected: str
) -> None:
    """The worker ends with what happened instead of crashing again and again; nothing is used up."""
    async with ScriptedEngine(script=lambda ask: says("number 1")) as engine:
        environment = {
            "id": "tests.fault_env",
            "args": {"where": "load", "faults": {"0": fault}, "rows": 2},
            "load_timeout_s": 2 if fault == "spin" else 60,
        }
        config = run_config(engine.url, environment=environment)
        good = run_config(engine.url, environment={"id": "tests.fault_env", "args": {"rows": 2}})
        await produce(redis_url, good)
        client.set(RunKeys("run-1").config, config.model_dump_json())
        service, _ = make_worker(redis_url)
        with pytest.raises(FatalRun, match=f"(?s){expected}"):
            await asyncio.wait_for(service.run(), 40)
    assert client.llen("rq:queue:default") == 2
    assert client.hget(RunKeys("run-1").state, "dead") == b"0"


async def test_what_an_environment_started_ends_with_it(redis_url: str, client: redis.Redis) -> None:
    """P17: no process is left when a worker has ended, also none that environment code had started and forgotten."""
    async with ScriptedEngine(script=lambda ask: says("number 1")) as engine:
        arguments = {"rows": 3, "every": "leave_a_process"}
        config = run_config(engine.url, environment={"id": "tests.fault_env", "args": arguments})
        await produce(redis_url, config)
        service, _ = make_worker(redis_url)
        task = asyncio.create_task(service.run())
        await until(lambda: settled(client, "run-1"), seconds=60)
        left = sleepers()
        assert len(left) == 12
        service._stop("test")
        await asyncio.wait_for(task, 30)
    await until(lambda: not sleepers() & left, what="processes are left")


def sleepers() -> set[int]:
    """Pids of what `leave_a_process` starts."""
    found = set()
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{name}/cmdline", "rb") as cmdline:
                if b"time.sleep(600)" in cmdline.read():
                    found.add(int(name))
        except OSError:
            continue
    return found


async def test_a_killed_zygote_is_started_anew(redis_url: str, client: redis.Redis) -> None:
    """The process that starts environments, killed from outside, takes them along; the groups are played again."""
    go = asyncio.Event()

    async def script(ask: Any) -> Any:
        if ask.sampling.get("max_tokens") != 1:
            await go.wait()
        return says("number 1")

    async with ScriptedEngine(script=script) as engine:
        config = run_config(engine.url, environment={"id": "tests.fault_env", "args": {"rows": 3}})
        await produce(redis_url, config)
        service, metrics = make_worker(redis_url)
        task = asyncio.create_task(service.run())
        await until(lambda: sum("say a number" in prompt(record) for record in engine.records) == 12, seconds=30)
        zygote = launcher()._zygote
        assert zygote is not None
        hosts = children(zygote.pid)
        assert hosts
        os.kill(zygote.pid, signal.SIGKILL)
        await until(lambda: not any(os.path.exists(f"/proc/{pid}") for pid in hosts), what="hosts outlive their zygote")
        go.set()
        await until(lambda: settled(client, "run-1"), seconds=60)
        service._stop("test")
        await asyncio.wait_for(task, 30)
    check_oracle(client, "run-1")
    assert len(groups_of(client, "run-1")) == 3
    assert count(metrics, "distaff_groups_replayed") == 3


async def test_a_limit_of_the_run_reaches_the_environment_as_what_it_is(redis_url: str, client: redis.Redis) -> None:
    """TurnLimit, raised by the model in the worker, ends the rollout cleanly in the other process."""
    async with ScriptedEngine(script=lambda ask: says("number 1")) as engine:
        config = run_config(
            engine.url,
            environment={"id": "tests.fault_env", "args": {"rows": 1, "turns": 3}},
            rollouts={"group_size": 2, "max_turns": 1},
        )
        await play(redis_url, config, client)
    [group] = groups_of(client, "run-1")
    assert {rollout.stop_condition for rollout in group.rollouts} == {"max_turns_reached"}
