"""One call in flight, whose outcome all get who ask meanwhile.

Invariant: the call runs in a task that is owned here and ends with `close`; a caller that is cancelled does not take it along.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class SharedCall(Generic[T]):
    """Used on one loop."""

    def __init__(self, call: Callable[[], Coroutine[Any, Any, T]]) -> None:
        self._call = call
        self._task: asyncio.Task[T] | None = None

    async def __call__(self) -> T:
        """The outcome of the call that is in flight, of a new one when there is none. Raises what it raises."""
        if self._task is None or self._task.done():
            self._task = asyncio.get_running_loop().create_task(self._call())
        return await asyncio.shield(self._task)

    async def close(self) -> None:
        """End the call that is in flight."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
