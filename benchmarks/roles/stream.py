"""Groups through a Redis stream: ours (`encode_group`, GroupConsumer), or the same bytes with redis-py alone.

Both append one entry a call and hold back while WINDOW entries are unread; both read and acknowledge BATCH at once.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

import redis

from benchmarks.roles.groups import RUN, numbered_groups
from benchmarks.roles.talk import listen, say
from distaff.clients import connect
from distaff.consumer import GroupConsumer
from distaff.keys import RunKeys
from distaff.wire import encode_group

BATCH = 8
WINDOW = 256
KEYS = RunKeys(RUN)
GROUP = "trainer"


def produce(client: redis.Redis, *, count: int, tokens: int, raw: bool) -> None:
    groups = numbered_groups(count, tokens=tokens)
    entries = [encode_group(group) for group in groups[:32]]
    client.ping()
    say(ready=True)
    listen()
    started, cpu = time.monotonic(), time.process_time()
    for seq, group in enumerate(groups):
        if seq % 32 == 0:
            _wait_for_room(client)
        client.xadd(KEYS.groups, entries[seq % 32] if raw else encode_group(group))
    client.hset(KEYS.state, mapping={"status": "closed", "admitted": count, "emitted": count})
    say(started=started, cpu_s=time.process_time() - cpu)


def consume_ours(client: redis.Redis, *, count: int) -> None:
    with GroupConsumer(RUN, client, group=GROUP, batch=BATCH) as consumer:
        consumer.join()

        def read() -> int:
            tokens = 0
            for deliveries in consumer.batches(BATCH):
                tokens += sum(len(delivery.group.samples.token_ids) for delivery in deliveries)
                consumer.ack(*deliveries)
            return tokens

        _timed(read)


def consume_raw(client: redis.Redis, *, count: int) -> None:
    client.xgroup_create(KEYS.groups, GROUP, "0", mkstream=True)

    def read() -> int:
        found = 0
        while found < count:
            reply = client.xreadgroup(GROUP, "one", {KEYS.groups: ">"}, count=BATCH, block=1000)
            ids = [entry_id for entry_id, _ in _entries(reply)]
            if not ids:
                continue
            with client.pipeline(transaction=True) as pipeline:
                pipeline.xack(KEYS.groups, GROUP, *ids)
                pipeline.xdel(KEYS.groups, *ids)
                pipeline.execute()
            found += len(ids)
        return 0

    _timed(read)


def _timed(read: Callable[[], int]) -> None:
    say(ready=True)
    listen()
    cpu = time.process_time()
    tokens = read()
    say(ended=time.monotonic(), tokens=tokens, cpu_s=time.process_time() - cpu)


def _wait_for_room(client: redis.Redis) -> None:
    while client.xlen(KEYS.groups) > WINDOW:
        time.sleep(0.001)


def _entries(reply: Any) -> list[tuple[bytes, dict[bytes, bytes]]]:
    if not reply:
        return []
    entries = next(iter(reply.values()))[0] if isinstance(reply, dict) else reply[0][1]
    return list(entries)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("side", choices=["produce", "consume"])
    parser.add_argument("url")
    parser.add_argument("count", type=int)
    parser.add_argument("tokens", type=int)
    parser.add_argument("--raw", action="store_true")
    arguments = parser.parse_args()
    with connect(arguments.url) as client:
        if arguments.side == "produce":
            produce(client, count=arguments.count, tokens=arguments.tokens, raw=arguments.raw)
        else:
            (consume_raw if arguments.raw else consume_ours)(client, count=arguments.count)


if __name__ == "__main__":
    main()
