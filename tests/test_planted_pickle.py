"""P26: a pickle planted anywhere in Redis is not executed: not by our worker, nor by `rq` in the form we document.

Each test that says so is worth something because stock `rq` on the same plants does execute them, which is tested too.
"""

from __future__ import annotations

import asyncio
import base64
import json
import pickle
import sys
import time
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import redis

from distaff.keys import RunKeys
from distaff_worker.claim import Claimer
from distaff_worker.rq_schema import JOB_PREFIX
from distaff_worker.settle import Settler
from tests.harness.processes import start
from tests.test_service import make_service, working
from tests.worker_support import POOL, ScriptedPlayer, check_oracle, enqueue, open_run, until

RUN = "run-1"
QUEUE_CLASS = "distaff_worker.rq_schema.JSONQueue"
PLACES = ("data", "meta", "result", "exc_info")
REGISTRIES = ("wip", "finished", "failed", "deferred", "ready", "scheduled", "canceled")


class Bomb:
    """Unpickling it creates a file; the name tells who did it."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> Any:
        return Path.touch, (self.marker,)


def bomb(folder: Path, name: str) -> bytes:
    return pickle.dumps(Bomb(folder / name), protocol=0)  # text, so that it also gets through where RQ expects text


def plant(client: redis.Redis, folder: Path, *, places: Sequence[str] = PLACES) -> None:
    """Bombs in these fields of jobs on the queue and in every registry, in results, worker hashes, executions, and as members of keys."""
    folder.mkdir(exist_ok=True)
    client.sadd("rq:queues", f"rq:queue:{POOL}")
    for status, where in [("queued", "queue"), *((_status(registry), registry) for registry in REGISTRIES)]:
        for place in places:
            name = f"planted-{where}-{place}"
            fields: dict[Any, Any] = {"status": status, "origin": POOL, "created_at": "2026-01-01T00:00:00.000000Z"}
            fields |= {
                "data": zlib.compress(b'["distaff_worker.job.play", null, [], {"item": {}}]'),
                "retries_left": 5,
                "timeout": 60,
            }
            packed = bomb(folder, f"{where}-{place}")
            fields[place] = zlib.compress(packed) if place in ("data", "exc_info") else packed
            client.hset(f"{JOB_PREFIX}{name}", mapping=fields)
            _enroll(client, where, name)
            result = {"type": "1", "return_value": base64.b64encode(bomb(folder, f"{where}-return-value")).decode()}
            client.xadd(f"rq:results:{name}", result)  # type: ignore[arg-type]
    _plant_worker(client, folder)


def plant_members(client: redis.Redis, folder: Path) -> None:
    """Bombs as what queue and registry list; RQ's own tools cannot read such names."""
    client.rpush(f"rq:queue:{POOL}", bomb(folder, "queue-member"))
    client.zadd(f"rq:wip:{POOL}", {bomb(folder, "wip-member"): 1})


def _status(registry: str) -> str:
    return {"wip": "started", "ready": "ready_to_enqueue"}.get(registry, registry)


def _enroll(client: redis.Redis, where: str, name: str) -> None:
    if where == "queue":
        client.rpush(f"rq:queue:{POOL}", name)
    elif where == "wip":
        client.zadd(f"rq:wip:{POOL}", {f"{name}:e1": 1})
    else:
        client.zadd(f"rq:{where}:{POOL}", {name: 1 if where != "finished" else time.time() + 600})


def _plant_worker(client: redis.Redis, folder: Path) -> None:
    packed = bomb(folder, "worker")
    fields: dict[Any, Any] = {
        "birth": "2026-01-01T00:00:00.000000Z",
        "queues": POOL,
        "state": "busy",
        "hostname": "h",
        "pid": "1",
    }
    fields |= {"current_job": packed, "meta": packed, "ip_address": "1.2.3.4"}
    client.hset("rq:worker:planted", mapping=fields)
    client.sadd("rq:worker:planted:executions", "planted-wip-data:e1")
    client.hset(
        "rq:execution:planted-wip-data:e1",
        mapping={"id": "e1", "job_id": "planted-wip-data", "created_at": "1", "last_heartbeat": packed},
    )
    for key in ("rq:workers", f"rq:workers:{POOL}"):
        client.sadd(key, "rq:worker:planted")


def rq(url: str, *argv: str, **environ: str) -> tuple[int, str]:
    with start([sys.executable, "-m", "rq.cli", *argv, "-u", url], env=environ) as child:
        return child.wait(60), child.log


