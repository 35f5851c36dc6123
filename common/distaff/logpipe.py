"""Writes log lines from a thread of its own, so that nobody ever waits for a terminal, a pipe or a disk.

Invariant: `put` returns at once. When the reader does not keep up, lines are dropped and counted, and the count is written
as soon as there is room again. It bypasses Python's own buffer: a thread that is stuck in it would block the exit.
"""

from __future__ import annotations

import contextlib
import os
import queue
import threading
import time
from collections.abc import Callable
from io import UnsupportedOperation
from typing import TextIO

MAX_LINES = 10_000


class LogPipe:
    """A bounded queue of lines in front of a stream. Safe to use from any thread."""

    def __init__(
        self, stream: TextIO, *, max_lines: int = MAX_LINES, dropped_line: Callable[[int], str] | None = None
    ) -> None:
        """`dropped_line` makes the line that reports lost ones from their number."""
        self._write = _writer(stream)
        self._dropped_line = dropped_line or "log.lines_dropped count={}".format
        self._lines: queue.Queue[str] = queue.Queue(max_lines)
        self._lock = threading.Lock()
        self._dropped = 0
        self._reported = 0
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="distaff-logs", daemon=True)
        self._thread.start()

    @property
    def dropped(self) -> int:
        """Lines lost so far because the reader did not keep up or is gone."""
        return self._dropped

    def put(self, line: str) -> None:
        """Hand over a line (without its end); drop it if the queue is full."""
        try:
            self._lines.put_nowait(line)
        except queue.Full:
            self._drop()

    def close(self, *, timeout_s: float = 1.0) -> None:
        """Write what is waiting, for at most `timeout_s`; then give up on the rest."""
        self._closing.set()
        self._thread.join(timeout_s)

    def flush(self, *, timeout_s: float = 1.0) -> bool:
        """Wait until everything handed over so far is written; False when that took too long."""
        end = time.monotonic() + timeout_s
        while self._lines.unfinished_tasks and time.monotonic() < end:
            time.sleep(0.005)
        return not self._lines.unfinished_tasks

    def _run(self) -> None:
        while not (self._closing.is_set() and self._lines.empty()):
            with contextlib.suppress(queue.Empty):
                self._put_out(self._lines.get(timeout=0.1))

    def _put_out(self, line: str) -> None:
        try:
            self._write(line + "\n")
            lost = self._dropped - self._reported
            if lost:
                self._reported += lost
                self._write(self._dropped_line(lost) + "\n")
        except (OSError, ValueError):  # the reader is gone, the disk full, or the stream closed
            self._drop()
        finally:
            self._lines.task_done()

    def _drop(self) -> None:
        with self._lock:
            self._dropped += 1


def _writer(stream: TextIO) -> Callable[[str], object]:
    try:
        descriptor = stream.fileno()
    except (UnsupportedOperation, AttributeError, ValueError):
        return stream.write

    def write(text: str) -> None:
        data = text.encode("utf-8", "backslashreplace")
        while data:
            data = data[os.write(descriptor, data) :]

    return write
