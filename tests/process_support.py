"""Processes for tests: which are left of a program that was started, and waiting for something while one runs."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest


def leftovers(mark: str) -> list[int]:
    """Pids of processes whose command line or environment has `mark`."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                text = (entry / "cmdline").read_bytes() + (entry / "environ").read_bytes()
            except OSError:
                continue
            if mark.encode() in text:
                found.append(int(entry.name))
    return found


def wait_until(condition: Callable[[], bool], process: subprocess.Popen[str], *, seconds: float = 60) -> None:
    """Return when the condition holds; fail with what the process wrote when it ends before, or in time does not."""
    end = time.monotonic() + seconds
    while not condition():
        if process.poll() is not None or time.monotonic() > end:
            process.kill()
            pytest.fail(f"exit code {process.returncode}: {process.communicate()}")
        time.sleep(0.05)
