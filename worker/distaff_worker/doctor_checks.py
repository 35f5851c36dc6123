"""Runs the checks of `distaff doctor`, one by one or side by side.

Invariant: a check ends by its deadline, and whatever it raises is a finding; it hides no later check but those that need what it did not find.
"""

from __future__ import annotations

import asyncio
import queue
import threading
import time
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Executor, Future
from dataclasses import dataclass
from typing import Any, Generic, Literal, TypeVar

from distaff.errors import DistaffError
from distaff.findings import Finding, failed, skipped

T = TypeVar("T")
LIMIT_S = 10.0
SHORTEST_S = 0.5


class Skip(Exception):
    """Raised by a check that cannot be made here; the text says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Found(Generic[T]):
    """What a check found: for people, and for the checks after it."""

    value: T
    fact: str
    status: Literal["ok", "warning"] = "ok"
    mend: str = ""


class Examiner:
    """Keeps the findings. end: on the clock of time.monotonic(). progress: told the name of a check and how many are done."""

    def __init__(self, *, end: float, progress: Callable[[str, int], None]) -> None:
        self._end = end
        self._progress = progress
        self.findings: list[Finding] = []

    @property
    def left_s(self) -> float:
        """Seconds until everything has to be done."""
        return max(SHORTEST_S, self._end - time.monotonic())

    async def check(
        self,
        name: str,
        look: Callable[[], Awaitable[Found[T]]],
        *,
        needs: Sequence[str] = (),
        limit_s: float = LIMIT_S,
        mend: str = "",
    ) -> T | None:
        """What `look` found, None when it found nothing to go on with. needs: checks that must have found something.

        mend: for an error that names none itself. Raises CancelledError only.
        """
        missing = next((need for need in needs if need not in self._useful()), None)
        if missing is not None:
            self._note(skipped(name, f"needs {self._root(missing)}"))
            return None
        self._progress(name, len(self.findings))
        begun = time.monotonic()
        limit_s = min(limit_s, self.left_s)
        found: Found[T] | None = None
        try:
            async with asyncio.timeout(limit_s):
                found = await look()
        except Skip as reason:
            self._note(skipped(name, str(reason)))
        except TimeoutError:
            late = TimeoutError(f"it did not come to an end within {limit_s:.0f} s")
            self._note(failed(name, late, mend=mend or "run it again with more time (--within)", seconds=limit_s))
        except DistaffError as error:
            self._note(failed(name, error, mend=mend, seconds=time.monotonic() - begun))
        except Exception as error:  # noqa: BLE001 - the boundary of a check: what is broken is what it looks for
            broken = RuntimeError(f"it broke with {type(error).__name__}: {error}")
            self._note(
                failed(name, broken, mend=mend or "--log.level debug shows more", seconds=time.monotonic() - begun)
            )
        if found is None:
            return None
        seconds = time.monotonic() - begun
        self._note(Finding(check=name, status=found.status, fact=found.fact, mend=found.mend, seconds=seconds))
        return found.value

    def failed(self, name: str) -> bool:
        """The check has been made and found something wrong."""
        return any(finding.check == name and finding.status == "failed" for finding in self.findings)

    def _note(self, finding: Finding) -> None:
        self.findings.append(finding)
        self._progress(finding.check, len(self.findings))

    def _useful(self) -> set[str]:
        return {finding.check for finding in self.findings if finding.status in ("ok", "warning")}

    def _root(self, name: str) -> str:
        """The check that failed in the first place: `name`, or the one it was skipped for."""
        fact = next((finding.fact for finding in self.findings if finding.check == name), "")
        return fact.removeprefix("needs ") if fact.startswith("needs ") else name


def there(value: T | None) -> T:
    """What an earlier check left for this one. Raises Skip when it is not there."""
    if value is None:
        raise Skip("an earlier check has not found it")
    return value


class OneThread(Executor):
    """A thread that does not keep the process from ending, whatever hangs on it."""

    def __init__(self, name: str) -> None:
        self._work: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        threading.Thread(target=self._run, name=name, daemon=True).start()

    def _run(self) -> None:
        while True:
            self._work.get()()

    def submit(self, call: Callable[..., T], /, *args: Any, **kwargs: Any) -> Future[T]:
        """See `concurrent.futures.Executor`."""
        future: Future[T] = Future()

        def work() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                result = call(*args, **kwargs)
            except BaseException as error:  # noqa: BLE001 - belongs to whoever waits for the future
                future.set_exception(error)
            else:
                future.set_result(result)

        self._work.put(work)
        return future
