"""P10: a slow or hanging engine costs one deadline, never a slot, and no socket: through the whole worker, for every engine and every hang."""

from __future__ import annotations

import asyncio
import json
import os
import re
import time
from pathlib import Path
from typing import Any

import pytest
import redis

from distaff.keys import RunKeys
from tests.farm_support import make_worker, produce, run_config, says, settled, tokenizer
from tests.harness.oracle import check
from tests.scripted_answers import render, render_stream
from tests.scripted_engine import Ask, Fault, Reply, ScriptedEngine
from tests.worker_support import until

DEADLINE_S = 2.0
PROMISED_S = 1.0
GROUP = 2
PATHS = {"vllm": "/inference/v1/generate", "openai": "/v1/chat/completions"}
GOOD_ROWS = 4


def half_answer(kind: str) -> bytes:
    """An answer that is good as far as it goes: some events of a stream, or half a body."""
    answer = says("number 1 and so on for quite a while")
    if kind == "llamacpp":
        return b"".join(render_stream(answer, "scripted")[:3])
    body = render(answer, PATHS[kind], "scripted")
    return body[: len(body) // 2]


def hangs(kind: str) -> dict[int, Fault]:
    """By row: what the engine does with the second turn of its rollouts."""
    return {
        0: Fault(hang="accept"),
        1: Fault(hang="drip", body=half_answer(kind), drip_s=1.0),
        2: Fault(hang="headers"),
        3: Fault(hang="stall", body=half_answer(kind)),
    }


def row_of(ask: Ask) -> int | None:
    """The row a request is about; None for the worker's own probes."""
    text = str(tokenizer().decode(ask.prompt_ids)) if ask.prompt_ids else json.dumps(ask.messages)
    found = re.search(r"row (\d+)", text)
    return int(found[1]) if found and "and then?" in text else None


def sockets_to(port: int) -> int:
    """Sockets of this process that are connected, or half connected, to `port`."""
    mine = set()
    for entry in Path("/proc/self/fd").iterdir():
        try:
            mine.add(os.readlink(entry).removeprefix("socket:[").removesuffix("]"))
        except OSError:
            continue
    lines = [line.split() for line in Path("/proc/self/net/tcp").read_text().splitlines()[1:]]
    return sum(line[9] in mine and int(line[2].partition(":")[2], 16) == port for line in lines)


def outcomes(client: redis.Redis) -> tuple[list[int], dict[int, dict[str, Any]]]:
    """(rows emitted, row -> dead letter)."""
    keys = RunKeys("run-1")
    entries: Any = client.xrange(keys.groups)
    letters: Any = client.hgetall(keys.dead)
    emitted = sorted(int(fields[b"seq"]) for _, fields in entries)
    return emitted, {int(seq): json.loads(text) for seq, text in letters.items()}


@pytest.mark.parametrize(
    ("kind", "deadline", "failure"),
    [
        ("vllm", "request", "engine_error"),
        ("llamacpp", "request", "engine_error"),
        ("openai", "request", "engine_error"),
        ("vllm", "rollout", "timeout"),
    ],
)
async def test_a_hanging_engine_costs_one_deadline_and_never_a_slot(
    redis_url: str, client: redis.Redis, monkeypatch: pytest.MonkeyPatch, kind: str, deadline: str, failure: str
) -> None:
    """P10: four kinds of hang hold every slot; each is settled at its deadline, the rest is played, and no socket stays."""
    monkeypatch.setattr("distaff_worker.engines.http.IDLE_CONNECTION_S", 0.5)
    faults = hangs(kind)

    async def script(ask: Ask) -> Reply:
        row = row_of(ask)
        return faults.get(row, says("number 1")) if row is not None else says("number 1")

    limits = {"request": 60.0, "rollout": 60.0, deadline: DEADLINE_S}
    async with ScriptedEngine(script=script) as engine:
        config = run_config(
            engine.url,
            run={"mode": "eval" if kind == "openai" else "rl"},
            engine={"kind": kind, "request_timeout_s": limits["request"], "retry_budget_s": limits["request"]},
            environment={"args": {"rows": len(faults) + GOOD_ROWS, "turns": 2}},
            rollouts={"group_size": GROUP, "timeout_s": limits["rollout"], "max_attempts": 1, "rollout_retries": 0},
        )
        await produce(redis_url, config)
        service, metrics = make_worker(redis_url, slots=len(faults))
        task = asyncio.create_task(service.run())
        begun: dict[int, float] = {}
        ended: dict[int, float] = {}

        def all_settled() -> bool:
            for record in engine.records:
                if isinstance(record.reply, Fault) and (row := row_of(record.ask)) is not None:
                    begun.setdefault(row, record.started)
            emitted, dead = outcomes(client)
            for row in [*emitted, *dead]:
                ended.setdefault(row, time.monotonic())
            return settled(client, "run-1")

        await until(all_settled, seconds=60, what="the run did not settle")
        late_s = max(metrics._recent)
        await until(lambda: engine.connections == 0, seconds=15, what="a connection is still open")
        assert sockets_to(int(engine.url.rpartition(":")[2])) == 0
        service._stop("test")
        await asyncio.wait_for(task, 30)
    emitted, dead = outcomes(client)
    assert emitted == [row for row in range(len(faults) + GOOD_ROWS) if row not in faults]
    assert {row: letter["kind"] for row, letter in dead.items()} == dict.fromkeys(faults, failure)
    over_s = {row: ended[row] - begun[row] - DEADLINE_S for row in faults}
    print(f"{kind}, {deadline}: {over_s} s over the deadline, loop late by at most {late_s:.3f} s")
    for row, seconds in over_s.items():
        assert -0.5 < seconds < PROMISED_S + 3 * late_s, f"{faults[row].hang}: {seconds:.2f} s after its deadline"
    asked = sum(isinstance(record.reply, Fault) for record in engine.records)
    assert asked == len(faults) * GROUP, "a request that ran into its deadline was repeated"
    check(client, "run-1")
