"""`distaff work`: one worker process, from its settings to its exit code.

Invariant: nothing is loaded that the run does not need, and nothing is claimed before Redis was checked. Whatever ends the worker,
what it had claimed is settled or handed back first.
"""

from __future__ import annotations

import asyncio
import faulthandler
import json
import os
import secrets
import socket
import sys

import redis
import structlog

from distaff.clients import connect, explained, ping
from distaff.logs import adopt_loggers
from distaff.policy import read_policy_version
from distaff.runs import list_runs, read_config_json, read_state
from distaff.safety import check_redis
from distaff.settings import DEFAULT_REDIS_URL, Settings
from distaff.starting import patiently
from distaff_worker import collector
from distaff_worker.health import HealthServer
from distaff_worker.hosting.launcher import Launcher
from distaff_worker.hosting.opening import Hosting
from distaff_worker.job import GroupPlayer
from distaff_worker.metrics import Metrics
from distaff_worker.service import Service
from distaff_worker.service_options import ServiceOptions
from distaff_worker.warm import WarmRuns

log = structlog.get_logger(__name__)
STUCK_LEASES = 4
"""A loop that has not turned for so many lease times has lost its items and does not come back: the stacks of all threads are written to
standard error, and the process ends, to be started anew by whoever supervises. Done in C, so also when the interpreter is stuck."""
UNHEALTHY_LOOP_S = 300.0
"""A loop that has not turned for so long will not again; the health check asks for a restart."""
SWITCH_INTERVAL_S = 0.001
"""How long a thread that computes (a scorer, the tokenizer) may keep the interpreter from the event loop, which lets go of it at every
send and receive. Python's own 5 ms add up to three times as many stalls."""


def run(settings: Settings) -> int:
    """Work until told to stop; returns 0. Raises ConfigurationError, RedisUnavailable before anything was claimed, FatalRun after."""
    url = settings.redis_url or DEFAULT_REDIS_URL
    with connect(url, client_name="distaff-worker") as client:
        ping(client, url)
        patiently(lambda: check_redis(client, url, allow_unprotected=settings.allow_unprotected), role="the worker")
        prepare_process()
        try:
            with connect(url, client_name="distaff-beat", socket_timeout_s=max(1.0, settings.worker.beat_s)) as beats:
                asyncio.run(_work(client, beats, settings))
        except redis.RedisError as error:
            raise explained(error, url) from error
    return 0


async def _work(client: redis.Redis, beats: redis.Redis, settings: Settings) -> None:
    worker, metrics = settings.worker, Metrics()
    name = f"{socket.gethostname()}.{os.getpid()}.{secrets.token_hex(3)}"
    launcher = Launcher()
    launcher.start()
    hosting = Hosting(
        launcher=launcher,
        worker=worker,
        log=settings.log,
        on_end=lambda reason: metrics.environments_ended.labels(reason).inc(),
    )
    player = GroupPlayer(
        lambda tokenizing: WarmRuns(
            lambda of_run: read_config_json(client, of_run), tokenizing=tokenizing, open_environment=hosting.open
        ),
        worker=name,
        metrics=metrics,
        read_policy=lambda of_run: read_policy_version(client, of_run),
    )
    options = ServiceOptions(
        pool=settings.run.pool,
        name=name,
        slots=worker.slots,
        lease_s=worker.lease_s,
        beat_s=worker.beat_s,
        drain_s=worker.drain_s,
        burst=worker.burst,
        max_groups=worker.max_groups,
        max_rss_bytes=worker.max_rss_bytes,
    )
    service = Service(
        client,
        options=options,
        player=player,
        metrics=metrics,
        beats=beats,
        done=(lambda: _all_ended(client, settings.run.pool)) if worker.exit_when_done else None,
        alive=lambda: faulthandler.dump_traceback_later(STUCK_LEASES * worker.lease_s, exit=True),
    )
    health = HealthServer(
        registry=metrics.registry, healthy=lambda: service.tick_age_s < UNHEALTHY_LOOP_S, ready=lambda: service.ready
    )
    if worker.health_port:
        health.start(worker.health_host, worker.health_port)
    try:
        await service.run()
    finally:
        faulthandler.cancel_dump_traceback_later()
        health.stop()
        launcher.close()


def _all_ended(client: redis.Redis, pool: str) -> bool:
    """There are runs of this pool, and each is closed with everything settled."""
    states = [read_state(client, name) for name in list_runs(client) if _pool_of(client, name) == pool]
    return bool(states) and all(state is not None and state.ended for state in states)


def _pool_of(client: redis.Redis, name: str) -> str:
    text = read_config_json(client, name)
    return str(json.loads(text)["run"]["pool"]) if text else ""


def prepare_process() -> None:
    """What a worker process does once, before its loop runs: takes care that nothing stalls the loop later."""
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    adopt_loggers()
    collector.settle()
