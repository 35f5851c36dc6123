"""The processes of a benchmark: started, talked to in JSON lines, measured, and ended whatever happens.

Invariant: a process that was started here is gone when its `with` block is.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
GRACE_S = 30.0


@dataclass(slots=True, eq=False)
class Child:
    """One process under measurement."""

    process: subprocess.Popen[str]

    def read(self, *, seconds: float = 120.0) -> dict[str, Any]:
        """The next JSON line it wrote. RuntimeError when it ends, or says nothing for so long (and is killed then)."""
        watchdog = threading.Timer(seconds, self.process.kill)
        watchdog.start()
        try:
            line = self.process.stdout.readline() if self.process.stdout else ""
        finally:
            watchdog.cancel()
        if not line:
            raise RuntimeError(f"{self.process.args!r} said nothing; exit code {self.process.poll()}")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def tell(self, **order: Any) -> None:
        if self.process.stdin is None:
            raise RuntimeError("the process takes no orders")
        self.process.stdin.write(json.dumps(order) + "\n")
        self.process.stdin.flush()

    def stop(self) -> None:
        """SIGTERM; its last words can still be read."""
        self.process.terminate()

    @property
    def cpu_s(self) -> float:
        """CPU seconds of the process so far, all threads."""
        return _cpu_s(self.process.pid)

    @property
    def peak_mb(self) -> float:
        """The most memory that was ever resident, MB, and what its children have now (of shared pages their share)."""
        own = _kib(f"/proc/{self.process.pid}/status", "VmHWM:")
        return (own + sum(_kib(f"/proc/{pid}/smaps_rollup", "Pss:") for pid in descendants(self.process.pid))) / 1024


def descendants(pid: int) -> list[int]:
    """Children, grandchildren, ... that are alive."""
    parents = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                parents[int(entry.name)] = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
    found = [child for child, parent in parents.items() if parent == pid]
    return found + [deeper for child in found for deeper in descendants(child)]


def children_cpu_s() -> float:
    """CPU seconds of this process's descendants that are alive, all threads."""
    return sum(_cpu_s(pid) for pid in descendants(os.getpid()))


def _cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _kib(path: str, name: str) -> int:
    lines = Path(path).read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(name))


@contextlib.contextmanager
def role(name: str, *arguments: object, program: str = "") -> Iterator[Child]:
    """The process `benchmarks.roles.<name>` (or module `program`), ended with the block."""
    command = [sys.executable, "-m", program or f"benchmarks.roles.{name}", *map(str, arguments)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1", "DISTAFF_LOG_LEVEL": "info"}
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL if not os.environ.get("BENCH_DEBUG") else None,
        text=True,
    )
    try:
        yield Child(process)
    finally:
        _end(process)


def _end(process: subprocess.Popen[str]) -> None:
    process.terminate()
    try:
        process.wait(GRACE_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    for pipe in (process.stdin, process.stdout):
        if pipe:
            pipe.close()
