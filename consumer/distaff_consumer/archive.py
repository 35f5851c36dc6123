"""From the stream to the disk: read groups, write them, make them durable, acknowledge them.

Invariant: a group is acknowledged after it is on disk and never before; a group that is on disk is not written again. Holds at
most `batch` groups or about 32 MiB of lines, and one group more.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import redis
import structlog

from distaff.consuming_steps import Delivery
from distaff.redaction import redact
from distaff.runs import RunState, read_state
from distaff_consumer.jsonl import JsonlWriter
from distaff_consumer.owner import Ownership
from distaff_consumer.records import group_to_record
from distaff_consumer.source import StoppableConsumer, Stopped

PENDING_BYTES = 32 << 20
"""Lines kept before they are written, however few groups they are."""
READ_BATCH = 16
"""Groups fetched in one read; they are in memory at once."""
MAX_DELIVERIES = 1000
"""An archiver that dies again and again, for want of disk space say, must not make groups be given up."""
BLOCK_S = 0.5

log = structlog.get_logger(__name__)


class ArchiveOptions(Protocol):
    """What of `distaff.settings.ArchiveSection` is used here."""

    @property
    def batch(self) -> int: ...
    @property
    def group(self) -> str: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """Where an archive stands, for a display."""

    label: str
    done: int
    """Groups in the archive."""
    total: int | None
    """Groups the run will have as far as is known; None while the producer does not know its end."""
    note: str


class Archiver:
    """Archives one run into one open writer. `run` once."""

    def __init__(
        self,
        run: str,
        client: redis.Redis,
        writer: JsonlWriter,
        *,
        options: ArchiveOptions,
        owner: Ownership,
        max_group_bytes: int,
        stop: threading.Event,
        progress: Callable[[Progress], None],
    ) -> None:
        self._run, self._client, self._writer = run, client, writer
        self._batch, self._owner, self._stop, self._progress = options.batch, owner, stop, progress
        writer.on_wait = self._waiting_for_disk
        self._pending: list[Delivery] = []
        self._state: RunState | None = None
        self.groups = 0
        """Written and acknowledged by this object."""
        self.duplicates = 0
        """Deliveries of groups that were in the archive already."""
        self._consumer = StoppableConsumer(
            run,
            client,
            stop=stop,
            before_wait=self._flush,
            group=options.group,
            consumer=owner.consumer,
            batch=min(options.batch, READ_BATCH),
            block_s=BLOCK_S,
            max_deliveries=MAX_DELIVERIES,
            max_bytes=max_group_bytes,
        )

    @property
    def parked(self) -> int:
        """Groups that could not be read and were put aside in Redis."""
        return self._consumer.parked

    @property
    def missing(self) -> int:
        """Groups the run has emitted and that neither the archive nor the parked ones account for."""
        emitted = self._state.emitted if self._state else 0
        return max(emitted - len(self._writer) - self.parked, 0)

    def run(self) -> bool:
        """Archive to the end of the run: True. False when `stop` was set: what was read is written and acknowledged."""
        with self._consumer:
            try:
                self._refresh()
                self._show()
                for delivery in self._consumer:
                    self._take(delivery)
                self._flush()
                self._refresh()
                self._show()
            except Stopped:
                self._flush_last()
                return False
        return True

    def _waiting_for_disk(self, waited_s: float) -> None:
        self._show(f"disk full for {waited_s:.0f} s: free space in {self._writer.path.parent}")

    def _take(self, delivery: Delivery) -> None:
        group = delivery.group
        if group.group_id in self._writer:
            self.duplicates += 1
            log.info("group.already_archived", run=group.run, seq=group.seq, deliveries=delivery.deliveries)
        else:
            self._writer.append(group.group_id, group_to_record(group))
        self._pending.append(delivery)
        if self._stop.is_set():
            raise Stopped
        if len(self._pending) >= self._batch or self._writer.pending_bytes >= PENDING_BYTES:
            self._flush()

    def _flush(self) -> None:
        """Make durable and acknowledge what is pending."""
        if not self._pending:
            return
        self._refresh()
        if not self._writer.sync():
            raise Stopped
        self._consumer.ack(*self._pending)
        self.groups += len(self._pending)
        self._pending.clear()
        self._show()

    def _flush_last(self) -> None:
        """One more time after a stop; what cannot be written or acknowledged without waiting is delivered again."""
        try:
            self._flush()
        except Stopped:
            log.warning("archive.stopped_unwritten", run=self._run, groups=len(self._pending))

    def _refresh(self) -> None:
        """Look at the run: whose groups these are and how many there will be. An outage is the consumer's to wait for."""
        try:
            state = read_state(self._client, self._run)
        except (redis.exceptions.ConnectionError, redis.exceptions.TimeoutError) as error:
            log.debug("run.unread", run=self._run, reason=redact(str(error)))
            return
        if state is not None and state.opened:
            self._owner.check(state.opened)
            self._state = state

    def _show(self, note: str = "") -> None:
        progress = Progress(label=f"archive {self._run}", done=len(self._writer), total=_total(self._state), note=note)
        self._progress(progress)


def _total(state: RunState | None) -> int | None:
    if state is None:
        return None
    items = state.admitted if state.status == "closed" else state.target
    return None if items is None else max(items - state.dead, 0)
