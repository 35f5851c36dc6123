"""The producer as one call: check Redis, load the environment, admit the run, close the environment.

Invariant: a run that is closed already and has lost nothing is recognised before the environment is loaded.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable

import redis

from distaff.clients import connect, ping
from distaff.config import RunConfig
from distaff.logs import adopt_loggers
from distaff.runs import read_config_json, read_state
from distaff.safety import check_redis
from distaff.starting import patiently
from distaff_producer.admit import check_same
from distaff_producer.produce import OUTAGE_BUDGET_S, Producer
from distaff_producer.report import ProduceReport, Progress
from distaff_producer.restore import Restorer


def run(
    config: RunConfig,
    *,
    redis_url: str,
    allow_unprotected: bool = False,
    progress: Callable[[Progress], None] | None = None,
    stop: threading.Event | None = None,
    outage_budget_s: float = OUTAGE_BUDGET_S,
) -> ProduceReport:
    """Admit the items of `config.run` and return when the run is closed, or when `stop` is set (it then stays open).

    Runs in the calling thread, which must not be one with a running event loop, and installs no signal handlers. Raises ConfigurationError, EnvironmentLoadError,
    EnvironmentFailure, RedisUnavailable.
    """
    with connect(redis_url, client_name="distaff-producer") as client:
        ping(client, redis_url)
        give_up = stop.is_set if stop else lambda: False

        def look() -> ProduceReport | None:
            check_redis(client, redis_url, allow_unprotected=allow_unprotected)
            return _closed(config, client)

        if (closed := patiently(look, role="the producer", give_up=give_up)) is not None:
            return closed
    # Imported late: verifiers takes seconds to import, and a closed run needs none of it.
    from distaff.environments.load import load

    environment = load(config.environment)
    adopt_loggers()
    try:
        return Producer(config, redis_url, environment, stop=stop, outage_budget_s=outage_budget_s).run(progress)
    finally:
        asyncio.run(environment.close())


def _closed(config: RunConfig, client: redis.Redis) -> ProduceReport | None:
    """The report when there is nothing left to do. Raises ConfigurationError when the run exists with another configuration."""
    name = config.run.name
    stored, state = read_config_json(client, name), read_state(client, name)
    if stored is None or state is None:
        return None
    check_same(config, stored)
    if state.status != "closed" or Restorer(client, run=name, pool=config.run.pool).lost(state):
        return None
    return _already_closed(name, state.admitted)


def _already_closed(run_name: str, admitted: int) -> ProduceReport:
    return ProduceReport(
        run=run_name,
        admitted=0,
        already_there=admitted,
        elsewhere=0,
        restored=0,
        replaced=0,
        total=admitted,
        was_closed=True,
        closed=True,
        seconds=0.0,
    )
