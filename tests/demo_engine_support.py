"""Starts the real small engine in a process of its own, once for whoever asks."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass

START_S = 60


@dataclass(frozen=True, slots=True)
class DemoEngine:
    url: str
    model: str
    process: subprocess.Popen[str]
    tokenizer: str = ""
    """Its folder, when it was asked for."""


@contextlib.contextmanager
def demo_engine(*arguments: str) -> Iterator[DemoEngine]:
    """`python -m distaff_worker.demo_engine --port 0 ARGUMENTS`, answering requests; gone at the end."""
    command = [sys.executable, "-m", "distaff_worker.demo_engine", "--port", "0", *arguments]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        line = process.stdout.readline() if process.stdout else ""
        if not line:
            raise RuntimeError(f"the demo engine ended with exit code {process.wait(10)}")
        ready = json.loads(line)
        yield DemoEngine(ready["url"], ready["model"], process, ready.get("tokenizer", ""))
    finally:
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(10)
