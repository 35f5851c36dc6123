"""AsyncGroupConsumer: GroupConsumer for asyncio.

Invariant: cancelling a read loses nothing: what Redis delivered meanwhile is found again by the next one. Groups of more than
THREAD_BYTES are decoded in a thread. What it does is written in `consuming`; this module performs the steps.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from types import TracebackType
from typing import Any, Unpack

import redis.asyncio as redis_module
from redis import exceptions

from distaff.clients import connect_async
from distaff.consuming_base import ConsumerBase
from distaff.consuming_steps import SCRIPTS, Call, ConsumerOptions, Delivery, Pause, RunScript, Step, Steps, T
from distaff.errors import DistaffError
from distaff.scripts import register_async

THREAD_BYTES = 512 << 10


class AsyncGroupConsumer(ConsumerBase):
    """As GroupConsumer, with `async for`; `redis` is a URL or a redis.asyncio.Redis client. For one event loop."""

    def __init__(self, run: str, redis: str | redis_module.Redis, **options: Unpack[ConsumerOptions]) -> None:
        self._owned = isinstance(redis, str)
        self._client = connect_async(redis, client_name=f"distaff-consumer-{run}") if isinstance(redis, str) else redis
        super().__init__(run, self._client, options)
        self._scripts = {name: register_async(self._client, name) for name in SCRIPTS}
        self._reading = asyncio.Lock()

    async def join(self) -> None:
        """Create the consumer group now rather than at the first read: nothing is freed without it from here on."""
        await self._drive(self._core.join())

    def __aiter__(self) -> AsyncIterator[Delivery]:
        return self

    async def __anext__(self) -> Delivery:
        async with self._reading:
            delivery = await self._drive(self._core.next_delivery())
        if delivery is None:
            raise StopAsyncIteration
        return delivery

    async def batches(self, n: int) -> AsyncIterator[list[Delivery]]:
        """Lists of `n` deliveries, the last one shorter. Keep `n` below the producer's window, which counts what is not acknowledged."""
        async for delivery in self:
            self._partial.append(delivery)
            if len(self._partial) >= n:
                yield self._take_partial()
        if self._partial:
            yield self._take_partial()

    async def ack(self, *deliveries: Delivery) -> int:
        """Acknowledge: these groups are done with. Returns how many were still pending; repeating it is harmless."""
        return await self._drive(self._core.acknowledge(deliveries))

    async def close(self) -> None:
        """Leave the group if nothing is pending for this member, and close the connection if it is our own."""
        try:
            await self._drive(self._core.leave())
        except (exceptions.RedisError, OSError):
            pass  # Redis is away or the group is gone; an idle member in the list harms nobody
        finally:
            if self._owned:
                await self._client.aclose()

    async def __aenter__(self) -> AsyncGroupConsumer:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()

    async def _drive(self, steps: Steps[T]) -> T:
        task = asyncio.current_task()
        cancelled = task.cancelling() if task else 0
        try:
            step = next(steps)
            while True:
                try:
                    reply = await self._perform(step)
                    if task and task.cancelling() > cancelled:
                        # redis-py sends within asyncio.wait_for, which before Python 3.12 may swallow a cancellation.
                        raise asyncio.CancelledError
                except (exceptions.RedisError, DistaffError, OSError) as error:
                    step = steps.throw(error)
                else:
                    step = steps.send(reply)
        except StopIteration as stop:
            result: T = stop.value
            return result

    async def _perform(self, step: Step) -> Any:
        match step:
            case Call(method, args, options):
                return await getattr(self._client, method)(*args, **options)
            case RunScript(name, keys, args):
                return await self._scripts[name](keys=keys, args=args)
            case Pause(seconds):
                return await asyncio.sleep(seconds)
        return await asyncio.to_thread(step.function) if step.size_bytes > THREAD_BYTES else step.function()
