"""Dead letters: read, put back on the queue, forgotten.

Invariant: an item is on the queue or a dead letter, never both, and never neither: one script moves it. What a letter holds is never trusted
to be whole: it may have been written by another version. Part of the base install: RQ's key names and the job's fields are written out
here (RQ 3.0); a contract test holds them against RQ and the producer.
"""

from __future__ import annotations

import json
import math
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Literal, cast

import redis

from distaff import scripts
from distaff.errors import ConfigurationError
from distaff.keys import RunKeys, job_id, rq_prefix
from distaff.runs import read_config_json

RetryAnswer = Literal["queued", "underway", "none", "gone"]
JOB_FUNCTION = "distaff_worker.job.play"
TIMEOUT_MARGIN_S, RESULT_TTL_S, FAILURE_TTL_S, RETRIES = 60, 3600, 7 * 24 * 3600, 1_000_000
SCAN_COUNT = 100
BATCH = 50


@dataclass(frozen=True, slots=True, kw_only=True)
class Letter:
    """One dead letter as it is stored."""

    seq: int
    text: bytes
    content: Mapping[str, Any]
    """The DeadLetter as JSON; empty when it cannot be read."""

    @property
    def kind(self) -> str:
        return str(self.content.get("kind", "unreadable"))

    @property
    def boundary(self) -> str:
        return str(self.content.get("boundary", ""))


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """A letter without its item."""

    seq: int
    kind: str
    boundary: str
    message: str
    attempts: int
    first: float
    """Unix seconds."""
    last: float
    worker: str

    @classmethod
    def of(cls, letter: Letter) -> Summary:
        content = letter.content
        return cls(
            seq=letter.seq,
            kind=letter.kind,
            boundary=letter.boundary,
            message=str(content.get("message", "")),
            attempts=int(_number(content.get("attempts"))),
            first=_number(content.get("first")),
            last=_number(content.get("last")),
            worker=str(content.get("worker", "")),
        )


def _number(value: Any) -> float:
    """A finite number of at least 0."""
    usable = isinstance(value, (int, float)) and math.isfinite(value)
    return max(float(value), 0.0) if usable else 0.0


def summaries(client: redis.Redis, run: str) -> list[Summary]:
    """All letters of the run by seq. Holds no item in memory but those of one page."""
    found: dict[int, Summary] = {}
    for field, text in client.hscan_iter(RunKeys(run).dead, count=SCAN_COUNT):
        if field.isdigit():
            found[int(field)] = Summary.of(_letter(int(field), text))
    return [found[seq] for seq in sorted(found)]


def read(client: redis.Redis, run: str, seqs: Sequence[int]) -> Iterator[list[Letter]]:
    """The letters of these items, some at a time; items that have none are left out."""
    for start in range(0, len(seqs), BATCH):
        some = seqs[start : start + BATCH]
        texts = cast("list[bytes | None]", client.hmget(RunKeys(run).dead, [str(seq) for seq in some]))
        yield [_letter(seq, text) for seq, text in zip(some, texts, strict=True) if text is not None]


def unsettled(client: redis.Redis, run: str, seqs: Sequence[int]) -> set[int]:
    """Those of the items that were admitted and are on the queue or being played."""
    keys = RunKeys(run)
    admitted = int(cast("bytes | None", client.hget(keys.state, "admitted")) or 0)
    return {seq for seq in seqs if seq < admitted and client.getbit(keys.settled, seq) == 0}


def _letter(seq: int, text: bytes) -> Letter:
    try:
        content = json.loads(text)
    except (ValueError, RecursionError):
        content = {}
    return Letter(seq=seq, text=text, content=content if isinstance(content, dict) else {})


class Retrier:
    """Puts dead letters of one run back on its queue. Raises ConfigurationError when the run has no configuration."""

    def __init__(self, client: redis.Redis, run: str) -> None:
        stored = read_config_json(client, run)
        if stored is None:
            raise ConfigurationError(f"run {run!r} has no configuration in Redis: it was deleted, and cannot be played")
        config = json.loads(stored)
        self.pool = str(config.get("run", {}).get("pool", "default"))
        self._timeout_s = math.ceil(float(config.get("rollouts", {}).get("group_timeout_s", 1800))) + TIMEOUT_MARGIN_S
        self._client, self._run, self._keys = client, run, RunKeys(run)
        self._script = scripts.register(client, "retry_dead")

    def retry(self, letter: Letter) -> RetryAnswer:
        """`queued`: its item is on the queue. `underway`: it was before. `none`: there is no such letter. `gone`: nothing to play is left."""
        name, rq, stamp = job_id(self._run, letter.seq), rq_prefix(), self._stamp()
        keys = [self._keys.state, self._keys.settled, self._keys.dead, f"{rq}:job:{name}", f"{rq}:queue:{self.pool}"]
        keys += [f"{rq}:queues", f"{rq}:failed:{self.pool}", f"{rq}:canceled:{self.pool}"]
        fields = self._fields(letter, name, stamp)
        flat = [part for pair in fields.items() for part in pair]
        return cast(RetryAnswer, self._script(keys=keys, args=[letter.seq, name, stamp, *flat]).decode())

    def _stamp(self) -> str:
        """As RQ writes times; the server's clock."""
        seconds, micros = self._client.time()
        return datetime.fromtimestamp(seconds + micros / 1e6, UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")

    def _fields(self, letter: Letter, name: str, stamp: str) -> dict[str, Any]:
        """The job hash made anew; empty when the letter does not hold the item: then what was on the queue was none of ours."""
        item = letter.content.get("item")
        whole = isinstance(item, dict) and (item.get("run"), item.get("seq")) == (self._run, letter.seq)
        if not whole or letter.kind == "rejected":
            return {}
        payload = json.dumps([JOB_FUNCTION, None, [], {"item": item}])
        return {
            "data": zlib.compress(payload.encode()),
            "status": "queued",
            "origin": self.pool,
            "description": f"distaff {self._run} {letter.seq}",
            "created_at": stamp,
            "enqueued_at": stamp,
            "timeout": self._timeout_s,
            "result_ttl": RESULT_TTL_S,
            "failure_ttl": FAILURE_TTL_S,
            "retries_left": RETRIES,
        }


def forget(client: redis.Redis, run: str, letters: Iterable[Letter]) -> int:
    """Forget these letters if they are still what was read; returns how many."""
    args = [part for letter in letters for part in (letter.seq, letter.text)]
    return int(scripts.register(client, "forget_dead")(keys=[RunKeys(run).dead], args=args)) if args else 0
