"""`distaff evaluate` as one call: archive an evaluation's groups, then report on the archive.

Invariant: a report is about every group the run emitted and every dead letter, or there is none; it is made from files alone, so an
interrupted evaluation goes on where it stood and gives the report it would have given. Installs no signal handlers.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import redis
import structlog

from distaff.clients import connect, ping
from distaff.errors import ConfigurationError, RedisUnavailable
from distaff.keys import RunKeys
from distaff.runs import read_config_json, read_state
from distaff.types import JSON, ScoredGroup
from distaff_consumer import archive_command
from distaff_consumer.archive import Progress
from distaff_consumer.errors import ArchiveError
from distaff_consumer.evaluate import ItemResult, metrics
from distaff_consumer.files import replacing
from distaff_consumer.reading import Place, read_at, read_placed
from distaff_consumer.records import record_to_group
from distaff_consumer.report import render_metrics
from distaff_consumer.samples import write_samples
from distaff_consumer.segments import Compression

GROUPS = "groups"
"""Folder of the archive, inside the evaluation's."""
CONSUMER_GROUP = "evaluate"

log = structlog.get_logger(__name__)


class EvaluateSettings(Protocol):
    """What of `distaff.settings.EvaluateSection` is used here."""

    def folder(self, run: str) -> Path: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationReport:
    """What one call did."""

    run: str
    directory: Path
    groups: int
    """Collected so far, by this call and those before."""
    metrics: dict[str, JSON] | None
    """The content of metrics.json; None when the call was stopped before the end of the run."""

    @property
    def ended(self) -> bool:
        return self.metrics is not None

    def summary(self) -> str:
        return render(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Archive:
    """How the groups are kept until the report is made."""

    directory: Path
    batch: int = 64
    group: str = CONSUMER_GROUP
    rotate_bytes: int = 256 << 20
    compression: Compression = "none"
    fsync: bool = True

    def folder(self, run: str) -> Path:
        return self.directory / GROUPS


def render(report: EvaluationReport) -> str:
    """The report as text for a terminal or a pipe."""
    if report.metrics is None:
        return (
            f"evaluation of {report.run}: stopped with {report.groups} groups in {report.directory}; run the same command "
            "again to go on"
        )
    names = f"{report.directory / 'metrics.json'}\n{report.directory / 'samples.jsonl'}"
    return f"{render_metrics(report.metrics, width=120)}{names}"


def run(
    run: str,
    *,
    redis_url: str,
    evaluate: EvaluateSettings,
    progress: Callable[[Progress], None] | None = None,
    stop: threading.Event | None = None,
    allow_unprotected: bool = False,
) -> EvaluationReport:
    """Collect the groups of `run` to its end, then write `metrics.json` and `samples.jsonl`.

    Raises ConfigurationError, RedisUnavailable, ArchiveError, WireError; the groups collected so far are kept.
    """
    directory = evaluate.folder(run)
    show = progress or (lambda _: None)
    archived = archive_command.run(
        run,
        redis_url=redis_url,
        archive=_Archive(directory=directory),
        progress=lambda at: show(_renamed(at, run)),
        stop=stop,
        allow_unprotected=allow_unprotected,
    )
    numbers = _report(run, redis_url, directory, found=archived.archived) if archived.ended else None
    return EvaluationReport(run=run, directory=directory, groups=archived.archived, metrics=numbers)


def _renamed(at: Progress, run: str) -> Progress:
    return Progress(label=f"evaluate {run}", done=at.done, total=at.total, note=at.note)


def _report(run: str, redis_url: str, directory: Path, *, found: int) -> dict[str, JSON]:
    with connect(redis_url, client_name="distaff-evaluate") as client:
        ping(client, redis_url)
        try:
            config, opened = _settings_of(client, run, found, directory)
            letters = list(_dead_letters(client, run))
        except (redis.exceptions.ConnectionError, redis.exceptions.TimeoutError) as error:
            raise RedisUnavailable(
                f"Redis went away while the report was made ({type(error).__name__}): run the same command again"
            ) from error
    items, places = _read(directory / GROUPS)
    numbers = metrics(items, run=run, config=config, dead_letters=letters, opened=opened)
    _write(directory, numbers, (record_to_group(read_at(place)) for place in places))
    return numbers


def _settings_of(client: redis.Redis, run: str, found: int, directory: Path) -> tuple[Mapping[str, JSON], float]:
    """The run's configuration and when it was opened; ArchiveError when groups were acknowledged that are not here."""
    state, stored = read_state(client, run), read_config_json(client, run)
    if state is None:
        raise ConfigurationError(f"run {run!r} is gone from Redis: its groups are in {directory / GROUPS}")
    if found < state.emitted:
        raise ArchiveError(
            f"{directory} holds {found} of the {state.emitted} groups of run {run!r}; the others were collected into another "
            "directory or could not be read (see the log). Give that directory, or evaluate again under another run name"
        )
    return json.loads(stored) if stored else {}, state.opened


def _dead_letters(client: redis.Redis, run: str) -> Iterator[Mapping[str, JSON]]:
    """Each once: a scan may give an entry again."""
    seen: set[bytes] = set()
    for seq, letter in client.hscan_iter(RunKeys(run).dead, count=100):
        if seq not in seen:
            seen.add(seq)
            yield json.loads(letter)


def _read(archive: Path) -> tuple[list[ItemResult], list[Place]]:
    """What the numbers need of each group, and where the groups are in the order of their items."""
    found: list[tuple[int, Place]] = []
    items: list[ItemResult] = []
    for place, record in read_placed(archive):
        group = record_to_group(record)
        items.append(ItemResult.of(group))
        found.append((group.seq, place))
    return items, [place for _, place in sorted(found, key=lambda pair: pair[0])]


def _write(directory: Path, numbers: Mapping[str, JSON], groups: Iterator[ScoredGroup]) -> None:
    """Samples first: when metrics.json is there, the evaluation is complete."""
    try:
        count = write_samples(directory / "samples.jsonl", groups)
        with replacing(directory / "metrics.json") as file:
            file.write(json.dumps(numbers, indent=2, allow_nan=False).encode() + b"\n")
    except OSError as error:
        raise ArchiveError(
            f"the report cannot be written to {directory}: {error.strerror}. The groups are kept there: mend it and run the same "
            "command again"
        ) from error
    log.info("evaluation.reported", directory=str(directory), samples=count)
