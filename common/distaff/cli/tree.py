"""A tree of child processes that ends as a whole.

Invariant: every child is in a process group of its own; when the `with` block ends, by whatever way, no process of these groups is
left and the private folder is gone. If this process is killed, the guard (`lifeline.py`) does it. Children are told with SIGTERM and,
after their grace, killed. Threads here only read children's output; processes are started from the main thread.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import TracebackType

LIFELINE = str(Path(__file__).with_name("lifeline.py"))
TAIL_LINES = 40
_LONGEST_SOCKET_FOLDER = 80
"""A Unix socket's path may have about 100 bytes."""

Sink = Callable[[str, str], None]
"""(name of the child, a line it wrote)."""


class Child:
    """One process of the tree, and the last lines it wrote."""

    def __init__(self, name: str, process: subprocess.Popen[bytes], sink: Sink) -> None:
        self.name = name
        self.process = process
        self.tail: deque[str] = deque(maxlen=TAIL_LINES)
        self._sink = sink
        self._reader = threading.Thread(target=self._read, name=f"output of {name}", daemon=True)
        self._reader.start()

    @property
    def code(self) -> int | None:
        """None while it runs, else the exit code (negative: the signal that ended it)."""
        return self.process.poll()

    def drained(self, *, timeout_s: float = 2.0) -> None:
        """Wait until what it wrote before its end was handed to the sink."""
        self._reader.join(timeout_s)

    def _read(self) -> None:
        stream = self.process.stdout
        if stream is None:
            return
        with stream:
            for raw in stream:
                line = raw.decode("utf-8", "replace").rstrip("\r\n")
                self.tail.append(line)
                self._sink(self.name, line)


class Tree:
    """Context manager around child processes. `folder` is private to this user and lives as long as the tree."""

    def __init__(self, sink: Sink) -> None:
        self._sink = sink
        self.children: list[Child] = []

    def __enter__(self) -> Tree:
        self.folder = _private_folder()
        self._guard = subprocess.Popen(
            [sys.executable, "-IS", LIFELINE, "guard"],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        self._tell(f"rm {self.folder}")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.stop(self.children, grace_s=0.0)
        finally:
            shutil.rmtree(self.folder, ignore_errors=True)
            if self._guard.stdin is not None:
                with contextlib.suppress(OSError):
                    self._guard.stdin.close()
            self._guard.wait()

    def start(
        self,
        name: str,
        command: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        own_output: bool = False,
    ) -> Child:
        """Start a child. own_output: its standard output is ours (for a final report); everything else goes to the sink."""
        process = subprocess.Popen(
            [sys.executable, "-IS", LIFELINE, "exec", str(os.getpid()), *command],
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=None if own_output else subprocess.PIPE,
            stderr=subprocess.PIPE if own_output else subprocess.STDOUT,
            process_group=0,
        )
        self._tell(f"+ {process.pid}")
        if own_output:
            process.stdout = process.stderr
        child = Child(name, process, self._sink)
        self.children.append(child)
        return child

    def stop(self, children: Iterable[Child], *, grace_s: float, hurry: Callable[[], bool] = lambda: False) -> None:
        """SIGTERM, wait for `grace_s` or until `hurry` says so, then SIGKILL for what is left of each process group."""
        chosen = list(children)
        for child in chosen:
            if child.code is None:
                with contextlib.suppress(ProcessLookupError):
                    child.process.terminate()
        end = time.monotonic() + grace_s
        while time.monotonic() < end and not hurry() and any(child.code is None for child in chosen):
            time.sleep(0.02)
        for child in chosen:
            self._finish(child)

    def report(self, name: str, line: str) -> None:
        """Say something about a child where its own lines go."""
        self._sink(name, line)

    def _finish(self, child: Child) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(child.process.pid, signal.SIGKILL)
        child.process.wait()
        child.drained()
        self._tell(f"- {child.process.pid}")
        if child in self.children:
            self.children.remove(child)

    def _tell(self, line: str) -> None:
        if self._guard.stdin is not None:
            with contextlib.suppress(OSError):
                self._guard.stdin.write(line.encode() + b"\n")
                self._guard.stdin.flush()


def _private_folder() -> Path:
    base = tempfile.gettempdir()
    return Path(tempfile.mkdtemp(prefix="distaff-", dir=base if len(base) < _LONGEST_SOCKET_FOLDER else "/tmp"))  # noqa: S108 - mkdtemp makes it private
