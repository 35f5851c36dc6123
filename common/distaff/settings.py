"""Every setting of every command, declared once: the configuration file, the environment and the flags are made from this.

Invariant: a key means the same in all three and in every command; a command reads what it needs and ignores the rest.
It only declares: reading and merging is `distaff.cli.loading`. Needs pydantic, so it is no part of `import distaff`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from distaff.config import Count, RunConfig, RunSection, Seconds, Section

DEFAULT_REDIS_URL = "redis://127.0.0.1:6379/0"
RUNS_DIRECTORY = Path("runs")


class LogSection(Section):
    format: Literal["auto", "console", "json"] = "auto"
    """auto: console on a terminal, JSON lines otherwise. Logs go to standard error."""
    level: Literal["debug", "info", "warning", "error"] = "info"
    """debug also shows the traceback of an error that ends the command."""


def _sixth_of_lease(data: dict[str, Any]) -> float:
    return float(data["lease_s"]) / 6


class WorkerSection(Section):
    processes: Count = 1
    """Worker processes that `distaff run` starts; `distaff work` is always one."""
    slots: Count = 64
    """Groups one worker process plays at once."""
    lease_s: Seconds = 30.0
    """An item whose worker is silent for this long goes back to the queue."""
    beat_s: Seconds = Field(default_factory=_sixth_of_lease)
    """Seconds between two extensions of the leases; a sixth of lease_s unless set."""
    drain_s: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 30.0
    """After SIGTERM: how long running groups may still take before they are handed back."""
    health_host: str = "127.0.0.1"
    """Address of /healthz, /readyz and /metrics."""
    health_port: Annotated[int, Field(ge=0, le=65535)] = 0
    """Port of /healthz, /readyz and /metrics; 0: none is opened."""
    burst: bool = False
    """End when the queue is empty."""
    exit_when_done: bool = False
    """End when every run of the pool is closed and all its items are settled."""
    max_groups: Annotated[int, Field(ge=0)] = 0
    """End after this many groups, to be started anew by whoever supervises; 0: never."""
    max_rss_bytes: Annotated[int, Field(ge=0)] = 0
    """End when this process has grown to so much memory, to be started anew by whoever supervises; 0: never. Environments have processes of
    their own, see environment_growth_bytes."""
    environment_processes: Count = 1
    """Child processes of a worker in which the environment of a run is loaded; groups are spread over them."""
    environment_max_groups: Annotated[int, Field(ge=0)] = 0
    """Such a process is replaced after so many groups; 0: never for that reason."""
    environment_growth_bytes: Count = 1 << 30
    """Such a process is replaced when it has grown by so much since the environment was loaded."""
    environment_memory_bytes: Annotated[int, Field(ge=0)] = 0
    """What such a process may allocate beyond what it has after loading; then its code gets a MemoryError. 0: half of the machine's memory,
    or of the container's."""

    @model_validator(mode="after")
    def _beats_in_time(self) -> WorkerSection:
        if self.beat_s * 2 > self.lease_s:
            raise ValueError(
                f"beat_s ({self.beat_s:g}) must be at most half of lease_s ({self.lease_s:g}), "
                "or one late beat loses the lease"
            )
        return self


class ArchiveSection(Section):
    directory: str = ""
    """Folder of the JSONL files; runs/<run> when empty."""
    rotate_bytes: Count = 256 << 20
    """A file that has reached this size is followed by a new one."""
    compression: Literal["none", "zstd"] = "none"
    fsync: bool = True
    """Force groups to the disk before they are acknowledged. False is faster and loses some at a power cut."""
    batch: Count = 64
    """Groups read, written and acknowledged together."""
    group: str = "archive"
    """Name of the consumer group on the run's stream."""

    def folder(self, run: str) -> Path:
        """Where the archive of `run` goes."""
        return Path(self.directory) if self.directory else RUNS_DIRECTORY / run


class EvaluateSection(Section):
    n: Annotated[int, Field(ge=1, le=4096)] = 1
    """Rollouts of each item."""
    temperature: Annotated[float, Field(ge=0, le=10)] = 0.0
    """Used instead of sampling.temperature."""
    split: Literal["train", "eval"] = "eval"
    """Used instead of environment.split."""
    directory: str = ""
    """Folder of metrics.json and samples.jsonl; runs/<run>/evaluation when empty."""

    def folder(self, run: str) -> Path:
        """Where the report on `run` goes."""
        return Path(self.directory) if self.directory else RUNS_DIRECTORY / run / "evaluation"


class Settings(RunConfig):
    """What a run is (`RunConfig`) and how this process does its part of it."""

    redis_url: str = ""
    """redis://, rediss:// or unix:// URL. When empty, `run` and `demo` start an embedded server and the other commands use
    redis://127.0.0.1:6379/0."""
    allow_unprotected: bool = False
    """Accept a Redis that has no password and is not on this machine."""
    log: LogSection = LogSection()
    worker: WorkerSection = WorkerSection()
    archive: ArchiveSection = ArchiveSection()
    evaluate: EvaluateSection = EvaluateSection()

    def run_config(self) -> RunConfig:
        """The part that travels to the workers through Redis. It holds no secrets."""
        return RunConfig(**{name: getattr(self, name) for name in RunConfig.model_fields})

    def for_evaluation(self) -> Settings:
        """These settings with what `distaff evaluate` plays: mode eval, its own split, rollouts per item and temperature."""
        return self.model_copy(
            update={
                "run": RunSection(name=self.run.name, pool=self.run.pool, mode="eval"),
                "environment": self.environment.model_copy(update={"split": self.evaluate.split}),
                "sampling": self.sampling.model_copy(update={"temperature": self.evaluate.temperature}),
                "rollouts": self.rollouts.model_copy(update={"group_size": self.evaluate.n, "min_rollouts": 0}),
                "producer": self.producer.model_copy(update={"epochs": 1, "shuffle": False}),
                "wire": self.wire.model_copy(update={"messages": True}),
            }
        )
