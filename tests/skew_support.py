"""Processes whose clock is wrong: a `sitecustomize` shifts what Python takes for the time of day.

Invariant: only the time of day is shifted; monotonic clocks, and so time-outs and sleeps, run as ever. (libfaketime 0.9.10 shifts the
absolute deadlines of `time.sleep` too, which fail then: that tests libfaketime.)
"""

from __future__ import annotations

import os
import time
from pathlib import Path

_SITECUSTOMIZE = """
import datetime, os, time

SHIFT_S = float(os.environ["SKEW_S"])
_time, _time_ns, _real = time.time, time.time_ns, datetime.datetime
time.time = lambda: _time() + SHIFT_S
time.time_ns = lambda: _time_ns() + int(SHIFT_S * 1e9)


class _Both(type):
    def __instancecheck__(cls, value):
        return isinstance(value, _real)


class datetime_(_real, metaclass=_Both):
    @classmethod
    def now(cls, tz=None):
        return _real.fromtimestamp(time.time(), tz)

    @classmethod
    def utcnow(cls):
        return _real.fromtimestamp(time.time(), datetime.timezone.utc).replace(tzinfo=None)

    today = now


datetime.datetime = datetime_
"""


def skewed(folder: Path, hours: float) -> dict[str, str]:
    """Environment variables with which a Python process believes it is so many hours later; its module path is kept."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "sitecustomize.py").write_text(_SITECUSTOMIZE)
    path = os.pathsep.join(filter(None, (str(folder), os.environ.get("PYTHONPATH", ""))))
    return {"PYTHONPATH": path, "SKEW_S": str(hours * 3600)}


def hours_ahead(seconds: float) -> float:
    """How far `seconds`, read by another process just now, is ahead of our clock."""
    return round((seconds - time.time()) / 3600, 2)
