"""docs/promises.md and the tests agree: thirty promises, each with tests that exist."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parent.parent
ROW = re.compile(r"^\| (P\d+) \| [^|]+ \| (whole|part) \| ([^|]+) \| ([^|]*) ?\|$", re.MULTILINE)


def rows() -> list[tuple[str, str, list[str], str]]:
    found = ROW.findall((ROOT / "docs" / "promises.md").read_text())
    return [(name, state, re.findall(r"`(test_\w+)`", tests), missing.strip()) for name, state, tests, missing in found]


def test_every_promise_names_tests_that_exist() -> None:
    """A renamed or deleted test shows here."""
    existing = {
        name
        for path in (ROOT / "tests").glob("test_*.py")
        for name in re.findall(r"^(?:async )?def (test_\w+)", path.read_text(), re.MULTILINE)
    }
    assert [name for name, *_ in rows()] == [f"P{n}" for n in range(1, 31)]
    for name, _, tests, _ in rows():
        assert tests, f"{name} names no test"
        assert set(tests) <= existing, f"{name}: {sorted(set(tests) - existing)}"


def test_what_is_proven_in_part_says_what_is_missing() -> None:
    """And what is whole misses nothing."""
    for name, state, _, missing in rows():
        assert bool(missing) == (state == "part"), name
