"""How a consumer reads the group stream, written once: the synchronous and the asyncio consumer drive it.

Invariant: an entry that Redis delivered to this consumer is yielded, parked, or found again (after a cut, a cancelled read, a
crash); it is acknowledged only when the caller says so, when it was parked, or when its group was yielded before.
Does no I/O itself: it is a generator of steps, and whoever drives it sends back the reply or throws the error.
"""

from __future__ import annotations

import logging
import os
import secrets
import socket
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from typing import Any

from redis import exceptions

from distaff.clients import is_full
from distaff.consuming_steps import MAX_BLOCK_S, Call, Delivery, Pause, RunScript, Steps, Work
from distaff.errors import CodecMissing, ConfigurationError, GroupTooLarge, SchemaVersionError, WireError
from distaff.keys import RUN_NAME, RunKeys
from distaff.retrying import until_answered
from distaff.seen import SeenNumbers
from distaff.types import ScoredGroup
from distaff.wire import MAX_GROUP_BYTES, decode_group

log = logging.getLogger("distaff.consumer")

_PAGE = 100
_FIRST_PAUSE_S = 0.05
_LONGEST_PAUSE_S = 2.0


@dataclass(frozen=True, slots=True)
class _Entry:
    id: str
    fields: Mapping[Any, Any]
    deliveries: int


