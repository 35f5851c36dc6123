"""One worker process as `distaff work` makes it, watched: CPU by stage between two counts of settled groups, loop lag, memory.

Nothing is added to a group's way but the clocks around the stages, and only with --accounts.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from typing import Any

from tests.worker_support import POOL

from benchmarks.accounts import Accounts
from benchmarks.processes import children_cpu_s
from benchmarks.roles.stages import watch_stages
from benchmarks.roles.talk import say
from distaff.clients import connect
from distaff.logs import configure_logging
from distaff.policy import read_policy_version
from distaff.runs import read_config_json
from distaff.settings import LogSection
from distaff_worker.command import prepare_process
from distaff_worker.hosting.launcher import Launcher
from distaff_worker.hosting.opening import Hosting
from distaff_worker.job import GroupPlayer
from distaff_worker.leases import Counts
from distaff_worker.metrics import Metrics
from distaff_worker.service import Service
from distaff_worker.service_options import ServiceOptions
from distaff_worker.warm import WarmRuns


class Watch(Metrics):
    """The worker's metrics, with a note of CPU and time when `first` and when `last` groups were emitted, and of the lag between."""

    def __init__(self, accounts: Accounts | None, *, first: int, last: int) -> None:
        super().__init__()
        self._accounts, self._first, self._last = accounts, first, last
        self._emitted = 0
        self._marks: list[tuple[float, float, dict[str, float]]] = []
        self._lags: list[float] = []

    def emitted(self, counts: Counts, *, size_bytes: int, seconds: float) -> None:
        super().emitted(counts, size_bytes=size_bytes, seconds=seconds)
        self._emitted += 1
        if self._emitted in (self._first, self._last):
            stages = self._accounts.by_stage() if self._accounts else {}
            environment = children_cpu_s()
            stages["environment"] = environment
            self._marks.append((time.monotonic(), time.process_time() + environment, stages))

    def loop_lag(self, seconds: float) -> None:
        super().loop_lag(seconds)
        if len(self._marks) == 1:
            self._lags.append(seconds)

    def report(self) -> dict[str, Any]:
        (wall, cpu, stages), (wall_end, cpu_end, stages_end) = self._marks
        lags = sorted(self._lags) or [0.0]
        return {
            "groups": self._last - self._first,
            "wall_s": wall_end - wall,
            "cpu_s": cpu_end - cpu,
            "stages": {stage: value - stages.get(stage, 0.0) for stage, value in stages_end.items()},
            "lag_p99_s": lags[int(0.99 * (len(lags) - 1))],
            "lag_max_s": lags[-1],
            "started": wall,
            "ended": wall_end,
        }


async def work(arguments: argparse.Namespace) -> None:
    accounts = Accounts() if arguments.accounts else None
    if accounts:
        watch_stages(accounts)
    client, watch = connect(arguments.url), Watch(accounts, first=arguments.first, last=arguments.last)
    launcher = Launcher()
    launcher.start()
    hosting = Hosting(launcher=launcher)
    player = GroupPlayer(
        lambda tokenizing: WarmRuns(
            lambda run: read_config_json(client, run), tokenizing=tokenizing, open_environment=hosting.open
        ),
        worker=arguments.name,
        metrics=watch,
        read_policy=lambda run: read_policy_version(client, run),
    )
    options = ServiceOptions(pool=POOL, name=arguments.name, slots=arguments.slots, drain_s=arguments.drain_s)
    service = Service(client, options=options, player=player, metrics=watch, beats=connect(arguments.url))
    say(ready=True)
    await service.run()
    launcher.close()
    say(**watch.report())


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("url")
    parser.add_argument("--name", default="bench")
    parser.add_argument("--slots", type=int, default=64)
    parser.add_argument("--first", type=int, required=True)
    parser.add_argument("--last", type=int, required=True)
    parser.add_argument("--drain-s", type=float, default=30.0)
    parser.add_argument("--accounts", action="store_true")
    configure_logging(LogSection(format="json"))
    prepare_process()
    asyncio.run(work(parser.parse_args()))


if __name__ == "__main__":
    main()
