"""The JSONL files of an archive: append, make durable, rotate. `distaff_consumer.reading` reads them.

Invariant: when `sync` returns True, every record appended before is on disk in a file that parses; whatever a crash or a
full disk leaves behind is an unfinished end of the newest file, which the next attempt or the next opening cuts off.
Never tells of a record as written before fsync, and never leaves a record half in one file and half in the next.
"""

from __future__ import annotations

import errno
import os
import shutil
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Self

import structlog

from distaff.errors import ConfigurationError
from distaff.types import JSON
from distaff_consumer import index
from distaff_consumer.errors import ArchiveError
from distaff_consumer.files import sync_directory
from distaff_consumer.ids import GroupIds
from distaff_consumer.lines import encode_line
from distaff_consumer.lock import DirectoryLock
from distaff_consumer.reading import read_archive
from distaff_consumer.segments import Compression, Segment, segment, segments, zstandard

__all__ = ["JsonlWriter", "read_archive"]

FULL = (errno.ENOSPC, errno.EDQUOT)
"""What waiting can mend."""

log = structlog.get_logger(__name__)


class JsonlWriter:
    """The only writer of an archive directory; a context manager, used by one thread.

    Files are `groups-000001.jsonl` (`.jsonl.zst`), ...; a file is left for the next one before it grows past `rotate_bytes`.
    Raises ConfigurationError when the directory cannot be used or has a writer, ArchiveError when a file in it is damaged.
    """

    def __init__(
        self,
        directory: Path,
        *,
        rotate_bytes: int,
        compression: Compression = "none",
        stop: threading.Event | None = None,
        fsync: bool = True,
        retry_s: float = 1.0,
        on_wait: Callable[[float], None] = lambda waited_s: None,
    ) -> None:
        """fsync: False leaves it to the system when `sync` reaches the disk. stop: ends the wait for disk space. on_wait: called with the seconds waited so far, at each retry."""
        self._directory = directory
        self._rotate_bytes = rotate_bytes
        self._compression: Compression = compression
        self._compress = (
            zstandard().ZstdCompressor(level=3, write_checksum=True).compress if compression == "zstd" else bytes
        )
        self._fsync = fsync
        self._stop = stop or threading.Event()
        self._retry_s = retry_s
        self.on_wait = on_wait
        self._ids = GroupIds()
        self._pending: list[bytes] = []
        self._pending_ids: list[str] = []
        self._file: int | None = None
        self.pending_bytes = 0
        """Size of what the next `sync` writes, before compression."""
        self.synced_bytes = 0
        """Written since this writer was opened."""
        self._lock = _lock(directory)
        try:
            self._recover()
        except BaseException:
            self._lock.release()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def __contains__(self, group_id: str) -> bool:
        """Whether the group is in the archive, or appended and not yet synced."""
        return group_id in self._ids

    def __len__(self) -> int:
        """Groups in the archive, those not yet synced included."""
        return len(self._ids)

    @property
    def path(self) -> Path:
        """The newest file."""
        return self._segment.path

    def append(self, group_id: str, record: Mapping[str, JSON]) -> None:
        """Keep a record in memory until `sync`. The line starts with its `group_id`."""
        line = encode_line({"group_id": group_id, **record})
        self._pending.append(line)
        self.pending_bytes += len(line)
        self._ids.add(group_id)
        self._pending_ids.append(group_id)

    def sync(self) -> bool:
        """Put everything appended on disk. A full disk is waited for; False when `stop` is set first: nothing was written.

        Raises ArchiveError for what waiting does not mend (a read-only file system, an I/O error).
        """
        if not self._pending:
            return True
        payload = self._compress(b"".join(self._pending))
        if not self._write_when_possible(payload):
            return False
        for group_id in self._pending_ids:
            self._segment_ids.add(group_id)
        self._pending_ids.clear()
        self._pending.clear()
        self.pending_bytes = 0
        self.synced_bytes += len(payload)
        return True

    def close(self) -> None:
        """Give the directory up. What was not synced is forgotten."""
        if self._file is not None:
            os.close(self._file)
            self._file = None
        self._lock.release()

    def _write_when_possible(self, payload: bytes) -> bool:
        since: float | None = None
        while True:
            try:
                self._write(payload)
            except OSError as error:
                if error.errno not in FULL:
                    raise ArchiveError(
                        f"{self.path} cannot be written: {error.strerror}. Nothing of it was acknowledged"
                    ) from error
                since = self._report_full(since, len(payload))
                if self._stop.wait(self._retry_s):
                    return False
            else:
                if since is not None:
                    log.info(
                        "archive.disk_recovered",
                        directory=str(self._directory),
                        waited_s=round(time.monotonic() - since, 1),
                    )
                return True

    def _report_full(self, since: float | None, needed_bytes: int) -> float:
        now = time.monotonic()
        if since is None:
            free = shutil.disk_usage(self._directory).free
            log.error(
                "archive.disk_full",
                directory=str(self._directory),
                needed_bytes=needed_bytes,
                free_bytes=free,
                hint="free space or grow the volume: writing goes on by itself, nothing is acknowledged until then",
            )
            since = now
        self.on_wait(now - since)
        return since

    def _write(self, payload: bytes) -> None:
        if self._size and self._size + len(payload) > self._rotate_bytes:
            self._rotate()
        file = self._opened()
        os.ftruncate(file, self._size)
        rest = memoryview(payload)
        while rest:
            rest = rest[os.write(file, rest) :]
        if self._fsync:
            os.fsync(file)
        self._size += len(payload)

    def _opened(self) -> int:
        if self._file is None:
            file = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
            try:
                sync_directory(self._directory)
            except BaseException:
                os.close(file)
                raise
            self._file = file
        return self._file

    def _rotate(self) -> None:
        if self._file is not None:
            os.ftruncate(self._file, self._size)
            os.close(self._file)
            self._file = None
        self._start_after(self._segment.number, index.Entry(self._size, self._segment_ids))

    def _start_after(self, number: int, finished: index.Entry | None) -> None:
        """Leave the newest file; the next one is made when there is something to write."""
        if finished:
            self._entries[self.path.name] = finished
            index.save(self._directory, self._entries)
        self._segment: Segment = segment(self._directory, number + 1, self._compression)
        self._segment_ids, self._size = GroupIds(), 0

    def _recover(self) -> None:
        """Learn what the directory holds and cut what a crash left unfinished."""
        files = segments(self._directory)
        self._entries = index.collect(self._directory, files[:-1])
        for entry in self._entries.values():
            self._ids.update(entry.ids)
        if not files:
            self._start_after(0, None)
            return
        self._segment = files[-1]
        newest = index.scan(self._segment, newest=True)
        self._ids.update(newest.ids)
        self._cut(newest.size_bytes)
        self._segment_ids, self._size = newest.ids, newest.size_bytes
        if self._segment.compression != self._compression:
            self._start_after(self._segment.number, newest)

    def _cut(self, end: int) -> None:
        torn_bytes = self._segment.path.stat().st_size - end
        if torn_bytes:
            os.truncate(self._segment.path, end)
            log.warning("archive.tail_cut", path=str(self._segment.path), kept_bytes=end, cut_bytes=torn_bytes)


def _lock(directory: Path) -> DirectoryLock:
    try:
        directory.mkdir(parents=True, exist_ok=True)
        return DirectoryLock(directory)
    except OSError as error:
        raise ConfigurationError(
            f"the archive directory {directory} cannot be used: {error.strerror}. Give a directory this user may write to"
        ) from None
