"""A whole farm in the test's process: producer on a thread, worker service on the loop, groups read from the stream."""

from __future__ import annotations

import asyncio
import atexit
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import cache
from pathlib import Path
from typing import Any

import redis
from transformers import AutoTokenizer

from distaff.clients import SOCKET_TIMEOUT_S, connect
from distaff.config import RunConfig
from distaff.environments.load import load
from distaff.keys import RunKeys
from distaff.policy import read_policy_version
from distaff.runs import read_config_json
from distaff.settings import WorkerSection
from distaff.types import ScoredGroup
from distaff.wire import decode_group
from distaff_producer.produce import Producer
from distaff_producer.report import ProduceReport
from distaff_worker.demo_engine.gguf_tokenizer import demo_tokenizer_dir
from distaff_worker.hosting.launcher import Launcher
from distaff_worker.hosting.opening import Hosting
from distaff_worker.job import GroupPlayer
from distaff_worker.metrics import Metrics
from distaff_worker.service import Service
from distaff_worker.service_options import ServiceOptions
from distaff_worker.warm import WarmRuns
from tests.scripted_engine import Answer
from tests.worker_support import POOL, until

EOS = 2


@cache
def tokenizer_dir() -> str:
    """The demo model's tokenizer, built once a machine."""
    return str(demo_tokenizer_dir(Path(tempfile.gettempdir()) / "distaff-tests"))


@cache
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(tokenizer_dir())


def says(text: str, *, logprob: float = -0.25) -> Answer:
    """An answer of both kinds of routes: the text, and its tokens with the stop token."""
    ids = [*tokenizer()(text, add_special_tokens=False).input_ids, EOS]
    return Answer(token_ids=ids, text=text, logprobs=[logprob] * len(ids))


def run_config(engine_url: str, *, name: str = "run-1", **sections: dict[str, Any]) -> RunConfig:
    """A small RL run on the marker environment; `sections` are merged over it key by key."""
    values: dict[str, dict[str, Any]] = {
        "run": {"name": name, "mode": "rl"},
        "environment": {"id": "tests.marker_env"},
        "engine": {"kind": "vllm", "base_urls": [engine_url], "start_timeout_s": 2, "max_retries": 1},
        "tokenizer": {"name": tokenizer_dir()},
        "sampling": {"max_tokens": 64},
        "rollouts": {"group_size": 4, "timeout_s": 20, "group_timeout_s": 40, "score_timeout_s": 5},
        "producer": {"shuffle": False},
    }
    for section, changes in sections.items():
        values[section] = {**values.get(section, {}), **changes}
    return RunConfig(**values)  # type: ignore[arg-type]


@cache
def launcher() -> Launcher:
    """Starts environments for all tests of this process: its zygote has imported verifiers once."""
    started = Launcher()
    atexit.register(started.close)
    return started


def make_worker(
    url: str,
    *,
    name: str = "w1",
    hosts: WorkerSection | None = None,
    socket_timeout_s: float = SOCKET_TIMEOUT_S,
    **options: Any,
) -> tuple[Service, Metrics]:
    """A worker as `distaff work` builds it."""
    client, metrics = connect(url, socket_timeout_s=socket_timeout_s), Metrics()
    started = launcher()
    started.start()
    started.wait()  # the seconds of the first import are no part of what a test waits for
    hosting = Hosting(
        launcher=started,
        worker=hosts or WorkerSection(),
        on_end=lambda reason: metrics.environments_ended.labels(reason).inc(),
    )
    player = GroupPlayer(
        lambda tokenizing: WarmRuns(
            lambda run: read_config_json(client, run), tokenizing=tokenizing, open_environment=hosting.open
        ),
        worker=name,
        metrics=metrics,
        read_policy=lambda run: read_policy_version(client, run),
    )
    values: dict[str, Any] = {"pool": POOL, "name": name, "slots": 16, "lease_s": 5.0, "beat_s": 0.5, "drain_s": 10.0}
    return Service(client, options=ServiceOptions(**{**values, **options}), player=player, metrics=metrics), metrics


async def produce(url: str, config: RunConfig) -> ProduceReport:
    """The producer on a thread; its environment is loaded here, on the main thread, as verifiers demands."""
    producer = Producer(config, url, load(config.environment))
    return await asyncio.to_thread(producer.run, None)


@asynccontextmanager
async def working_on(url: str, config: RunConfig, **options: Any) -> AsyncIterator[Service]:
    """The run admitted and a worker playing it; the worker is stopped at the end, and what ended it is raised."""
    await produce(url, config)
    service, _ = make_worker(url, **options)
    task = asyncio.create_task(service.run())
    try:
        yield service
        service._stop("test")
        await asyncio.wait_for(task, 30)
    finally:
        if not task.done():
            task.cancel()
            await asyncio.wait({task}, timeout=10)


async def work_until_it_ends(url: str, config: RunConfig, *, seconds: float = 30) -> None:
    """The run admitted and a worker on it that ends by itself; raises what ended it."""
    await produce(url, config)
    service, _ = make_worker(url)
    await asyncio.wait_for(service.run(), seconds)


async def play_to_the_end(url: str, config: RunConfig, *, seconds: float = 60, **options: Any) -> list[ScoredGroup]:
    """Admit, play, and return the groups in the order of their seq."""
    with connect(url) as client:
        async with working_on(url, config, **options):
            await until(lambda: settled(client, config.run.name), seconds=seconds, what="the run did not settle")
        return groups_of(client, config.run.name)


def settled(client: redis.Redis, run: str) -> bool:
    state: Any = client.hgetall(RunKeys(run).state)
    count = int(state.get(b"emitted", 0)) + int(state.get(b"dead", 0))
    return state.get(b"status") == b"closed" and count == int(state[b"admitted"])


def groups_of(client: redis.Redis, run: str) -> list[ScoredGroup]:
    entries: Any = client.xrange(RunKeys(run).groups)
    return sorted((decode_group(fields) for _, fields in entries), key=lambda group: group.seq)
