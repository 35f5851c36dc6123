"""The jobs that the stock `rq worker` is given."""

from __future__ import annotations

import time


def nothing() -> None:
    return None


def nap() -> None:
    time.sleep(0.05)
