"""The worker's part of `distaff doctor`: tokenizer, engine and environment of one run.

Invariant: ends within the time it is given, whatever hangs; leaves nothing behind: no process, no connection, nothing in Redis.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from distaff.findings import Finding
from distaff.logs import adopt_loggers
from distaff.settings import Settings
from distaff_worker.doctor_checks import Examiner
from distaff_worker.hosting.launcher import Launcher

CHECKS = (
    "tokenizer.loads",
    *(f"engine.{name}" for name in ("settings", "mode", "reachable", "model", "tokenizer", "template")),
    *(f"engine.{name}" for name in ("ready", "chat", "tokens", "stop", "bridge")),
    *(f"environment.{name}" for name in ("loads", "rows", "plays", "scores", "tools", "samples")),
)
"""In the order they are shown in."""


def examine(settings: Settings, *, within_s: float, progress: Callable[[str, int], None]) -> list[Finding]:
    """Every finding. Main thread only (it starts processes). progress: told the name of a check and how many are done."""
    examiner = Examiner(end=time.monotonic() + within_s, progress=progress)
    launcher = Launcher()
    launcher.start()
    try:
        # Both this process and the one that starts environments import for seconds: side by side.
        from distaff_worker.doctor_run import diagnose

        adopt_loggers()
        asyncio.run(diagnose(examiner, settings, launcher))
    finally:
        launcher.close()
    return sorted(examiner.findings, key=lambda finding: CHECKS.index(finding.check))
