"""Notes on the board whose code an event loop runs, step by step.

Invariant: every task that is started while a group's code runs belongs to that group; between two steps the board says nobody.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Generator
from contextvars import ContextVar
from typing import Any

from distaff_worker.hosting.board import Board, Slot

GROUP: ContextVar[int] = ContextVar("distaff_group", default=0)
"""Number of the group whose code runs in this context; tasks and threads started there inherit it."""


class _Watched(Coroutine[Any, Any, Any]):
    """A coroutine that writes `group` into its cell while it runs."""

    __slots__ = ("_cells", "_coroutine", "_group", "_slot")

    def __init__(self, coroutine: Coroutine[Any, Any, Any], group: int, board: Board, slot: Slot) -> None:
        self._coroutine, self._group, self._cells, self._slot = coroutine, group, board.cells, slot

    def send(self, value: Any) -> Any:
        self._cells[self._slot] = self._group
        try:
            return self._coroutine.send(value)
        finally:
            self._cells[self._slot] = 0

    def throw(self, *error: Any) -> Any:
        self._cells[self._slot] = self._group
        try:
            return self._coroutine.throw(*error)
        finally:
            self._cells[self._slot] = 0

    def close(self) -> None:
        self._coroutine.close()

    def __await__(self) -> Generator[Any, Any, Any]:
        return self._coroutine.__await__()

    def __getattr__(self, name: str) -> Any:
        """cr_frame and the like, which tools ask for."""
        return getattr(self._coroutine, name)


def watch(loop: asyncio.AbstractEventLoop, board: Board, slot: Slot) -> None:
    """From now on the tasks of `loop` are noted on `board`."""

    def make(loop: asyncio.AbstractEventLoop, coroutine: Any, **options: Any) -> asyncio.Task[Any]:
        group = GROUP.get()
        return asyncio.Task(_Watched(coroutine, group, board, slot) if group else coroutine, loop=loop, **options)

    loop.set_task_factory(make)
