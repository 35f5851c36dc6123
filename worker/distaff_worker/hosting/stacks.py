"""The file into which a host writes the stacks of its threads: when it is asked to, and when it crashes.

Invariant: works when the host's interpreter is stuck in C code; only reads what the C-level fault handler wrote.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import itertools
import os
import re
import signal
import time
from pathlib import Path

from distaff_worker.hosting.board import anonymous_file

STACK_SIGNAL = signal.SIGUSR1
"""Makes the host write the stacks of its threads, whatever they are doing."""
LIMIT_BYTES = 64_000
MOST_FRAMES = 25
_WAIT_S, _STEP_S = 0.3, 0.01
_SECTION = re.compile(r"(Current thread|Thread) 0x([0-9a-f]+)[^\n]*\n((?:  [^\n]*(?:\n|$))*)")
_FRAME = re.compile(r'File "([^"]+)", line (\d+) in (\S+)')
_OURS = re.compile(r"[/\\](distaff|distaff_worker)[/\\]")
_SHOWN = 2
"""Frames from either end of a long stack."""


class StackFile:
    """`file` is handed to the host."""

    def __init__(self) -> None:
        self.file = open(anonymous_file("distaff-stacks"), "r+b")  # noqa: SIM115 - lives as long as the process
        flags = fcntl.fcntl(self.file, fcntl.F_GETFL)
        fcntl.fcntl(self.file, fcntl.F_SETFL, flags | os.O_APPEND)
        self._last = b""

    async def refresh(self, pid: int) -> None:
        """Have the host write the stacks of its threads now; nothing is there when it cannot."""
        if self.file.closed:
            return
        self.file.truncate(0)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, STACK_SIGNAL)
        end, size = time.monotonic() + _WAIT_S, -1
        while time.monotonic() < end and (size <= 0 or size != self._size()):
            size = self._size()
            await asyncio.sleep(_STEP_S)

    def _size(self) -> int:
        return len(self._last) if self.file.closed else os.fstat(self.file.fileno()).st_size

    def _threads(self) -> list[tuple[bool, int, list[tuple[str, str, str]]]]:
        """(is the one that crashed, Python's ident, frames innermost first) of each thread."""
        text = self._text().decode(errors="replace")
        return [
            (kind.startswith("Current"), int(ident, 16), _FRAME.findall(lines))
            for kind, ident, lines in _SECTION.findall(text)
        ]

    def _text(self) -> bytes:
        return self._last if self.file.closed else os.pread(self.file.fileno(), LIMIT_BYTES, 0)

    def _frames(self, thread: int) -> list[tuple[str, str, str]]:
        for crashed, ident, frames in self._threads():
            if ident == thread or (crashed and not thread):
                return frames
        return []

    @property
    def crashed_thread(self) -> int:
        """Python's ident of the thread that crashed; 0 when that is not known."""
        return next((ident for crashed, ident, _ in self._threads() if crashed), 0)

    def frames(self, thread: int = 0) -> list[str]:
        """Of a thread (by Python's ident; 0: the one that crashed), innermost first, each "file:line function"; empty when unknown."""
        return [_short(frame) for frame in self._frames(thread)][:MOST_FRAMES]

    def where(self, thread: int = 0) -> str:
        """The place in the environment's code, "file:line function < caller < ...", innermost first; "" when unknown."""
        theirs = [
            _short(frame)
            for frame in itertools.takewhile(lambda frame: not _OURS.search(frame[0]), self._frames(thread))
        ]
        shown = theirs if len(theirs) <= 2 * _SHOWN else [*theirs[:_SHOWN], "...", *theirs[-_SHOWN:]]
        return " < ".join(shown)

    def close(self) -> None:
        """Give the file back; what was written last can still be read."""
        self._last = self._text()
        self.file.close()


def _short(frame: tuple[str, str, str]) -> str:
    path, line, name = frame
    return f"{Path(path).name}:{line} {name}"
