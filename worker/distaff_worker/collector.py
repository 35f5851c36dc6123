"""Keeps Python's garbage collector from walking everything that is loaded while rollouts run.

Invariant: nothing is kept that would have been freed, but cycles wait longer. What is loaded for good (libraries, environments,
tokenizers: half a million objects) is walked once, not again and again: one answer of 8,192 tokens is parsed in a quarter of
the time, and the loop never stands still for it.
"""

from __future__ import annotations

import gc

THRESHOLDS = (500, 1, 3_000)
"""Young and middle collections small enough to take some milliseconds each with thousands of rollouts in flight, when Python's own
take a tenth of a second; full ones, which then take half a second, a hundredth as often: little is left in cycles for them."""


def settle() -> None:
    """To be called when something was loaded for good: collects once, and takes what is left out of all later collections."""
    gc.set_threshold(*THRESHOLDS)
    gc.collect()
    gc.freeze()
