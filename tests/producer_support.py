"""A small environment, configurations and a stand-in for the workers, for tests of the producer.

Run as a program (`python producer_support.py URL CONFIG_JSON`) it produces with SIGTERM and SIGINT as stop signals.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, cast

import redis
from rq.job import Job

from distaff.cli.signals import StopSignal
from distaff.config import RunConfig
from distaff.environments.protocol import Episode, ModelFactory, Score
from distaff.keys import RunKeys, parse_job_id
from distaff.types import JSON, Split
from distaff_producer.produce import Producer
from distaff_producer.rq_jobs import queue_key


class Numbers:
    """An environment whose row i asks for the number i; infinite when `size` is None, of `ends_at` rows then if that is set."""

    def __init__(
        self, *, rows: int | None = 10, ends_at: int | None = None, extra: Mapping[str, Any] | None = None
    ) -> None:
        self._size = rows
        self._ends_at = ends_at
        self._extra = dict(extra or {})
        self.walks: list[int] = []

    @property
    def id(self) -> str:
        return "numbers"

    @property
    def version(self) -> str:
        return "1.2"

    @property
    def api(self) -> Literal["classic", "v1"]:
        return "classic"

    def size(self, split: Split) -> int | None:
        return self._size

    def row(self, split: Split, index: int) -> dict[str, JSON]:
        return {"question": f"{index}?", "answer": index, "info": {"deep": [1, None, "é"]}, **self._extra}

    def rows(self, split: Split, start: int) -> Iterator[dict[str, JSON]]:
        self.walks.append(start)
        index = start
        while self._ends_at is None or index < self._ends_at:
            yield self.row(split, index)
            index += 1

    async def play(self, task: Mapping[str, JSON], model_for: ModelFactory) -> Episode:
        raise NotImplementedError

    async def score(self, episodes: Sequence[Episode]) -> list[list[Score]]:
        raise NotImplementedError

    async def close(self) -> None:
        return None


def config(
    *, run: Mapping[str, Any] | None = None, rollouts: Mapping[str, Any] | None = None, **producer: Any
) -> RunConfig:
    """A run named "r" on pool "p"; keyword arguments are settings of the producer."""
    return RunConfig.model_validate(
        {
            "run": {"name": "r", "pool": "p", **(run or {})},
            "environment": {"id": "numbers"},
            "rollouts": dict(rollouts or {}),
            "producer": producer,
        }
    )


def queued_seqs(client: redis.Redis, pool: str = "p") -> list[int]:
    """Numbers of the items on the queue, in order; the queue must hold jobs of distaff only."""
    parsed = [parse_job_id(str(entry, "utf-8")) for entry in cast("list[bytes]", client.lrange(queue_key(pool), 0, -1))]
    return [found[1] for found in parsed if found is not None]


def item_on_queue(client: redis.Redis, job: str) -> dict[str, Any]:
    """The item in a job, read by RQ."""
    item: dict[str, Any] = Job.fetch(job, connection=client, serializer="json").kwargs["item"]
    return item


class Settler:
    """Takes items off the queue one by one and settles them the way a worker's last step shows in Redis."""

    def __init__(self, client: redis.Redis, run: str = "r", pool: str = "p") -> None:
        self._client = client
        self._keys = RunKeys(run)
        self._queue = queue_key(pool)

    def emit(self) -> bool:
        """Pop one item and append a group; False when the queue is empty."""
        return self._settle(emitted=1)

    def drop(self) -> bool:
        """Pop one item and count a dropped group; False when the queue is empty."""
        return self._settle(dead=1, dropped=1)

    def acknowledge(self) -> bool:
        """Free the oldest group of the stream; False when there is none."""
        found = cast("list[tuple[bytes, dict[bytes, bytes]]]", self._client.xrange(self._keys.groups, count=1))
        return bool(found) and bool(self._client.xdel(self._keys.groups, found[0][0]))

    def _settle(self, **counters: int) -> bool:
        popped = cast("bytes | None", self._client.lpop(self._queue))
        if popped is None:
            return False
        pipeline = self._client.pipeline(transaction=True)
        _, seq = parse_job_id(popped.decode()) or ("", 0)
        pipeline.setbit(self._keys.settled, seq, 1)
        for name, value in counters.items():
            pipeline.hincrby(self._keys.state, name, value)
        if "emitted" in counters:
            pipeline.xadd(self._keys.groups, {"seq": popped})
        pipeline.execute()
        return True


def main() -> None:
    """Produce until done or told to stop; print the report."""
    settings = RunConfig.model_validate_json(sys.argv[2])
    with StopSignal() as stop:
        report = Producer(settings, sys.argv[1], Numbers(rows=int(sys.argv[3])), stop=stop.event).run()
    print(f"report admitted={report.admitted} there={report.already_there} closed={report.closed}", flush=True)


if __name__ == "__main__":
    main()
