"""The file into which a host writes the stacks of its threads: when it is asked to, and when it crashes.

Invariant: works when the host's interpreter is stuck in C code; only reads what the C-level fault handler wrote.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import re
import signal
import tempfile
import time
from pathlib import Path

STACK_SIGNAL = signal.SIGUSR1
"""Makes the host write the stacks of its threads, whatever they are doing."""
LIMIT_BYTES = 64_000
MOST_FRAMES = 25
_WAIT_S, _STEP_S = 0.3, 0.01
_SECTION = re.compile(r"(Current thread|Thread) 0x([0-9a-f]+)[^\n]*\n((?:  [^\n]*(?:\n|$))*)")
_FRAME = re.compile(r'File "([^"]+)", line (\d+) in (\S+)')
_INNERMOST = 3


class StackFile:
    """`file` is handed to the host."""

    def __init__(self) -> None:
        self.file = tempfile.TemporaryFile(prefix="distaff-stacks-")  # noqa: SIM115 - lives as long as the process
        flags = fcntl.fcntl(self.file, fcntl.F_GETFL)
        fcntl.fcntl(self.file, fcntl.F_SETFL, flags | os.O_APPEND)

    async def refresh(self, pid: int) -> None:
        """Have the host write the stacks of its threads now; nothing is there when it cannot."""
        self.file.truncate(0)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, STACK_SIGNAL)
        end, size = time.monotonic() + _WAIT_S, -1
        while time.monotonic() < end and (size <= 0 or size != self._size()):
            size = self._size()
            await asyncio.sleep(_STEP_S)

    def _size(self) -> int:
        return os.fstat(self.file.fileno()).st_size

    def frames(self, thread: int = 0) -> list[str]:
        """Of a thread (by Python's ident; 0: the one that crashed), innermost first, each "file:line function"; empty when unknown."""
        text = os.pread(self.file.fileno(), LIMIT_BYTES, 0).decode(errors="replace")
        for kind, ident, lines in _SECTION.findall(text):
            if int(ident, 16) == thread or (not thread and kind.startswith("Current")):
                return [f"{Path(path).name}:{line} {name}" for path, line, name in _FRAME.findall(lines)][:MOST_FRAMES]
        return []

    def innermost(self, thread: int = 0) -> str:
        """The innermost of `frames`, as "file:line function < caller ..."; "" when unknown."""
        return " < ".join(self.frames(thread)[:_INNERMOST])

    def close(self) -> None:
        self.file.close()
