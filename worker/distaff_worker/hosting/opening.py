"""Opens the environments of runs in host processes, as the worker's settings say.

Invariant: only reads settings and the machine's limits; what is opened belongs to the caller.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from distaff.config import RunConfig
from distaff.settings import LogSection, WorkerSection
from distaff_worker.hosting.environment import HostedEnvironment, HostingOptions
from distaff_worker.hosting.launcher import Launcher
from distaff_worker.hosting.process import HostOptions

CGROUP_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")


@dataclass(frozen=True, slots=True, kw_only=True)
class Hosting:
    """on_end: told why a host has ended: blocked, crashed, retired."""

    launcher: Launcher
    worker: WorkerSection = field(default_factory=WorkerSection)
    log: LogSection = field(default_factory=LogSection)
    on_end: Callable[[str], None] = lambda reason: None

    async def open(self, config: RunConfig) -> HostedEnvironment:
        """The environment of a run, loaded. Raises EnvironmentLoadError, ConfigurationError."""
        worker, limits = self.worker, config.rollouts
        host = HostOptions(
            block_timeout_s=min(limits.block_timeout_s, limits.timeout_s / 2),
            load_timeout_s=config.environment.load_timeout_s,
            memory_bytes=worker.environment_memory_bytes or machine_memory_bytes() // 2,
            log=self.log.model_dump(mode="json"),
        )
        options = HostingOptions(
            processes=worker.environment_processes,
            max_groups=worker.environment_max_groups,
            growth_bytes=worker.environment_growth_bytes,
            host=host,
        )
        return await HostedEnvironment.open(self.launcher, config.environment, options, on_end=self.on_end)


def machine_memory_bytes() -> int:
    """Of the container where there is one with a limit, else of the machine."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for name in CGROUP_LIMITS:
        try:
            memory = min(memory, int(Path(name).read_text()))
        except (OSError, ValueError):  # no such file, or "max"
            continue
    return memory
