"""An asyncio loop on a thread of its own, for proxies that must go on while the test's loop or thread is busy.

Invariant: the loop's objects are touched on its thread only; `call` is the way in.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

T = TypeVar("T")
CALL_S = 30.0


class LoopThread:
    """Started by `start`, ended by `stop`."""

    def __init__(self, name: str) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Returns when the thread has ended."""
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(CALL_S)

    def call(self, function: Callable[[], T]) -> T:
        """What `function` returns or raises, run on the loop's thread between two events; directly when this is that thread."""
        if threading.current_thread() is self._thread:
            return function()
        future: Future[T] = Future()
        self.loop.call_soon_threadsafe(_into, future, function)
        return future.result(CALL_S)

    def run(self, awaitable: Coroutine[Any, Any, T]) -> T:
        """What the coroutine returns."""
        return asyncio.run_coroutine_threadsafe(awaitable, self.loop).result(CALL_S)

    def _run(self) -> None:
        asyncio.set_event_loop(self.loop)
        self.loop.run_forever()
        left = asyncio.all_tasks(self.loop)
        for task in left:
            task.cancel()
        self.loop.run_until_complete(asyncio.gather(*left, return_exceptions=True))
        self.loop.run_until_complete(self.loop.shutdown_asyncgens())
        self.loop.close()


def _into(future: Future[T], function: Callable[[], T]) -> None:
    try:
        future.set_result(function())
    except BaseException as error:  # noqa: BLE001 - it belongs to the caller, who waits for it
        future.set_exception(error)
