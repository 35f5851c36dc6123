"""Asks a host again and again whether its loop turns, reports one that stands still, and names who keeps it.

Invariant: a host is called stuck only after `limit_s` without an answer, plus the time this loop may have been too late to read one.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

import structlog

from distaff_worker.hosting.board import PLAY, SCORE, Board, Slot
from distaff_worker.hosting.stacks import StackFile

log = structlog.get_logger(__name__)
PING_S = 1.0
REPORT_S = 5.0
"""A host that has not answered for so long is reported with its stacks."""
_SAMPLE_S = 0.3


class Watchdog:
    """on_stuck(slot, group, message): called once, when the host has to be killed; group 0: nobody knows whose code it is."""

    def __init__(
        self,
        pid: int,
        board: Board,
        stacks: StackFile,
        *,
        ping: Callable[[], None],
        on_stuck: Callable[[Slot, int, str], Awaitable[None]],
        limit_s: float,
    ) -> None:
        self._pid, self._board, self._stacks = pid, board, stacks
        self._ping, self._on_stuck, self._limit_s = ping, on_stuck, limit_s
        self._asked: float | None = None
        """time.monotonic() of the question that waits for its answer."""
        self.usage: dict[str, int] = {"rss_bytes": 0, "fds": 0, "tasks": 0}

    def answered(self, pong: Mapping[str, Any]) -> None:
        self._asked = None
        self.usage = {name: int(pong[name]) for name in self.usage}

    @property
    def silent_s(self) -> float:
        """How long the host owes an answer, seconds."""
        return 0.0 if self._asked is None else time.monotonic() - self._asked

    async def run(self) -> None:
        """Watch until the host is stuck, or until cancelled."""
        reported = False
        while True:
            if self._asked is None:
                self._asked, reported = time.monotonic(), False
                self._ping()
            await asyncio.sleep(min(PING_S, self._limit_s / 4))
            if self.silent_s > REPORT_S and not reported:
                reported = True
                slot, _ = await self._culprit()
                await self._stacks.refresh(self._pid)
                frames = self._stacks.frames(self._board.ident(slot))
                log.error("environment.blocked", host=self._pid, seconds=round(self.silent_s, 1), frames=frames)
            if self.silent_s > self._limit_s:
                await asyncio.sleep(min(PING_S, self._limit_s / 4))
                if self.silent_s > self._limit_s:
                    slot, group = await self._culprit()
                    await self._on_stuck(
                        slot, group, f"it kept its process from turning for longer than {self._limit_s:g} s"
                    )
                    return

    async def _culprit(self) -> tuple[Slot, int]:
        """The loop and the group that block: of two that seem to run, the one whose thread computes."""
        playing, scoring = self._board.running(PLAY), self._board.running(SCORE)
        if not (playing and scoring):
            return (SCORE, scoring) if scoring else (PLAY, playing)
        before = self._ticks(PLAY), self._ticks(SCORE)
        await asyncio.sleep(_SAMPLE_S)
        played, scored = self._ticks(PLAY) - before[0], self._ticks(SCORE) - before[1]
        return (SCORE, scoring) if scored > played else (PLAY, playing)

    def _ticks(self, slot: Slot) -> int:
        """Processor time of the loop's thread; 0 where /proc does not tell."""
        try:
            stat = Path(f"/proc/{self._pid}/task/{self._board.native_id(slot)}/stat").read_text()
        except OSError:
            return 0
        fields = stat.rpartition(")")[2].split()
        return int(fields[11]) + int(fields[12])
