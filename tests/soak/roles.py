"""One role of the farm: a process that is started again whenever it ends, until it has done what it is there for.

Invariant: at most one process of a role lives at a time. What its processes said is kept, one log for each life.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from tests.harness import processes
from tests.harness.processes import Child

RESTART_S = 0.3
EXPECTED = {0, -signal.SIGKILL, -signal.SIGTERM, 128 + signal.SIGTERM}
"""Exit codes that need no explanation."""


@dataclass(slots=True)
class Role:
    """name, argv, env: how it is started. ends: it is done when it ends with 0 by itself (a producer, an archiver); a worker never is."""

    name: str
    argv: Sequence[str]
    env: Mapping[str, str]
    ends: bool
    child: Child | None = None
    done: bool = False
    frozen: bool = False
    lives: int = 0
    logs: list[str] = field(default_factory=list)
    odd_ends: list[str] = field(default_factory=list)
    """Exit codes nobody caused, with what was said last."""
    _asked: bool = False
    _ended: float = 0.0

    def start(self) -> None:
        self.child = processes.start(self.argv, env=self.env)
        self.lives += 1
        self._asked = False

    @property
    def pid(self) -> int:
        return self.child.pid if self.child is not None else 0

    @property
    def log(self) -> str:
        """Of all its lives."""
        return "\n".join([*self.logs, self.child.log if self.child is not None else ""])

    def look_after(self) -> None:
        """Start it again when it has ended before its time."""
        if self.child is not None and self.child.code is not None:
            self._bury(self.child.code)
        if self.child is None and not self.done and time.monotonic() > self._ended + RESTART_S:
            self.start()

    def kill(self) -> None:
        """SIGKILL to all of it. The supervisor starts it again."""
        if self.child is not None:
            self._asked = True
            self.child.kill()

    def drain(self) -> None:
        """SIGTERM."""
        if self.child is not None:
            self._asked = True
            self.child.terminate()

    def freeze(self) -> None:
        if self.child is not None:
            self.frozen = True
            self.child.stop()

    def thaw(self) -> None:
        if self.child is not None and self.frozen:
            self.child.cont()
        self.frozen = False

    def end(self) -> None:
        """For good."""
        self.done = True
        if self.child is not None:
            self.child.kill()
            self.logs.append(self.child.log)
            self.child = None

    def _bury(self, code: int) -> None:
        if self.child is None:
            return
        log = self.child.log
        self.child.kill()  # what is left of its group
        self.logs.append(log)
        self.child = None
        self.frozen = False
        self._ended = time.monotonic()
        if code not in EXPECTED:
            self.odd_ends.append(
                f"{self.name} ended with {code}: {log.strip().splitlines()[-1][:600] if log.strip() else ''}"
            )
        self.done = self.ends and code == 0 and not self._asked
