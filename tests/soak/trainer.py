"""A trainer as a process of its own: notes the number of each group it gets in a file, publishes a version, acknowledges.

python -m tests.soak.trainer RUN GROUP FILE --rate 6     (Redis by DISTAFF_REDIS_URL, as the roles get it)

Invariant: a number is in the file before its group is acknowledged. Killed at any moment and started again it goes on.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from distaff import GroupConsumer, publish_policy_version, read_policy_version
from distaff.clients import connect
from distaff.errors import RedisUnavailable

T = TypeVar("T")
BATCH = 4
AGAIN_S = 0.5
PATIENCE = 600


def until_answered(call: Callable[[], T]) -> T:
    """What `call` returns, called again while Redis is away."""
    for _ in range(PATIENCE):
        try:
            return call()
        except RedisUnavailable:
            time.sleep(AGAIN_S)
    return call()


def train(run: str, group: str, seen: Path, *, rate: float) -> None:
    """Until the end of the run. rate: groups a second at most, 0 for as fast as they come."""
    url = os.environ["DISTAFF_REDIS_URL"]
    with (
        connect(url) as client,
        GroupConsumer(
            run, url, group=group, consumer=group, batch=BATCH, claim_idle_s=5, block_s=0.5, max_deliveries=1000
        ) as consumer,
        seen.open("a") as file,
    ):
        step = until_answered(lambda: read_policy_version(client, run))
        for batch in consumer.batches(BATCH):
            began = time.monotonic()
            file.write("".join(f"{delivery.group.seq}\n" for delivery in batch))
            file.flush()
            step += 1
            version = step
            until_answered(lambda: publish_policy_version(client, run, version))  # noqa: B023 - called at once
            consumer.ack(*batch)
            if rate:
                time.sleep(max(0.0, began + len(batch) / rate - time.monotonic()))
    print("over", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.soak.trainer")
    parser.add_argument("run")
    parser.add_argument("group")
    parser.add_argument("file", type=Path)
    parser.add_argument("--rate", type=float, default=0.0)
    arguments = parser.parse_args()
    train(arguments.run, arguments.group, arguments.file, rate=arguments.rate)


if __name__ == "__main__":
    main()
