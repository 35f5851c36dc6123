"""CPU time of a process by stage.

Invariant: a second of CPU is counted once: in the innermost stage that ran on its thread. A coroutine is counted slice by slice,
so that what it waits for costs it nothing. What no stage claims is the process's CPU time less the sum of them. One entry
into a stage costs about 5 microseconds, which is counted in the stage around it.
"""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine, Generator
from typing import Any


class _Thread(threading.local):
    def __init__(self, all_seconds: list[dict[str, float]]) -> None:
        self.seconds: dict[str, float] = {}
        self.inner: list[float] = []
        """For each stage that is open on this thread, the CPU seconds of the stages inside it."""
        all_seconds.append(self.seconds)


class Accounts:
    """Wrap functions with `of` and coroutine functions with `of_async`; read with `by_stage`."""

    def __init__(self) -> None:
        self._all: list[dict[str, float]] = []
        self._thread = _Thread(self._all)

    def by_stage(self) -> dict[str, float]:
        """CPU seconds so far."""
        total: dict[str, float] = {}
        for seconds in list(self._all):
            for stage, value in list(seconds.items()):
                total[stage] = total.get(stage, 0.0) + value
        return total

    def of(self, stage: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def counted(*args: Any, **kwargs: Any) -> Any:
            return self.run(stage, lambda: function(*args, **kwargs))

        return counted

    def of_async(self, stage: str, function: Callable[..., Coroutine[Any, Any, Any]]) -> Callable[..., Any]:
        @functools.wraps(function)
        async def counted(*args: Any, **kwargs: Any) -> Any:
            return await _Sliced(self, stage, function(*args, **kwargs))

        return counted

    def run(self, stage: str, call: Callable[[], Any]) -> Any:
        thread = self._thread
        thread.inner.append(0.0)
        began = time.thread_time()
        try:
            return call()
        finally:
            spent = time.thread_time() - began
            own = spent - thread.inner.pop()
            thread.seconds[stage] = thread.seconds.get(stage, 0.0) + own
            if thread.inner:
                thread.inner[-1] += spent


class _Sliced(Awaitable[Any]):
    def __init__(self, accounts: Accounts, stage: str, coroutine: Coroutine[Any, Any, Any]) -> None:
        self._accounts, self._stage, self._coroutine = accounts, stage, coroutine

    def __await__(self) -> Generator[Any, Any, Any]:
        value: Any = None
        error: BaseException | None = None
        coroutine = self._coroutine
        while True:
            try:
                waited = self._accounts.run(self._stage, _resumption(coroutine, value, error))
            except StopIteration as stop:
                return stop.value
            value, error = None, None
            try:
                value = yield waited
            except BaseException as thrown:  # noqa: BLE001 - passed on to the coroutine, cancellation included
                error = thrown


def _resumption(coroutine: Coroutine[Any, Any, Any], value: Any, error: BaseException | None) -> Callable[[], Any]:
    return (lambda: coroutine.send(value)) if error is None else (lambda: coroutine.throw(error))
