"""Runs the checks of `distaff doctor` in the test's process, with one zygote for all tests."""

from __future__ import annotations

import time
from typing import Any

from distaff.findings import Finding
from distaff.settings import Settings
from distaff_worker.doctor_checks import Examiner
from distaff_worker.doctor_run import diagnose
from tests.farm_support import launcher, run_config


def settings(engine_url: str, sections: dict[str, dict[str, Any]]) -> Settings:
    """Of a small RL run on the marker environment."""
    return Settings(**run_config(engine_url, name="run-1", **sections).model_dump())


async def findings(engine_url: str, *, within_s: float = 90.0, **sections: Any) -> dict[str, Finding]:
    """What the worker's part of the command finds, by check."""
    started = launcher()
    started.start()
    started.wait()
    examiner = Examiner(end=time.monotonic() + within_s, progress=lambda check, done: None)
    await diagnose(examiner, settings(engine_url, sections), started)
    return {finding.check: finding for finding in examiner.findings}


def statuses(found: dict[str, Finding], *of: str) -> set[str]:
    """Of the checks whose names begin so."""
    return {finding.status for check, finding in found.items() if check.startswith(of or ("",))}
