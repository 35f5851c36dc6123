"""Starts host processes for the worker, by a zygote that has imported everything once.

Invariant: one zygote at a time, started on the main thread (the kernel ties its life to the thread that started it) and started
anew when it died. Whatever ends the worker ends the zygote and all hosts.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import structlog

from distaff.errors import EnvironmentLoadError

log = structlog.get_logger(__name__)
START_TIMEOUT_S = 120.0
STATUS_WAIT_S = 5.0
KEPT_FROM_ENVIRONMENTS = ("DISTAFF_REDIS_URL",)
"""Variables that environment code has no use for."""


class Launcher:
    """Used from the worker's loop; not tied to one loop."""

    def __init__(self) -> None:
        self._zygote: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        self._ready = False
        self._threads = ThreadPoolExecutor(1, "distaff-launch")
        """One: requests and answers alternate."""

    def start(self) -> None:
        """Start the zygote, if none runs; it is ready some seconds later. Main thread only."""
        if self._zygote is not None and self._zygote.poll() is None:
            return
        self._end()
        ours, theirs = socket.socketpair()
        environment = {name: value for name, value in os.environ.items() if name not in KEPT_FROM_ENVIRONMENTS}
        with theirs:
            self._zygote = subprocess.Popen(
                [sys.executable, "-m", "distaff_worker.hosting.zygote", str(theirs.fileno()), str(os.getpid())],
                pass_fds=(theirs.fileno(),),
                env=environment,
            )
        ours.settimeout(START_TIMEOUT_S)
        ours.send(json.dumps(sys.path).encode())
        self._control, self._ready = ours, False

    def wait(self) -> None:
        """Return when the zygote answers. Raises EnvironmentLoadError."""
        self._ask({"op": "status", "pid": 0})

    async def fork(self, descriptors: Sequence[int]) -> int:
        """The pid of a new host with these descriptors (socket, board, stack file). Raises EnvironmentLoadError."""
        self.start()
        return int((await self._in_thread(self._ask, {"op": "fork"}, descriptors))["pid"])

    async def status(self, pid: int) -> int | None:
        """How a host that has closed its socket ended, as waitpid has it; None when that cannot be known."""
        try:
            status: int | None = await self._in_thread(self._status, pid)
        except EnvironmentLoadError:
            return None
        return status

    def close(self) -> None:
        """End the zygote; its hosts have ended before, or are killed now."""
        self._end()
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _end(self) -> None:
        if self._control is not None:
            self._control.close()
        if self._zygote is not None:
            self._zygote.kill()
            self._zygote.wait()

    async def _in_thread(self, call: Any, *args: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._threads, call, *args)

    def _status(self, pid: int) -> int | None:
        end = time.monotonic() + STATUS_WAIT_S
        while (status := self._ask({"op": "status", "pid": pid})["status"]) is None and time.monotonic() < end:
            time.sleep(0.02)
        return None if status is None else int(status)

    def _ask(self, request: dict[str, Any], descriptors: Sequence[int] = ()) -> dict[str, Any]:
        control = self._control
        if control is None:
            raise EnvironmentLoadError("the process that starts environments was not started")
        try:
            if not self._ready:
                self._ready = bool(control.recv(4096))
            socket.send_fds(control, [json.dumps(request).encode()], descriptors)
            answer: dict[str, Any] = json.loads(control.recv(4096) or b"null") or {}
        except OSError as error:
            if self._zygote is not None:
                self._zygote.kill()  # an answer that comes too late would be taken for the next one's
            raise EnvironmentLoadError(f"the process that starts environments does not answer: {error}") from error
        if not answer:
            raise EnvironmentLoadError(
                "the process that starts environments has ended; its own message stands above in the log"
            )
        return answer
