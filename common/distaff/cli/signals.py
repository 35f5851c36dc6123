"""Turns Ctrl-C and SIGTERM into an event.

Invariant: the handler takes no lock (a handler that sets an Event can deadlock with the thread it interrupts); a thread of ours, woken
through a socket, sets the event. The previous handlers are back when the block ends.
"""

from __future__ import annotations

import signal
import socket
import threading
from types import FrameType, TracebackType
from typing import Any

INTERRUPTED = 130
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class StopSignal:
    """Context manager: `event` is set by the first SIGINT, SIGTERM or SIGHUP. Main thread only."""

    def __init__(self, *, raise_on_second: bool = True) -> None:
        """raise_on_second: the second signal is a KeyboardInterrupt in the main thread; otherwise only `count` tells."""
        self.event = threading.Event()
        self.count = 0
        self.first: int | None = None
        self._raise = raise_on_second
        self._old: dict[int, Any] = {}
        self._reader, self._writer = socket.socketpair()

    def __enter__(self) -> StopSignal:
        self._writer.setblocking(False)
        self._old_wakeup = signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
        for number in SIGNALS:
            if signal.getsignal(number) != signal.SIG_IGN:
                self._old[number] = signal.signal(number, self._handle)
        self._thread = threading.Thread(target=self._wait, name="distaff-signals", daemon=True)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._old.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._old_wakeup)
        self._writer.close()
        self._thread.join()
        self._reader.close()

    @property
    def exit_code(self) -> int:
        """130 after Ctrl-C; 0 after an orderly SIGTERM, as service managers expect."""
        return INTERRUPTED if self.first == signal.SIGINT else 0

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self.count += 1
        self.first = self.first or number
        if self._raise and self.count > 1:
            raise KeyboardInterrupt

    def _wait(self) -> None:
        while data := self._reader.recv(64):
            if self._old.keys() & set(data):
                self.event.set()