def executed(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize("place", ["meta", "result"])
def test_stock_rq_info_executes_a_planted_pickle(
    place: str, client: redis.Redis, redis_url: str, tmp_path: Path
) -> None:
    """Why the documented command has a queue class; and the proof that the plants of the other tests would go off."""
    plant(client, tmp_path / "went-off", places=[place])
    rq(redis_url, "info", "-r")
    assert f"wip-{place}" in executed(tmp_path / "went-off")


@pytest.mark.parametrize("place", PLACES)
def test_the_documented_rq_info_executes_none(place: str, client: redis.Redis, redis_url: str, tmp_path: Path) -> None:
    """By flag or by variable, with every view of it; what can be shown is shown."""
    for view, way in (("-r", "flag"), ("-R", "variable"), ("-W", "variable")):
        client.flushall()
        plant(client, tmp_path / "went-off", places=[place])
        flags = ["--queue-class", QUEUE_CLASS] if way == "flag" else []
        environ = {"RQ_QUEUE_CLASS": QUEUE_CLASS} if way == "variable" else {}
        code, said = rq(redis_url, "info", view, *flags, **environ)
        assert executed(tmp_path / "went-off") == [], said
        assert code == 0, said


def test_the_documented_rq_requeue_executes_none(client: redis.Redis, redis_url: str, tmp_path: Path) -> None:
    """With -S json. Stock `rq requeue` is the counter-proof."""
    plant(client, tmp_path / "went-off")
    job = "planted-failed-meta"
    client.zadd(f"rq:failed:{POOL}", {job: time.time() + 600})
    rq(redis_url, "requeue", "--queue", POOL, "-S", "json", job)
    assert executed(tmp_path / "went-off") == []
    client.zadd(f"rq:failed:{POOL}", {job: time.time() + 600})
    rq(redis_url, "requeue", "--queue", POOL, job)
    assert executed(tmp_path / "went-off") == ["failed-meta"]


async def test_a_worker_executes_none_and_plays_what_is_its_own(
    client: redis.Redis, redis_url: str, tmp_path: Path
) -> None:
    """Claims, sweeps, tidies and settles among the plants; they end as rejected jobs, and the run's own items are emitted."""
    plant(client, tmp_path / "went-off")
    plant_members(client, tmp_path / "went-off")
    open_run(client, RUN)
    enqueue(client, RUN, 3)
    client.rpush(f"rq:queue:{POOL}", "no-such-job")
    player = ScriptedPlayer()
    service = make_service(redis_url, player)
    async with working(service):
        await until(lambda: client.xlen(RunKeys(RUN).groups) == 3)
        await until(lambda: client.llen(f"rq:queue:{POOL}") == 0)
        await until(lambda: client.zcount(f"rq:wip:{POOL}", 10, "+inf") == 0)
        await asyncio.to_thread(service._sweeper.tidy)
        await asyncio.to_thread(service._sweeper.sweep)
    assert executed(tmp_path / "went-off") == []
    assert sorted(player.played) == [0, 1, 2]
    client.zremrangebyscore(f"rq:wip:{POOL}", 0, 10)  # started jobs of others are left to others
    check_oracle(client, RUN)


def test_a_pickle_under_the_id_of_an_item_is_a_dead_letter(client: redis.Redis, redis_url: str, tmp_path: Path) -> None:
    """The item is given up with the reason; nothing was executed on the way, nor by looking at the letter."""
    (tmp_path / "went-off").mkdir()
    keys = open_run(client, RUN)
    enqueue(client, RUN, 1, data=zlib.compress(bomb(tmp_path / "went-off", "item")))
    enqueue(client, RUN, 1, data=bomb(tmp_path / "went-off", "item"))

    async def play() -> None:
        async with working(make_service(redis_url, ScriptedPlayer())):
            await until(lambda: client.hlen(keys.dead) == 2)

    asyncio.run(play())
    letters: Any = client.hvals(keys.dead)
    assert {json.loads(letter)["kind"] for letter in letters} == {"rejected"}
    assert executed(tmp_path / "went-off") == []
    check_oracle(client, RUN)


@pytest.mark.parametrize("kind", ["string", "list", "set", "zset", "stream"])
def test_a_key_of_another_type_where_a_job_should_be_takes_no_worker_down(
    kind: str, client: redis.Redis, redis_url: str
) -> None:
    """P26: what is on the queue may name anything; it is passed over, and the items around it are claimed."""
    open_run(client, RUN)
    enqueue(client, RUN, 1)
    _make(client, f"{JOB_PREFIX}hostile", kind)
    client.rpush(f"rq:queue:{POOL}", "hostile")
    enqueue(client, RUN, 1)
    leases = Claimer(client, pool=POOL, worker="w", worker_key="rq:worker:w", lease_s=5).claim(8)
    assert [lease.place[1] for lease in leases] == [0, 1]
    assert client.llen(f"rq:queue:{POOL}") == 0
    settler = Settler(client, pool=POOL, worker="w", worker_key="rq:worker:w")
    assert [settler.release(lease, "handed_back") for lease in leases] == ["released", "released"]


def _make(client: redis.Redis, key: str, kind: str) -> None:
    match kind:
        case "string":
            client.set(key, "x")
        case "list":
            client.rpush(key, "x")
        case "set":
            client.sadd(key, "x")
        case "zset":
            client.zadd(key, {"x": 1})
        case _:
            client.xadd(key, {"x": "y"})


def test_a_job_whose_counters_are_nonsense_is_claimed_like_any_other(client: redis.Redis) -> None:
    """What a claim gives the worker is numbers, whatever the job's hash and the run's policy hold."""
    open_run(client, RUN)
    nonsense: list[dict[Any, Any]] = [
        {"distaff_lost": "many", "distaff_attempts": "nan", "distaff_first": "inf"},
        {"distaff_lost": "9" * 400, "distaff_attempts": "-5", "distaff_first": "1e400"},
        {"distaff_attempts": "0x10", "distaff_first": "\xff", "result_ttl": "soon"},
        {"distaff_lost": "1", "distaff_attempts": "2", "distaff_first": "1796000000.25"},
    ]
    names = enqueue(client, RUN, len(nonsense))
    for name, fields in zip(names, nonsense, strict=True):
        client.hset(f"{JOB_PREFIX}{name}", mapping=fields)
    client.hset(RunKeys(RUN).policy, "version", "latest")
    before = time.time()
    leases = Claimer(client, pool=POOL, worker="w", worker_key="rq:worker:w", lease_s=5).claim(8)
    assert [(lease.lost, lease.attempts) for lease in leases] == [(0, 0), (0, 0), (0, 0), (1, 2)]
    assert all(abs(lease.first - before) < 5 for lease in leases[:3])
    assert leases[3].first == 1796000000.25
    assert {lease.policy_version for lease in leases} == {0}
