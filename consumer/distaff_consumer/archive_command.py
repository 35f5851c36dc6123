"""`distaff archive` as one call.

Invariant: what is wrong with the settings is found before the first group is read. Installs no signal handlers.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import redis
import structlog

from distaff.clients import connect, ping
from distaff.errors import ConfigurationError
from distaff.runs import list_runs, read_config_json, read_state
from distaff.safety import check_redis
from distaff.starting import patiently
from distaff.wire import MAX_GROUP_BYTES
from distaff_consumer.archive import ArchiveOptions, Archiver, Progress
from distaff_consumer.jsonl import JsonlWriter
from distaff_consumer.owner import Ownership
from distaff_consumer.segments import Compression, segments

log = structlog.get_logger(__name__)


class ArchiveSettings(ArchiveOptions, Protocol):
    """What of `distaff.settings.ArchiveSection` is used here."""

    @property
    def rotate_bytes(self) -> int: ...
    @property
    def compression(self) -> Compression: ...
    @property
    def fsync(self) -> bool: ...
    def folder(self, run: str) -> Path: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ArchiveReport:
    """What one call did."""

    run: str
    directory: Path
    groups: int
    """Acknowledged by this call."""
    archived: int
    """In the directory."""
    duplicates: int
    """Of the acknowledged, those that had been written before."""
    parked: int
    """Groups that could not be read and are not in the archive; they are kept in Redis."""
    missing: int
    """Groups of the ended run that this archiver never saw: others had acknowledged them before it joined. 0 when it was stopped."""
    written_bytes: int
    files: int
    ended: bool
    """The run has ended and everything that was there is archived. False when the call was stopped."""
    seconds: float

    def summary(self) -> str:
        """For the end of the command."""
        state = "the run has ended" if self.ended else "stopped; run the same command again to go on"
        text = (
            f"archive of {self.run}: {self.archived} groups in {self.files} files in {self.directory} ({self.groups} now, "
            f"{self.duplicates} again, {self.written_bytes} bytes, {self.seconds:.1f} s); {state}"
        )
        if self.parked:
            text += f"\n{self.parked} groups could not be read and are missing: see the log for delivery.parked"
        if self.missing:
            text += (
                f"\n{self.missing} groups of the run are not in this directory: other consumers had acknowledged them, which frees them, "
                "before this archiver first came (start it with the others), or an earlier archiver parked them"
            )
        return text


def run(
    run: str,
    *,
    redis_url: str,
    archive: ArchiveSettings,
    progress: Callable[[Progress], None] | None = None,
    stop: threading.Event | None = None,
    allow_unprotected: bool = False,
) -> ArchiveReport:
    """Archive the groups of `run` until it has ended or `stop` is set; the run need not have been opened yet.

    Raises ConfigurationError, RedisUnavailable, ArchiveError, WireError (a group this installation cannot read). Nothing is
    lost by any of them: what was not acknowledged is delivered again.
    """
    started = time.monotonic()
    with connect(redis_url, client_name="distaff-archive") as client:
        stop = stop or threading.Event()
        ping(client, redis_url)
        max_group_bytes = patiently(
            lambda: _look(client, run, url=redis_url, allow_unprotected=allow_unprotected),
            role="the archiver",
            give_up=stop.is_set,
        )
        return _run(run, client, archive, progress or (lambda _: None), stop, max_group_bytes, started)


def _look(client: redis.Redis, run: str, *, url: str, allow_unprotected: bool) -> int:
    """Whether this Redis and this run are fit; the limit on a decoded group."""
    check_redis(client, url, allow_unprotected=allow_unprotected)
    if read_state(client, run) is None:
        log.warning("run.awaited", run=run, known=list_runs(client)[:10], mend="correct --run, or produce the run")
    return _max_group_bytes(client, run)


def _run(
    run: str,
    client: redis.Redis,
    archive: ArchiveSettings,
    progress: Callable[[Progress], None],
    stop: threading.Event,
    max_group_bytes: int,
    started: float,
) -> ArchiveReport:
    directory = archive.folder(run)
    with JsonlWriter(
        directory,
        rotate_bytes=archive.rotate_bytes,
        compression=archive.compression,
        fsync=archive.fsync,
        stop=stop,
    ) as writer:
        archiver = Archiver(
            run,
            client,
            writer,
            options=archive,
            owner=_owner(directory, run, empty=len(writer) == 0),
            max_group_bytes=max_group_bytes,
            stop=stop,
            progress=progress,
        )
        ended = archiver.run()
        return ArchiveReport(
            run=run,
            directory=directory,
            groups=archiver.groups,
            archived=len(writer),
            duplicates=archiver.duplicates,
            parked=archiver.parked,
            missing=archiver.missing if ended else 0,
            written_bytes=writer.synced_bytes,
            files=len(segments(directory)),
            ended=ended,
            seconds=time.monotonic() - started,
        )


def _owner(directory: Path, run: str, *, empty: bool) -> Ownership:
    try:
        return Ownership(directory, run, empty=empty)
    except OSError as error:
        raise ConfigurationError(f"the archive directory {directory} cannot be used: {error.strerror}") from None


def _max_group_bytes(client: redis.Redis, run: str) -> int:
    """The run's own limit where the run is known and it is larger than the usual one."""
    stored = read_config_json(client, run)
    configured = json.loads(stored).get("wire", {}).get("max_group_bytes", 0) if stored else 0
    return max(MAX_GROUP_BYTES, int(configured))
