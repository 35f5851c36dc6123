"""One seed for each random test: chosen anew each time, printed, and taken from FAULT_SEED to replay a failure.

Invariant: whatever a test draws, it draws from a generator made of its seed.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

VARIABLE = "FAULT_SEED"
"""Not one of ours: distaff refuses variables that begin with DISTAFF_ and are no setting."""


def seed(test: pytest.FixtureRequest | str) -> int:
    """The seed of this test (or of this name). Printed, so that pytest shows it beside a failure."""
    name = test if isinstance(test, str) else test.node.name
    value = int(os.environ.get(VARIABLE) or secrets.randbelow(2**32))
    print(f"{name}: {replay(value)}")
    return value


def replay(value: int) -> str:
    """For assertion messages: how to see it again."""
    return f"replay with {VARIABLE}={value}"


@contextmanager
def seeded(test: pytest.FixtureRequest | str) -> Iterator[int]:
    """The seed; an error that leaves the block carries it as a note."""
    value = seed(test)
    try:
        yield value
    except Exception as error:
        error.add_note(replay(value))
        raise
