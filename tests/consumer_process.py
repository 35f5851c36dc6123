"""A consumer as a process of its own, for tests that kill it: python -m tests.consumer_process URL NAME [--ack] [--stop-after N].

Prints "seq deliveries" for each group it gets; after N groups it prints "holding" and sleeps without acknowledging them.
"""

from __future__ import annotations

import argparse
import time

from distaff import GroupConsumer


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("url")
    parser.add_argument("name")
    parser.add_argument("--ack", action="store_true")
    parser.add_argument("--stop-after", type=int, default=0)
    arguments = parser.parse_args()
    consumer = GroupConsumer("run", arguments.url, consumer=arguments.name, batch=4, block_s=0.1, claim_idle_s=0.3)
    for number, delivery in enumerate(consumer, start=1):
        print(delivery.group.seq, delivery.deliveries, flush=True)
        if arguments.ack:
            consumer.ack(delivery)
        if number == arguments.stop_after:
            print("holding", flush=True)
            time.sleep(600)
    consumer.close()


if __name__ == "__main__":
    main()
