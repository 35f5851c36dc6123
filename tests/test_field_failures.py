"""What broke other systems (their issue numbers are in the docstrings), tried on this one. `docs/promises.md` has the whole list."""

from __future__ import annotations

import asyncio
import gc
import json
import random
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import redis
from rq.registry import FailedJobRegistry, StartedJobRegistry

from distaff import GroupConsumer
from distaff.keys import RunKeys
from distaff.types import RolloutItem
from distaff_worker.leases import Lease
from distaff_worker.outcome import Outcome
from distaff_worker.rq_schema import JSONQueue
from tests.farm_support import make_worker, play_to_the_end, produce, run_config, says, settled, tokenizer_dir
from tests.harness.oracle import check
from tests.harness.seeds import seed
from tests.scripted_engine import Ask, Fault, Reply, ScriptedEngine, status
from tests.test_service import RUN, make_service, working
from tests.worker_support import POOL, ScriptedPlayer, check_oracle, emit_of, enqueue, open_run, until

ROOT = Path(__file__).parent.parent


def is_probe(ask: Ask) -> bool:
    return ask.sampling.get("max_tokens") == 1


async def test_aborted_requests_cost_themselves_and_not_their_groups(
    redis_url: str, client: redis.Redis, request: pytest.FixtureRequest
) -> None:
    """P11; miles#2800: 5 % of the requests fail for good; less than 5 % of the good rollouts are thrown away, where dropping groups costs a third."""
    chance = random.Random(seed(request))
    good = 0

    async def script(ask: Ask) -> Reply:
        nonlocal good
        if not is_probe(ask) and chance.random() < 0.05:
            return status(400, "aborted")
        good += not is_probe(ask)
        return says(f"number {ask.number % 5}")

    async with ScriptedEngine(script=script) as engine:
        config = run_config(
            engine.url, environment={"args": {"rows": 24, "turns": 1}}, rollouts={"group_size": 8, "rollout_retries": 2}
        )
        groups = await play_to_the_end(redis_url, config)
    used = sum(rollout.error is None for group in groups for rollout in group.rollouts)
    assert len(groups) == 24
    assert used > 0.95 * good, f"{good} rollouts were sampled, {used} are used"
    check(client, "run-1")


async def test_a_straggler_costs_its_group_one_deadline_and_one_rollout(redis_url: str, client: redis.Redis) -> None:
    """P10; NeMo-RL#3238: one rollout hangs for ever, again on a second life of the worker; its group comes with the others in it."""
    hung: list[int] = []

    async def script(ask: Ask) -> Reply:
        if not is_probe(ask) and len(hung) < 1:
            hung.append(ask.number)
            return Fault(hang="accept")
        return says(f"number {ask.number % 5}")

    async with ScriptedEngine(script=script) as engine:
        config = run_config(
            engine.url, environment={"args": {"rows": 3, "turns": 1}}, rollouts={"timeout_s": 2.0, "rollout_retries": 0}
        )
        groups = await play_to_the_end(redis_url, config, seconds=30)
    assert [len(group.rollouts) for group in groups] == [4, 4, 4]
    failed = [rollout.verdict for group in groups for rollout in group.rollouts if rollout.error]
    assert failed == ["timeout"]
    assert sum(len(group.samples) for group in groups) == 11
    check(client, "run-1")


