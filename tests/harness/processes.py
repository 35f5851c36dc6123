"""Processes that tests kill, stop and measure, each with everything it started.

Invariant: a child is a process group of its own, and no member of it outlives the `with`. What it says goes to a file, never
into a pipe that could fill up and stop it.
"""

from __future__ import annotations

import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import BinaryIO

ROOT = Path(__file__).parents[2]
KEPT_LOGS = "KEPT_LOGS"
"""Variable with the folder where what children say, and their arguments, are kept: the search for leaked secrets sets it."""


class Child:
    """A process of ours and its group. `with start(...) as child`, or call `kill` in a finally."""

    def __init__(self, process: subprocess.Popen[bytes], log: BinaryIO) -> None:
        self._process = process
        self._log = log
        self.pid = process.pid

    def __enter__(self) -> Child:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.kill()

    @property
    def code(self) -> int | None:
        """The exit code, minus the signal that ended it, None while it runs."""
        return self._process.poll()

    @property
    def log(self) -> str:
        """What it has written to stdout and stderr."""
        size = os.fstat(self._log.fileno()).st_size
        return os.pread(self._log.fileno(), size, 0).decode(errors="replace")

    def kill(self) -> None:
        """SIGKILL to the whole group; returns when the leader is gone. May be called again."""
        self._signal_group(signal.SIGKILL)
        self._process.wait(10)

    def stop(self) -> None:
        """SIGSTOP to the whole group."""
        self._signal_group(signal.SIGSTOP)

    def cont(self) -> None:
        """SIGCONT to the whole group."""
        self._signal_group(signal.SIGCONT)

    def terminate(self) -> None:
        """SIGTERM to the leader alone, as an init system sends it."""
        self._process.terminate()

    def wait(self, seconds: float) -> int:
        """The exit code. Raises TimeoutError, with what it said last, when it is still running then."""
        try:
            return self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            raise TimeoutError(f"still running after {seconds} s:\n{self.log[-3000:]}") from None

    def wait_for(self, text: str, *, seconds: float = 30.0) -> None:
        """Return when `text` is in the log. Raises TimeoutError when it is not in time, or the process ended without it."""
        end = time.monotonic() + seconds
        while text not in self.log:
            if time.monotonic() > end or (self.code is not None and text not in self.log):
                raise TimeoutError(f"no {text!r} (exit code {self.code}):\n{self.log[-3000:]}")
            time.sleep(0.01)

    def _signal_group(self, number: signal.Signals) -> None:
        try:
            os.killpg(self.pid, number)
        except ProcessLookupError:
            return


def start(argv: Sequence[str], *, env: Mapping[str, str] | None = None, cwd: Path = ROOT) -> Child:
    """Start `argv` in a group of its own. env: over this process's environment. See KEPT_LOGS."""
    log = _log_file(argv)
    process = subprocess.Popen(
        list(argv),
        env={**os.environ, **(env or {})},
        cwd=cwd,
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    return Child(process, log)


def _log_file(argv: Sequence[str]) -> BinaryIO:
    """Lives as long as the child, or as long as the folder of KEPT_LOGS."""
    folder = os.environ.get(KEPT_LOGS)
    if not folder:
        return tempfile.TemporaryFile()
    number, path = tempfile.mkstemp(suffix=".log", dir=folder)
    Path(path).with_suffix(".argv").write_text("\n".join(argv))
    return os.fdopen(number, "w+b", buffering=0)


def fds(pid: int) -> int:
    """How many file descriptors it has open."""
    return len(list(Path(f"/proc/{pid}/fd").iterdir()))


def rss_bytes(pid: int) -> int:
    """Its resident memory."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def children(pid: int) -> list[int]:
    """Pids of everything that descends from it and lives, zombies left out."""
    below: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            state, parent = (entry / "stat").read_text().rpartition(")")[2].split()[:2]
        except OSError:
            continue
        if state != "Z":
            below.setdefault(int(parent), []).append(int(entry.name))
    found = list(below.get(pid, ()))
    for child in found:
        found += below.get(child, ())
    return found
