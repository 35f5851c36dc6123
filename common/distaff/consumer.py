"""GroupConsumer: the scored groups of a run, one after the other, for a trainer that is not asyncio.

Invariant: at least once per consumer group; a group is freed from Redis only after every consumer group acknowledged it.
What it does is written in `consuming`; this module performs the steps.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from types import TracebackType
from typing import Any, Unpack

import redis as redis_module
from redis import exceptions

from distaff.clients import connect
from distaff.consuming_base import ConsumerBase
from distaff.consuming_steps import SCRIPTS, Call, ConsumerOptions, Delivery, Pause, RunScript, Step, Steps, T
from distaff.errors import DistaffError
from distaff.scripts import register


class GroupConsumer(ConsumerBase):
    """Iterate over it to get a Delivery for each group; the iteration ends with the run.

    redis: a URL, or a redis.Redis client without decode_responses, which stays yours to close. See ConsumerOptions for the rest.
    Iteration and `ack` raise RedisUnavailable (away for longer than reconnect_s) and, when a group cannot be read by this
    installation, SchemaVersionError, CodecMissing or GroupTooLarge; the group stays pending. One thread at a time.
    """

    def __init__(self, run: str, redis: str | redis_module.Redis, **options: Unpack[ConsumerOptions]) -> None:
        self._owned = isinstance(redis, str)
        self._client = connect(redis, client_name=f"distaff-consumer-{run}") if isinstance(redis, str) else redis
        super().__init__(run, self._client, options)
        self._scripts = {name: register(self._client, name) for name in SCRIPTS}

    def join(self) -> None:
        """Create the consumer group now rather than at the first read: nothing is freed without it from here on."""
        self._drive(self._core.join())

    def __iter__(self) -> Iterator[Delivery]:
        return self

    def __next__(self) -> Delivery:
        delivery = self._drive(self._core.next_delivery())
        if delivery is None:
            raise StopIteration
        return delivery

    def batches(self, n: int) -> Iterator[list[Delivery]]:
        """Lists of `n` deliveries, the last one shorter. Keep `n` below the producer's window, which counts what is not acknowledged."""
        for delivery in self:
            self._partial.append(delivery)
            if len(self._partial) >= n:
                yield self._take_partial()
        if self._partial:
            yield self._take_partial()

    def ack(self, *deliveries: Delivery) -> int:
        """Acknowledge: these groups are done with. Returns how many were still pending; repeating it is harmless."""
        return self._drive(self._core.acknowledge(deliveries))

    def close(self) -> None:
        """Leave the group if nothing is pending for this member, and close the connection if it is our own."""
        try:
            self._drive(self._core.leave())
        except (exceptions.RedisError, OSError):
            pass  # Redis is away or the group is gone; an idle member in the list harms nobody
        finally:
            if self._owned:
                self._client.close()

    def __enter__(self) -> GroupConsumer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _drive(self, steps: Steps[T]) -> T:
        try:
            step = next(steps)
            while True:
                try:
                    reply = self._perform(step)
                except (exceptions.RedisError, DistaffError, OSError) as error:
                    step = steps.throw(error)
                else:
                    step = steps.send(reply)
        except StopIteration as stop:
            result: T = stop.value
            return result

    def _perform(self, step: Step) -> Any:
        match step:
            case Call(method, args, options):
                return getattr(self._client, method)(*args, **options)
            case RunScript(name, keys, args):
                return self._scripts[name](keys=keys, args=args)
            case Pause(seconds):
                return time.sleep(seconds)
        return step.function()