class ConsumerCore:
    """State and logic of one consumer. Every public method that is a generator has to be driven to its end."""

    def __init__(
        self,
        run: str,
        *,
        group: str = "trainer",
        consumer: str | None = None,
        batch: int = 8,
        claim_idle_s: float = 300.0,
        block_s: float = 1.0,
        max_deliveries: int = 5,
        start: str = "0",
        reconnect_s: float = 300.0,
        max_bytes: int = MAX_GROUP_BYTES,
        messages: bool = True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        require(RUN_NAME.fullmatch(run), f"run {run!r}: use 1 to 64 letters, digits, '_' or '-'")
        require(group, "group is empty: name the consumer group")
        require(batch >= 1 and max_deliveries >= 1, "batch and max_deliveries must be at least 1")
        require(0 < block_s <= MAX_BLOCK_S, f"block_s is {block_s}: use more than 0 and at most {MAX_BLOCK_S}")
        require(claim_idle_s > 0 and reconnect_s >= 0, "claim_idle_s must be above 0 and reconnect_s not below")
        self.run, self.group = run, group
        self.name = consumer or f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(4)}"
        self.user = "the user of this connection"
        """Whom Redis knows us as, for messages."""
        self.parked = 0
        """Deliveries this consumer gave up."""
        self.duplicates = 0
        """Entries acknowledged because their group was yielded before."""
        self._keys = RunKeys(run)
        self._batch, self._max_deliveries, self._start = batch, max_deliveries, start
        self._claim_idle_s, self._block_s, self._reconnect_s = claim_idle_s, block_s, reconnect_s
        self._max_bytes, self._messages, self._clock = max_bytes, messages, clock
        self._buffer: deque[_Entry] = deque()
        self._held: dict[str, int] = {}
        """Entries in the caller's hands, and the numbers of their items."""
        self._twins: dict[int, list[str]] = {}
        """Later entries of a group that is in the caller's hands; they are acknowledged with it."""
        self._seen = SeenNumbers()
        self._backlog: str | None = "-"
        """Where to go on looking for entries that are ours already; None when all of them are known."""
        self._reading = False
        """True from the start of a read until its reply is here, and after one whose reply was lost."""
        self._second_look = inf
        self._joined = False
        self._opened: bytes | None = None
        self._next_claim = 0.0
        self._failures = 0

    def join(self) -> Steps[None]:
        """Create the consumer group unless it is there: from now on nothing is freed before this group acknowledged it."""
        # Looked for first, because a full Redis refuses XGROUP CREATE even where there is nothing to create.
        if not (yield from self._group_exists()):
            create = Call("xgroup_create", (self._keys.groups, self.group, self._start), {"mkstream": True})
            try:
                yield from self._reliable(create)
            except exceptions.ResponseError as error:
                if not str(error).startswith("BUSYGROUP"):
                    raise
        if self._opened is None:
            (self._opened,) = yield from self._reliable(Call("hmget", (self._keys.state, ["opened"])))
        self._joined = True

    def _group_exists(self) -> Steps[bool]:
        try:
            rows = yield from self._reliable(Call("xinfo_groups", (self._keys.groups,)))
        except exceptions.ResponseError as error:
            if "no such key" not in str(error):
                raise
            return False
        return any(_id(row["name"]) == self.group for row in rows)

    def next_delivery(self) -> Steps[Delivery | None]:
        """The next group, or None at the end of the run."""
        while True:
            while self._buffer:
                delivery = yield from self._accept(self._buffer[0])
                if delivery is not None:
                    return delivery
            if not (yield from self._fill()):
                return None

    def acknowledge(self, deliveries: Iterable[Delivery]) -> Steps[int]:
        """Acknowledge, then free what every consumer group has acknowledged; the number that was pending."""
        ids: list[str] = []
        for delivery in deliveries:
            ids += [delivery.entry_id, *self._twins.get(delivery.group.seq, ())]
        acknowledged, _ = yield from self._reliable(RunScript("free", [self._keys.groups], [self.group, *ids]))
        for entry_id in ids:
            self._twins.pop(self._held.pop(entry_id, -1), None)
        return int(acknowledged)

    def leave(self) -> Steps[None]:
        """Remove this member from the group if nothing is pending for it, which its name would be needed to find."""
        if not self._joined or self._backlog is not None:
            return
        rows = yield Call("xpending_range", (self._keys.groups, self.group, "-", "+", 1, self.name))
        if not rows:
            yield Call("xgroup_delconsumer", (self._keys.groups, self.group, self.name))

    # Reading

    def _fill(self) -> Steps[bool]:
        """Try to buffer entries; False when the run is over."""
        if not self._joined:
            yield from self.join()
        if self._backlog is not None:
            yield from self._read_backlog()
            return True
        if self._clock() >= self._second_look:
            self._backlog, self._second_look = "-", inf
            return True
        if self._clock() >= self._next_claim:
            yield from self._claim_idle()
        if not self._buffer:
            yield from self._read_new()
        if self._buffer or self._backlog is not None:
            return True
        over = yield from self._run_is_over()
        # What was appended before the state was read is readable now: one more look decides.
        yield from self._read_new(block=not over)
        if self._buffer or self._backlog is not None or not over:
            return True
        return not (yield from self._nothing_pending())

    def _read_new(self, *, block: bool = False) -> Steps[None]:
        failures = self._failures
        # Until the reply is here entries may be ours without our knowing them.
        self._backlog, self._reading = "-", True
        reply = yield from self._reliable(
            Call(
                "xreadgroup",
                (self.group, self.name, {self._keys.groups: ">"}),
                {"count": self._batch, "block": max(1, int(self._block_s * 1000)) if block else None},
            )
        )
        if self._failures == failures:
            self._backlog, self._reading = None, False
            self._buffer.extend(_Entry(_id(entry_id), fields, 1) for entry_id, fields in _entries(reply))
        # Else a reply was lost. What was in it comes before what is in this one; the backlog has both, in order.

    def _read_backlog(self) -> Steps[None]:
        """Entries of an earlier life of this name, or of a read whose reply was lost."""
        rows, after = yield from self._pending_page(self._backlog or "-", self._batch, {"consumername": self.name})
        self._backlog = (yield from self._take(rows, min_idle_ms=0, unseen=self._reading)) or after
        if self._backlog is None and self._reading:
            # The server may notice only later that nobody waits for that read any more, and deliver to it until then.
            self._second_look, self._reading = self._clock() + self._block_s + 1, False

    def _claim_idle(self) -> Steps[None]:
        """Entries that any member, dead or alive, has kept for too long."""
        idle_ms = max(1, int(self._claim_idle_s * 1000))
        cursor: str | None = "-"
        while cursor is not None and not self._buffer:
            rows, cursor = yield from self._pending_page(cursor, _PAGE, {"idle": idle_ms})
            cursor = (yield from self._take(rows, min_idle_ms=idle_ms)) or cursor
        if not self._buffer:
            self._next_claim = self._clock() + min(self._claim_idle_s / 4, MAX_BLOCK_S)

    def _pending_page(
        self, cursor: str, count: int, whose: Mapping[str, Any]
    ) -> Steps[tuple[list[dict[str, Any]], str | None]]:
        """Some pending entries, and where to go on; None when there are no more."""
        rows: list[dict[str, Any]] = yield from self._reliable(
            Call("xpending_range", (self._keys.groups, self.group, cursor, "+", count), whose)
        )
        return rows, f"({_id(rows[-1]['message_id'])}" if len(rows) == count else None

    def _take(self, rows: Sequence[Mapping[str, Any]], *, min_idle_ms: int, unseen: bool = False) -> Steps[str | None]:
        """Claim the first pending entry that is not in our hands already, and park those before it that were delivered too often.

        Where to go on looking; None when nothing of `rows` was claimed. One at a time, because a claim counts as a delivery: an entry
        at which consumers die must not use up the deliveries of its neighbours. unseen: nobody was ever given them (only the reply to
        our read was lost), so that this is no delivery more.
        """
        known = self._held.keys() | {entry.id for entry in self._buffer}
        for row in rows:
            entry_id, deliveries = _id(row["message_id"]), int(row["times_delivered"])
            if entry_id in known:
                continue
            if deliveries >= self._max_deliveries and not unseen:
                yield from self._park(entry_id, f"delivered {deliveries} times and never acknowledged")
                continue
            self._backlog = self._backlog or "-"
            deliveries += not unseen
            claimed = yield from self._reliable(
                Call(
                    "xclaim",
                    (self._keys.groups, self.group, self.name, min_idle_ms, [entry_id]),
                    {"retrycount": deliveries},
                )
            )
            self._buffer.extend(_Entry(_id(i), fields, deliveries) for i, fields in claimed if fields)
            return f"({entry_id}"
        return None

    # What is read

    def _accept(self, entry: _Entry) -> Steps[Delivery | None]:
        """Decode the first buffered entry, and take it off the buffer once it is a delivery, a duplicate or parked."""
        size = sum(len(value) for value in entry.fields.values())
        try:
            group: ScoredGroup = yield Work(lambda: self._decode(entry.fields), size)
        except (SchemaVersionError, CodecMissing, GroupTooLarge):
            raise  # the fault of this consumer's installation or settings: another one may read it
        except WireError as error:
            yield from self._park(entry.id, str(error))
            self._buffer.popleft()
            return None
        if group.seq in self._seen and not (yield from self._run_began_anew()):
            yield from self._duplicate(entry, group.seq)
            return None
        if self._opened is None:  # it came before the run, whose numbers it remembers from here on
            (self._opened,) = yield from self._reliable(Call("hmget", (self._keys.state, ["opened"])))
        self._buffer.popleft()
        self._seen.add(group.seq)
        self._held[entry.id] = group.seq
        return Delivery(group=group, entry_id=entry.id, deliveries=entry.deliveries)

    def _duplicate(self, entry: _Entry, seq: int) -> Steps[None]:
        """Take an entry whose group was yielded before off the buffer, acknowledged unless the caller has not done that with the group.

        Redis that lost the end of its log delivers anew what it does not know to have delivered, or to have had at all.
        """
        if seq not in self._held.values():
            yield from self._reliable(RunScript("free", [self._keys.groups], [self.group, entry.id]))
        elif entry.id not in self._held:
            self._held[entry.id] = seq
            self._twins.setdefault(seq, []).append(entry.id)
        self._buffer.popleft()
        self.duplicates += 1
        log.info("delivery.duplicate run=%s seq=%d entry=%s", self.run, seq, entry.id)

    def _decode(self, fields: Mapping[Any, Any]) -> ScoredGroup:
        group = decode_group(fields, max_bytes=self._max_bytes, messages=self._messages)
        if group.run != self.run:
            raise WireError(f"group {group.group_id} is in the stream of run {self.run}")
        return group

    def _park(self, entry_id: str, reason: str) -> Steps[None]:
        text = reason.replace("\n", " ")[:500].encode("utf-8", "replace")
        keys = [self._keys.groups, self._keys.parked(self.group)]
        try:
            parked = yield from self._reliable(
                RunScript("park", keys, [self.group, entry_id, self.name, text]), full=True
            )
        except exceptions.ResponseError as error:
            if not is_full(error):
                raise
            # Only acknowledging the groups behind it makes room: it stays pending and is tried again at the end.
            log.warning("delivery.park_postponed run=%s group=%s entry=%s", self.run, self.group, entry_id)
            yield Pause(self._block_s)
            return
        self.parked += int(parked)
        log.warning("delivery.parked run=%s group=%s entry=%s reason=%s", self.run, self.group, entry_id, reason)

    # The end of the run

    def _run_is_over(self) -> Steps[bool]:
        status, admitted, emitted, dead, opened = yield from self._reliable(
            Call("hmget", (self._keys.state, ["status", "admitted", "emitted", "dead", "opened"]))
        )
        self._opened = self._opened or opened
        return status == b"closed" and int(emitted or 0) + int(dead or 0) == int(admitted or 0)

    def _nothing_pending(self) -> Steps[bool]:
        """Whether every pending entry of the consumer group is in the hands of this consumer's caller."""
        summary = yield from self._reliable(Call("xpending", (self._keys.groups, self.group)))
        counts = {_id(row["name"]): int(row["pending"]) for row in summary["consumers"]}
        if counts.pop(self.name, 0) and (yield from self._unknown_are_ours()):
            self._backlog = "-"
        if counts:
            yield Pause(self._block_s)
        return not counts and self._backlog is None

    def _unknown_are_ours(self) -> Steps[bool]:
        """Whether entries are pending for us that are not in the caller's hands."""
        rows, _ = yield from self._pending_page("-", len(self._held) + 1, {"consumername": self.name})
        return any(_id(row["message_id"]) not in self._held for row in rows)

    def _run_began_anew(self) -> Steps[bool]:
        """Whether this is another run of the same name (deleted and opened again): its numbers start again, too."""
        (opened,) = yield from self._reliable(Call("hmget", (self._keys.state, ["opened"])))
        known, self._opened = self._opened, opened
        if known is None or opened == known:
            return False
        self._forget()
        return True

    def _forget(self) -> None:
        self._held.clear()
        self._twins.clear()
        self._seen.clear()

    # Redis, present or not

    def _reliable(self, step: Call | RunScript, *, full: bool = False) -> Steps[Any]:
        """The reply to `step`, repeated until Redis answers; `full` lets the error of a full server through."""
        while True:
            try:
                return (
                    yield from until_answered(
                        step,
                        budget_s=self._reconnect_s,
                        clock=self._clock,
                        full=full,
                        on_failure=self._count_failure,
                        user=self.user,
                    )
                )
            except exceptions.ResponseError as error:
                if not str(error).startswith("NOGROUP"):
                    raise
            yield from self._rejoin()

    def _count_failure(self) -> None:
        self._failures += 1

    def _rejoin(self) -> Steps[None]:
        """The consumer group is gone: begin again. What was yielded of the run counts unless it is another run by now.

        It is the same one when Redis lost the end of its log, and another when the run was deleted or Redis flushed.
        """
        log.warning("group.recreated run=%s group=%s", self.run, self.group)
        known, self._opened = self._opened, None
        yield from self.join()
        if known is None or self._opened != known:
            self._forget()


def require(condition: object, message: str) -> None:
    if not condition:
        raise ConfigurationError(f"consumer: {message}")


def _id(value: bytes | str) -> str:
    return value.decode() if isinstance(value, bytes) else value


def _entries(reply: Any) -> list[tuple[bytes, Mapping[Any, Any]]]:
    """The entries of an XREADGROUP of one stream: RESP2 gives [[stream, entries]], RESP3 {stream: [entries]}."""
    if not reply:
        return []
    if isinstance(reply, dict):
        (entries,) = reply.values()
        return list(entries[0]) if entries and isinstance(entries[0], list) else list(entries)
    return list(reply[0][1])
