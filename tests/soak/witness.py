"""A consumer group of our own on the stream, read directly and by the raw entry, so that nothing is freed before it was seen and judged.

Invariant: notes each entry once, by its id, and acknowledges it afterwards; two entries with one number are two notes. Never raises out of
its thread: what is wrong is in `faults`.
"""

from __future__ import annotations

import hashlib
import json
import threading
import time
from collections.abc import Mapping
from typing import Any

import redis

from distaff import scripts
from distaff.clients import connect
from distaff.errors import DistaffError
from distaff.keys import RunKeys
from distaff.wire import decode_group
from distaff_consumer.records import group_to_record
from tests.harness.oracle import check_whole

GROUP = "witness"
COUNT = 16
PAUSE_S = 0.1


def digest(record: Mapping[str, Any]) -> str:
    """Of a record of the archive, however it was spelled."""
    return hashlib.sha256(json.dumps(record, sort_keys=True).encode()).hexdigest()


class Witness:
    """`with Witness(url, run) as witness`: a thread that reads."""

    def __init__(self, url: str, run: str) -> None:
        self.seqs: dict[str, int] = {}
        """Entry id -> number of its group."""
        self.digests: dict[int, str] = {}
        """Number -> digest of the group as an archive must have it."""
        self.faults: list[str] = []
        self.rollouts = self.tokens = 0
        self._keys = RunKeys(run)
        self._client = connect(url, socket_timeout_s=3.0)
        self._free = scripts.register(self._client, "free")
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="witness", daemon=True)
        self._backlog = True

    def __enter__(self) -> Witness:
        self._client.xgroup_create(self._keys.groups, GROUP, "0", mkstream=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join(10)
        self._client.close()

    def _run(self) -> None:
        while not self._stop.is_set():
            try:
                if not self._read():
                    time.sleep(PAUSE_S)
            except redis.RedisError:
                self._backlog = True
                time.sleep(PAUSE_S)

    def _read(self) -> bool:
        """Whether there was something."""
        since = "0" if self._backlog else ">"
        answer: Any = self._client.xreadgroup(GROUP, GROUP, {self._keys.groups: since}, count=COUNT)
        entries = _entries(answer)
        if not entries:
            self._backlog = False
            return False
        for entry_id, fields in entries:
            if fields and entry_id not in self.seqs:
                self._note(entry_id, fields)
        self._free(keys=[self._keys.groups], args=[GROUP, *[entry_id for entry_id, _ in entries]])
        return True

    def _note(self, entry_id: str, fields: Mapping[bytes, bytes]) -> None:
        self.seqs[entry_id] = int(fields[b"seq"])
        try:
            group = decode_group(fields)
            check_whole(group)
        except (AssertionError, DistaffError) as error:
            self.faults.append(f"entry {entry_id}: {error}")
            return
        self.digests[group.seq] = digest(group_to_record(group))
        self.rollouts += len(group.rollouts)
        self.tokens += len(group.samples.token_ids)


def _entries(answer: Any) -> list[tuple[str, Mapping[bytes, bytes]]]:
    streams = answer.values() if isinstance(answer, dict) else [entries for _, entries in answer or []]
    found = []
    for entries in streams:
        flat = entries[0] if entries and isinstance(entries[0], list) else entries
        found += [(entry_id.decode(), fields) for entry_id, fields in flat]
    return found