async def test_a_run_whose_every_group_is_filtered_ends_by_itself(redis_url: str, client: redis.Redis) -> None:
    """prime#784, DAPO#22: equal rewards everywhere: the budget of replacements is used up, the run closes, and a trainer sees its end."""
    async with ScriptedEngine(script=lambda ask: says("number 1")) as engine:
        config = run_config(
            engine.url,
            environment={"args": {"rows": 8, "turns": 1}},
            rollouts={"zero_variance": "drop", "group_size": 2},
            producer={"shuffle": False, "limit": 4, "replacements": 3},
        )
        admitting = asyncio.create_task(produce(redis_url, config))
        service, _ = make_worker(redis_url)
        working_ = asyncio.create_task(service.run())
        report = await asyncio.wait_for(admitting, 60)
        await until(lambda: settled(client, "run-1"), seconds=30)
        service._stop("test")
        await working_
    assert (report.closed, report.replaced) == (True, 3)
    with GroupConsumer("run-1", client, block_s=0.1) as consumer:
        assert list(consumer) == [], "nothing was to be trained on"
    letters: Any = client.hvals(RunKeys("run-1").dead)
    assert {json.loads(letter)["message"] for letter in letters} == {"every rollout has the same reward"}
    assert len(letters) == 7
    check_oracle(client, "run-1")


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_run_without_a_single_group_fails_loudly_with_the_reasons(tmp_path: Path) -> None:
    """prime#784: `distaff run` where everything is filtered ends with code 1 and says why, instead of waiting for samples."""
    with ScriptedEngine(script=lambda ask: says("number 1")) as engine:
        command = [sys.executable, "-m", "distaff", "run", "--environment.id", "tests.marker_env"]
        command += ["--environment.args", '{"rows": 4, "turns": 1}', "--mode", "rl", "--engine.kind", "vllm"]
        command += ["--engine.base-urls", engine.url, "--tokenizer.name", tokenizer_dir(), "--limit", "2"]
        command += ["--rollouts.group-size", "2", "--rollouts.zero-variance", "drop", "--directory", str(tmp_path)]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=280)
    assert done.returncode == 1, done.stderr
    assert "dropped (filter): every rollout has the same reward" in done.stdout


async def test_a_thousand_short_jobs_with_long_pauses_have_no_false_failure(
    redis_url: str, client: redis.Redis
) -> None:
    """rq#2061, #2424: jobs of a millisecond, pauses of the whole interpreter, RQ's own clean-up beside them: each is emitted, none failed."""
    count = 1000
    keys = open_run(client, RUN)
    enqueue(client, RUN, count)
    queue = JSONQueue(POOL, connection=client)
    stop = threading.Event()

    def pause() -> None:
        """As a full collection does: nothing else runs. Then what a stock worker's maintenance does."""
        while not stop.wait(0.05):
            gc.collect()
            StartedJobRegistry(queue=queue).cleanup()

    maintenance = threading.Thread(target=pause)
    maintenance.start()
    try:
        one, two = (ScriptedPlayer() for _ in range(2))
        async with (
            working(make_service(redis_url, one, name="w1", lease_s=2.0)),
            working(make_service(redis_url, two, name="w2", lease_s=2.0)),
        ):
            while client.xlen(keys.groups) < count:
                await asyncio.sleep(0.1)
                time.sleep(0.2)  # the loop stands still
    finally:
        stop.set()
        maintenance.join()
    assert FailedJobRegistry(queue=queue).count == 0
    state: Any = client.hgetall(keys.state)
    assert (state.get(b"dead", b"0"), state.get(b"lost")) == (b"0", None)
    assert sorted(one.played + two.played) == list(range(count))
    check_oracle(client, RUN)


async def test_items_that_wait_for_an_engine_ask_redis_nothing_of_their_own(
    redis_url: str, client: redis.Redis
) -> None:
    """SkyRL#1909, #1978: sixty-four groups in flight cost Redis what one costs: beats and sweeps, no polling for each that waits."""

    async def calls_while_waiting(items: int) -> int:
        client.flushall()
        open_run(client, RUN)
        enqueue(client, RUN, items)
        release = asyncio.Event()

        async def play(lease: Lease, item: RolloutItem) -> Outcome:
            await release.wait()
            return emit_of(item)

        player = ScriptedPlayer(play)
        async with working(make_service(redis_url, player, slots=64, lease_s=10.0, beat_s=0.5)):
            await until(lambda: len(player.played) == items)
            client.config_resetstat()
            await asyncio.sleep(3)
            seen: Any = client.info("commandstats")
            release.set()
            await until(lambda: client.xlen(RunKeys(RUN).groups) == items)
        return sum(int(seen.get(f"cmdstat_{name}", {}).get("calls", 0)) for name in ("evalsha", "blmove", "ping"))

    few, many = await calls_while_waiting(1), await calls_while_waiting(64)
    assert 5 <= few <= 40
    assert abs(many - few) <= 8, f"{few} calls with one item waiting, {many} with sixty-four"
