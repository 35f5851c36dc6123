"""`distaff status`: what `distaff.cli.observe` reads, as tables or JSON.

Invariant: never writes to Redis; with --watch an outage is shown and waited for.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict

import redis
from rich.console import Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from distaff.cli.observe import RunView, Snapshot, WorkerView, observe
from distaff.cli.screen import results, say
from distaff.cli.signals import StopSignal
from distaff.clients import connect, ping, redact_url
from distaff.errors import ConfigurationError
from distaff.runs import list_runs

EVERY_S = 2.0


def show(url: str, *, run: str | None, watch: bool, as_json: bool) -> int:
    """Print the status once, or until Ctrl-C. Raises ConfigurationError for an unknown run, RedisUnavailable."""
    with connect(url, client_name="distaff-status") as client:
        ping(client, url)
        if run is not None and run not in (known := list_runs(client)):
            raise ConfigurationError(
                f"there is no run {run!r} at {redact_url(url)}; runs here: {', '.join(known) or 'none'}"
            )
        if not watch:
            _print(observe(client, run=run), as_json=as_json)
            return 0
        with StopSignal() as stop:
            snapshots = _snapshots(client, run, stop)
            if as_json or not sys.stdout.isatty():
                for snapshot in snapshots:
                    _print(snapshot, as_json=as_json)
            else:
                _watch(snapshots)
        return 0


def _snapshots(client: redis.Redis, run: str | None, stop: StopSignal) -> Iterator[Snapshot]:
    last: Snapshot | None = None
    while not stop.event.is_set():
        try:
            last = observe(client, run=run, before=last)
        except redis.exceptions.RedisError as error:
            print(f"Redis does not answer ({type(error).__name__}); trying again", file=sys.stderr)
        else:
            yield last
        stop.event.wait(EVERY_S)


def _watch(snapshots: Iterator[Snapshot]) -> None:
    with Live(console=results(), auto_refresh=False, screen=False) as live:
        for snapshot in snapshots:
            live.update(render(snapshot), refresh=True)


def _print(snapshot: Snapshot, *, as_json: bool) -> None:
    if as_json:
        say(json.dumps(asdict(snapshot)))
    else:
        results().print(render(snapshot))


def render(snapshot: Snapshot) -> RenderableType:
    """Both tables."""
    stamp = time.strftime("%H:%M:%S", time.localtime(snapshot.time))
    queues = ", ".join(f"{pool} {length}" for pool, length in snapshot.pools.items()) or "none"
    parts: list[RenderableType] = [Text(f"{stamp}  waiting on the queue of each pool: {queues}")]
    if snapshot.suspended:
        parts.append(Text("suspended: workers take nothing until `rq resume`"))
    parts.append(_runs(snapshot.runs) if snapshot.runs else Text("no runs"))
    parts.append(_workers(snapshot.workers) if snapshot.workers else Text("no workers"))
    return Group(*parts)


def _runs(runs: list[RunView]) -> Table:
    table = Table("run", "pool", "mode", "status", box=None, header_style="bold", pad_edge=False)
    for name in ("queued", "running", "settled", "dead", "groups/s", "tokens/s", "reward", "window"):
        table.add_column(name, justify="right")
    for run in runs:
        total = run.target if run.status == "open" else run.admitted
        kinds = ", ".join(f"{kind} {count}" for kind, count in run.dead_by_kind.items())
        table.add_row(
            run.name,
            run.pool,
            run.mode,
            run.status,
            str(run.queued),
            str(run.running),
            f"{run.settled}/{'?' if total is None else total}",
            f"{run.dead} ({kinds})" if kinds else str(run.dead),
            f"{run.groups_per_s:.2f}",
            f"{run.tokens_per_s:,.0f}",
            "-" if run.mean_reward is None else f"{run.mean_reward:.3f}",
            f"{run.in_window}/{run.window}" if run.window else str(run.in_window),
        )
    return table


def _workers(workers: list[WorkerView]) -> Table:
    table = Table("worker", "pool", "host", box=None, header_style="bold", pad_edge=False)
    for name in ("pid", "running", "heartbeat", "ready", "loop lag", "prefix"):
        table.add_column(name, justify="right")
    for worker in workers:
        table.add_row(
            worker.name,
            worker.pool,
            worker.host,
            str(worker.pid),
            f"{worker.running}/{worker.slots}",
            "-" if worker.heartbeat_age_s is None else f"{worker.heartbeat_age_s:.1f} s ago",
            "yes" if worker.ready else "no",
            "-" if worker.loop_lag_ms is None else f"{worker.loop_lag_ms:.0f} ms",
            "-" if worker.prefix_share is None else f"{worker.prefix_share:.0%}",
        )
    return table
